"""Folders and URLs: what is read is there, and what is written to can be."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from thawline.errors import ConfigError, DataError

LEAST_FREE_GB = 1.0
"""A checkpoint and a dataset of the smallest log need no more."""
LARGEST_READ = 16_000_000
"""Bytes of a remote file that is fetched to see that files may be read, not only listed."""


def folder(path: str, key: str, least_free_gb: float = LEAST_FREE_GB) -> str:
    """Writes, reads and deletes a file in a local folder, which is made for as long as it takes.

    Args:
        path: The folder.
        key: What names it, for errors.
        least_free_gb: Of its disk.
    """
    root = Path(path)
    made = [each for each in (root, *root.parents) if not each.exists()]
    probe, text = root / f".thawline-doctor-{secrets.token_hex(4)}", secrets.token_hex(32)
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_text(text, encoding="utf-8")
            if probe.read_text(encoding="utf-8") != text:
                raise OSError(errno.EIO, "it gives back something else than was written")
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(root).free / 1e9
    except OSError as error:
        raise ConfigError(
            f"{root.absolute()} cannot be written to: {error.strerror}",
            f"set {key} to a folder that user {os.geteuid()} may write to, or change its owner",
        ) from error
    finally:
        for each in made:
            # It may hold something by now.
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()
    if free < least_free_gb:
        raise ConfigError(
            f"{root.absolute()} has {free:.2f} GB free, less than {least_free_gb:g}",
            f"make room there, or set {key} to a folder on another disk",
        )
    return f"{root.absolute()} takes, gives back and deletes a file; {free:,.1f} GB free"


def url(location: str) -> str:
    """Writes, reads and deletes a file below a URL."""
    from thawline.data.storage import Remote

    remote, text = Remote(location), secrets.token_hex(32)
    path = f"{remote.path.rstrip('/')}/.thawline-doctor-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as scratch:
        source, back = Path(scratch) / "there", Path(scratch) / "back"
        source.write_text(text, encoding="utf-8")
        remote.put(source, path)
        try:
            remote.get(path, back)
        finally:
            remote.remove(path)
        if back.read_text(encoding="utf-8") != text:
            raise DataError(
                f"{location} gives back something else than was written",
                "look at the store and at what stands between",
            )
    return f"{location} takes, gives back and deletes a file"


def inputs(location: str, key: str) -> str:
    """Whether what a config reads is there and can be read."""
    from thawline.data.sources import find_files
    from thawline.data.storage import Remote, is_remote, list_files

    if not is_remote(location):
        files = find_files(location, key)
        for file in files:
            try:
                with file.open("rb") as opened:
                    opened.read(1)
            except OSError as error:
                raise DataError(
                    f"{key}: {file} cannot be read: {error.strerror}",
                    f"let user {os.geteuid()} read it",
                ) from error
        size = sum(file.stat().st_size for file in files)
        return f"{len(files)} files, {size / 1e6:,.1f} MB"
    entries = list_files(location, key)
    least = min(entries, key=lambda entry: entry.size)
    if least.size <= LARGEST_READ:
        with tempfile.TemporaryDirectory() as scratch:
            Remote(location).get(least.path, Path(scratch) / "file")
    read = "the smallest was read" if least.size <= LARGEST_READ else "listed, not read"
    return f"{len(entries)} files, {sum(entry.size for entry in entries) / 1e6:,.1f} MB; {read}"
