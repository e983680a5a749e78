"""A remote place (`s3://`, `gs://`, `hdfs://`) with a copy of each checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thawline.data.storage import FETCHED, Remote, fetch_folder


@dataclass(frozen=True)
class Mirror:
    """Folders below a URL. One counts from the moment on at which its JSON file is there."""

    url: str

    def names(self, head: str) -> list[str]:
        """The folders that hold a file of the name `head`."""
        paths = [path.split("/") for path in self._paths()]
        return [parts[0] for parts in paths if parts[1:] == [head]]

    def put(self, file: Path, name: str) -> None:
        """Copies a file into the folder `name`; the one that makes it count is to come last.

        Raises:
            DataError: The storage does not take it.
        """
        remote = Remote(self.url)
        remote.put(file, f"{remote.path.rstrip('/')}/{name}/{file.name}")

    def get(self, name: str, cache: Path) -> None:
        """Brings a folder to `place(name, cache)`.

        Raises:
            DataError: It is not there, or cannot be fetched.
        """
        fetch_folder(f"{self.url}/{name}", cache)

    def place(self, name: str, cache: Path) -> Path:
        """Where `get` puts a folder, somewhere below `cache`."""
        return cache / FETCHED / Remote(f"{self.url}/{name}").name

    def remove(self, name: str, head: str) -> None:
        """Removes a folder, its `head` first.

        Raises:
            DataError: The storage refuses it.
        """
        remote, paths = Remote(self.url), self._paths()
        own = sorted((p for p in paths if p.startswith(f"{name}/")), key=f"{name}/{head}".__ne__)
        for path in own:
            remote.remove(f"{remote.path.rstrip('/')}/{path}")

    def _paths(self) -> list[str]:
        """Every file, from the URL on."""
        remote = Remote(self.url)
        prefix = remote.path.rstrip("/") + "/"
        return [entry.path.removeprefix(prefix) for entry in remote.entries()]
