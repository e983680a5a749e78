"""Logs and folders that lie in s3://, gs:// or hdfs://: brought here, and put there.

Everything goes through pyarrow's file systems. They find their credentials where their makers do,
in the environment, and nowhere else: a URL that holds some is refused.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs

from thawline.data.sources import fingerprints, is_data_file
from thawline.errors import ConfigError, DataError

T = TypeVar("T")

SCHEMES = ("s3", "gs", "hdfs")
ATTEMPTS = 4
"""At a file; within each of them, pyarrow's S3 tries every request thrice."""
GOOGLE_SECONDS = 20
"""For which Google's client tries a request again within an attempt."""
FIRST_PAUSE = 0.2
"""Seconds before the second attempt; each pause is twice the one before."""
AT_ONCE = 8
"""Files copied at the same time."""
INDEX = ".fetched.json"
"""In a folder that was fetched: what lay there, so that the same files are not fetched again."""
PUBLISHED = ".published.json"
"""In a folder that was published: what each file holds, so that the same is not sent again."""
FETCHED = ".fetched"
"""Folder under which files lie by `<scheme>/<bucket>/<path>`."""

PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def origin(file: Path) -> str | None:
    """The URL from which a file of a log was fetched; None for one that was here from the start."""
    parts = file.absolute().parts
    if FETCHED not in parts:
        return None
    scheme, *path = parts[parts.index(FETCHED) + 1 :]
    return f"{scheme}://{'/'.join(path)}"


def is_remote(location: str | Path) -> bool:
    """Whether a location is a URL of one of `SCHEMES`."""
    return isinstance(location, str) and location.partition("://")[0] in SCHEMES


@dataclass(frozen=True)
class Entry:
    """A remote file."""

    path: str
    """Bucket and key, or the path on the file system."""
    size: int
    changed: int
    """Nanoseconds since 1970."""


class Remote:
    """A place in a remote file system."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Raises:
            ConfigError: A URL with a password in it, or a file system that is not to be had here.
        """
        parts = urlsplit(url)
        self.url = url
        if parts.password is not None or (parts.username and parts.scheme != "hdfs"):
            raise ConfigError(
                f"{parts.scheme}://...@{parts.hostname}{parts.path}: the URL holds credentials",
                "drop them and set them in the environment, such as AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY",
            )
        # A glob is no URI; what it matches is found by listing.
        root = f"{parts.scheme}://{parts.netloc}"
        # Google's client would go on for a quarter of an hour, even without credentials.
        limit = f"?retry_limit_seconds={GOOGLE_SECONDS}" if parts.scheme == "gs" else ""
        try:
            self._files, base = fs.FileSystem.from_uri(root + limit)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{url}: there is no access to {root}: {_line(error)}",
                "for hdfs:// the Hadoop client (libhdfs, CLASSPATH) must be installed; for s3:// "
                "and gs:// see the environment variables of the service",
            ) from error
        path = url.removeprefix(root).strip("/")
        self.path = f"{base.rstrip('/')}/{path}" if path else base
        self.name = f"{parts.scheme}/{parts.netloc}/{path}".rstrip("/")
        """Where it lies below a `FETCHED` folder."""
        buckets = isinstance(self._files, fs.S3FileSystem | fs.GcsFileSystem)
        self.home = parts.scheme if buckets else f"{parts.scheme}/{parts.netloc}"
        """Below which a file's path goes on there: that of a bucket begins with its name."""

    def entries(self) -> list[Entry]:
        """The file, every file below the folder, or the files that the glob matches, by path."""

        def find() -> list[Entry]:
            wrapped = ArrowFSWrapper(self._files)
            if any(sign in self.path for sign in "*?["):
                names = [str(name) for name in wrapped.glob(self.path)]
                found = self._files.get_file_info(names) if names else []
            else:
                (own,) = self._files.get_file_info([self.path])
                below = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
                found = [own] if own.is_file else self._files.get_file_info(below)
            files = [info for info in found if info.is_file]
            return sorted(
                (Entry(info.path, info.size, info.mtime_ns or 0) for info in files),
                key=lambda entry: entry.path,
            )

        return self._persist(find, self.url)

    def get(self, path: str, target: Path) -> None:
        """Copies one file here; it appears whole or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")

        def copy() -> None:
            fs.copy_files(
                path,
                str(partial),
                source_filesystem=self._files,
                destination_filesystem=fs.LocalFileSystem(),
                use_threads=False,
            )
            (info,) = self._files.get_file_info([path])
            if partial.stat().st_size != info.size:
                raise OSError(f"{partial.stat().st_size} of {info.size} bytes arrived")

        try:
            self._persist(copy, f"{path} of {self.url}")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def put(self, source: Path, path: str) -> None:
        """Copies one file there."""

        def copy() -> None:
            parent = path.rpartition("/")[0]
            if not isinstance(self._files, fs.S3FileSystem | fs.GcsFileSystem):
                self._files.create_dir(parent, recursive=True)
            fs.copy_files(
                str(source),
                path,
                source_filesystem=fs.LocalFileSystem(),
                destination_filesystem=self._files,
                use_threads=False,
            )
            (info,) = self._files.get_file_info([path])
            if info.size != source.stat().st_size:
                raise OSError(f"{info.size} of {source.stat().st_size} bytes arrived")

        self._persist(copy, f"{path} of {self.url}")

    def remove(self, path: str) -> None:
        """Deletes one file, if it is there."""

        def delete() -> None:
            (info,) = self._files.get_file_info([path])
            if info.is_file:
                self._files.delete_file(path)

        self._persist(delete, f"{path} of {self.url}")

    def _persist(self, operation: Callable[[], T], where: str) -> T:
        """Tries again after a dropped connection, with longer and longer pauses.

        Raises:
            DataError: The last attempt failed too, or there is no sense in another one.
        """
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return operation()
            except OSError as error:
                last = attempt == ATTEMPTS or _permanent(error)
                if last:
                    raise DataError(
                        f"{where}: {_line(error)}"
                        + (f" (attempt {attempt} of {ATTEMPTS})" if attempt > 1 else ""),
                        "check the path, the credentials in the environment and the network",
                    ) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")


def _permanent(error: OSError) -> bool:
    return isinstance(error, PERMANENT) or "ACCESS_DENIED" in str(error)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def list_files(url: str, key: str) -> list[Entry]:
    """The data files that a URL names: a file, a folder of them or a glob; ordered by path.

    Args:
        url: Where they lie.
        key: The config key, for errors.

    Raises:
        ConfigError: See `Remote`.
        DataError: Nothing is there, or the storage does not answer.
    """
    remote = Remote(url)
    prefix = remote.path.rstrip("/") + "/"
    entries = [
        entry
        for entry in remote.entries()
        # Below a folder, other files than the log's are passed over.
        if not entry.path.startswith(prefix) or is_data_file(entry.path.removeprefix(prefix))
    ]
    if not entries:
        raise DataError(f"{key}: {url} names no data file", "check the path")
    return entries


def fetch_files(url: str, cache: Path, key: str) -> list[Path]:
    """Brings a file, a folder of files or the matches of a glob.

    Args:
        url: Where they lie.
        cache: They come to lie in its folder `.fetched`, by scheme, bucket and path. Files that
            are there already and have not changed are not fetched again.
        key: The config key, for errors.

    Raises:
        DataError: Nothing is there, or it cannot be fetched.
    """
    remote, entries = Remote(url), list_files(url, key)
    root = cache / FETCHED / remote.home
    wanted = {entry.path.strip("/"): entry for entry in entries}
    _fetch(remote, wanted, root, prune=False)
    return [root / name for name in wanted]


def fetch_folder(url: str, cache: Path) -> Path:
    """Brings a folder, such as a dataset; gives the local one.

    Files that were fetched before and have not changed are not fetched again.

    Raises:
        DataError: There is no such folder, or it cannot be fetched.
    """
    remote = Remote(url)
    prefix = remote.path.rstrip("/") + "/"
    found = {entry.path.removeprefix(prefix): entry for entry in remote.entries()}
    wanted = {name: entry for name, entry in found.items() if not _hidden(name)}
    if not wanted:
        raise DataError(f"{url} holds nothing", "check the path, or build it first")
    folder = cache / FETCHED / remote.name
    _fetch(remote, wanted, folder, prune=True)
    return folder


def _fetch(remote: Remote, wanted: Mapping[str, Entry], folder: Path, *, prune: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = _read_index(folder)

    def fetch(name: str, entry: Entry) -> None:
        target = folder / name
        # Times are whole seconds; what makes a folder count is small and may change within one.
        fresh = known.get(name) == [entry.size, entry.changed] and not _is_head(name)
        if not (fresh and target.exists() and target.stat().st_size == entry.size):
            remote.get(entry.path, target)

    _all_at_once(fetch, wanted)
    now = {name: [entry.size, entry.changed] for name, entry in wanted.items()}
    if prune:
        for file in folder.rglob("*"):
            if file.is_file() and str(file.relative_to(folder)) not in {*wanted, INDEX}:
                file.unlink()
    else:
        now = known | now
    (folder / INDEX).write_text(json.dumps(now), encoding="utf-8")


def _read_index(folder: Path) -> dict[str, list[int]]:
    try:
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def publish_folder(folder: Path, url: str) -> None:
    """Puts a folder to a URL, in the place of what is there.

    What makes it count, the JSON files at its top (`manifest.json`, `table.json`, ...), is removed
    first and put last: after a failure nobody takes half a folder for a whole one. Files of the
    same content that are there already are not sent again.

    Raises:
        DataError: A file cannot be put there.
    """
    remote = Remote(url)
    prefix = remote.path.rstrip("/") + "/"
    there = {entry.path.removeprefix(prefix): entry for entry in remote.entries()}
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = {name: folder / name for name in names if not _hidden(name)}
    prints = dict(zip(files, fingerprints(files.values()), strict=True))
    sent = _published(remote, prefix, there)
    same = {name for name in files if name in there and sent.get(name) == prints[name]}
    if len(same) == len(files) == len(there.keys() - {PUBLISHED}):
        return
    heads = {name for name in {*files, *there} if _is_head(name)}
    for name in sorted(heads & there.keys()):
        remote.remove(prefix + name)
    for name in there.keys() - files.keys() - heads:
        remote.remove(prefix + name)
    bodies = {name: file for name, file in files.items() if name not in heads | same}
    _all_at_once(lambda name, file: remote.put(file, prefix + name), bodies)
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / PUBLISHED
        index.write_text(json.dumps(prints), encoding="utf-8")
        remote.put(index, prefix + PUBLISHED)
    for name in sorted(heads & files.keys()):
        remote.put(files[name], prefix + name)


def _published(remote: Remote, prefix: str, there: Mapping[str, Entry]) -> dict[str, str]:
    """What the files hold that were published before; nothing if that did not come to its end."""
    if PUBLISHED not in there:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / PUBLISHED
        remote.get(prefix + PUBLISHED, copy)
        try:
            return dict(json.loads(copy.read_text(encoding="utf-8")))
        except ValueError:
            return {}


def _is_head(name: str) -> bool:
    return "/" not in name and name.endswith(".json")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _all_at_once(work: Callable[[str, T], None], items: Mapping[str, T]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in [pool.submit(work, name, item) for name, item in items.items()]:
            result.result()
