"""Output folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thawline.errors import BusyError, DataError, ThawlineError

OURS = (
    "manifest.json",
    "table.json",
    "model.json",
    "evaluation.json",
    "registration.json",
    "events.parquet",
)
"""Files by which a folder is known as one that a stage or the simulator made."""


def place_for(out: str | Path, *, folder: bool) -> Path:
    """The absolute path of an output, whose parent is there afterwards.

    Raises:
        DataError: It cannot be written there, or would take the place of another kind of thing.
    """
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() if folder else out.is_file()):
        kind = "folder" if folder else "file"
        raise DataError(
            f"{out} cannot be written: there is something that is no {kind}",
            "name an output that is new",
        )
    if folder and out.is_dir() and any(out.iterdir()) and not any((out / n).exists() for n in OURS):
        raise DataError(
            f"{out} holds something that no stage made, which would be lost",
            "name a folder that is new or empty",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {out.parent} cannot be made ({error.strerror})",
            "name an output in a place that can be written",
        ) from error
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise DataError(
            f"{out} cannot be written: no permission to write into {out.parent}",
            "name an output in a place that can be written",
        )
    return out


@contextmanager
def whole_folder(out: str | Path) -> Iterator[Path]:
    """Gives an empty temporary sibling of `out` that takes its place when the block succeeds.

    What stood at `out` before is replaced; after an error it stays as it was.

    Raises:
        DataError: The disk is full, or `place_for` finds no place.
    """
    out = place_for(out, folder=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with disk_with_room(out, "free some and run it again"):
            yield temporary
        _replace(out, temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def disk_with_room(out: Path, remedy: str) -> Iterator[None]:
    """A block that writes `out`.

    Raises:
        DataError: The disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(f"{out} cannot be written: no space is left on its disk", remedy) from error


@contextmanager
def resumable_folder(out: str | Path) -> Iterator[Path]:
    """Gives a temporary sibling of `out` that takes its place when the block succeeds.

    After one of our own errors it is removed; where the process was killed or the disk is full it
    stays, and the next block for the same `out` gets it as it was.

    Raises:
        BusyError: Another process is in such a block for the same `out`.
        DataError: The disk is full, or `place_for` finds no place.
    """
    out = place_for(out, folder=True)
    temporary = out.with_name(f".{out.name}.partial")
    with locked_folder(temporary):
        for replaced in out.parent.glob(f".{out.name}.*.old"):
            # A process was killed while it put a new folder in the place of this one.
            if out.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(out)
        kept = f"free some and run it again: what is finished lies in {temporary}"
        with disk_with_room(out, kept):
            try:
                yield temporary
            except ThawlineError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        _replace(out, temporary)


def _replace(out: Path, temporary: Path) -> None:
    if out.exists():
        replaced = out.with_name(f".{out.name}.{os.getpid()}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
        temporary.rename(out)
        shutil.rmtree(replaced)
    else:
        temporary.rename(out)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Makes a folder that no other process holds; its lock ends with this process at the latest.

    Raises:
        BusyError: Another process holds it.
        DataError: It cannot be made, or nothing can be written into it.
    """
    while True:
        _make_writable(folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise BusyError(
                f"{folder} is in use: another process builds the same folder",
                "wait for it, or write into another folder",
            ) from error
        # The other process may have renamed the folder just before.
        if folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle)):
            break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise DataError(
            f"{folder} cannot be written: {why}", "name an output in a place that can be written"
        )
