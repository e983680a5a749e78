"""The folder that the task and the nodes share: in a mounted volume, or at a URL."""

from __future__ import annotations

import shutil
from pathlib import Path

from thawline.data.storage import Remote, fetch_folder, is_remote, publish_folder
from thawline.folders import whole_folder


def put(folder: str | Path, place: str) -> None:
    """Copies a folder to a place, unless an earlier try did; it is there whole or not at all.

    Raises:
        DataError: It cannot be put there.
    """
    if is_remote(place):
        publish_folder(Path(folder), place)
    elif not Path(place).exists():
        with whole_folder(place) as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)


def fetch(place: str, cache: Path) -> Path:
    """A folder at a place as one of this machine, under `cache` where it has to be brought.

    Raises:
        DataError: It is not there or cannot be fetched.
    """
    return fetch_folder(place, cache) if is_remote(place) else Path(place)


def remove(place: str) -> None:
    """Removes what is at a place, if there is something.

    Raises:
        DataError: The storage does not answer.
    """
    if is_remote(place):
        remote = Remote(place)
        for entry in remote.entries():
            remote.remove(entry.path)
    else:
        shutil.rmtree(place, ignore_errors=True)
