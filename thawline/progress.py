"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thawline import logs

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows progress while the block runs and gives a function that sets how much is done.

    Args:
        description: What is being done.
        total: How much there is to do.
    """
    console = Console(stderr=True)
    if not console.is_terminal or logs.as_json():
        yield _lines(description, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


def _lines(description: str, total: int) -> Callable[[int], None]:
    printed = time.monotonic()

    def show(done: int) -> None:
        nonlocal printed
        if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            share = f" ({done / total:.0%})" if total else ""
            logs.say(f"{description}: {done:,} of {total:,}{share}")

    return show
