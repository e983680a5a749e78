"""Output folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(out: str | Path) -> Iterator[Path]:
    """Gives an empty temporary sibling of `out` that takes its place when the block succeeds.

    What stood at `out` before is replaced; after an error it stays as it was.
    """
    out = Path(out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if out.exists():
            replaced = out.with_name(f".{out.name}.{os.getpid()}.old")
            shutil.rmtree(replaced, ignore_errors=True)
            out.rename(replaced)
            temporary.rename(out)
            shutil.rmtree(replaced)
        else:
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
