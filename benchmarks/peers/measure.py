"""Running each contestant in a process of its own, and showing what came out."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NEWS_LOG = Path(__file__).parents[3] / "shared" / "data" / "news_clicks.parquet"
"""The real log, where it is at hand; it is not shipped."""


@contextmanager
def measured(**facts: Any) -> Iterator[dict[str, Any]]:
    """Times a block and prints a line of JSON: seconds, CPU seconds, the process's peak memory.

    What the block puts into the dict that it gets is printed too. Imports belong before it.
    """
    result: dict[str, Any] = dict(facts)
    started, busy = time.perf_counter(), time.process_time()
    yield result
    result.setdefault("seconds", time.perf_counter() - started)
    result["cpu"] = time.process_time() - busy
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def run_apart(script: str, *arguments: str) -> dict[str, Any]:
    """Runs a script that prints a line of JSON at the end, and gives that line.

    The caller must be small: a process starts with the peak memory of the one that made it.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; its first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, Console().width)).print(table)


def verdict(name: str, value: float, limit: float, *, least: bool, quick: bool) -> str:
    """A line that says whether a target was met; the targets are not those of small logs."""
    if quick:
        return f"{name} {value:.2f}"
    met = value >= limit if least else value <= limit
    return (
        f"{'met' if met else 'MISSED'}: {name} {value:.2f} "
        f"({'at least' if least else 'at most'} {limit:g})"
    )
