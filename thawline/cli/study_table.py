"""How a study's progress is shown: a live table on a terminal, a line a change elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from thawline.cli.common import escape

if TYPE_CHECKING:
    from thawline.stages.study import Standing

DASH = "\N{EN DASH}"
MARKS = {"waiting": "·", "running": "▸", "finished": "✓", "failed": "✕"}
COLORS = {"running": "yellow", "finished": "green", "failed": "red"}


@contextmanager
def progress(metric: str) -> Iterator[Callable[[Standing, Sequence[Standing]], None]]:
    """Gives what shows a study's changes while the block runs.

    Args:
        metric: What the scores are.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda changed, standings: console.print(
            line(changed, standings, metric), highlight=False, markup=False, soft_wrap=True
        )
        return
    live = Live(console=console, auto_refresh=False)

    def show(changed: Standing, standings: Sequence[Standing]) -> None:
        # Not before trials run: the bars of the stages before them would run into the table.
        if not live.is_started and changed.status == "running":
            live.start()
        if live.is_started:
            live.update(table(standings, metric), refresh=True)

    try:
        yield show
    finally:
        live.stop()


def line(changed: Standing, standings: Sequence[Standing], metric: str) -> str:
    """A change in words: `study: 2 of 6 done, co-train, seed 1 finished: auc 0.7311, 12 s`."""
    done = sum(each.status in ("finished", "failed") for each in standings)
    text = f"study: {done} of {len(standings)} done, {changed.arm}, seed {changed.seed} "
    text += "was finished before" if changed.found else changed.status
    details = []
    if changed.score is not None:
        details.append(f"{metric} {changed.score:.4f}")
    if changed.seconds is not None and not changed.found:
        details.append(f"{changed.seconds:.0f} s")
    if changed.error:
        details.append(changed.error)
    return f"{text}: {', '.join(details)}" if details else text


def table(standings: Sequence[Standing], metric: str) -> Table:
    """The trials of each round and arm, and the mean of what is known of their metric."""
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("arm", "epochs", "seeds"):
        found.add_column(heading)
    for heading in (f"mean {metric}", "seconds"):
        found.add_column(heading, justify="right")
    for arm, round_ in dict.fromkeys((each.arm, each.round) for each in standings):
        own = [each for each in standings if (each.arm, each.round) == (arm, round_)]
        scores = [each.score for each in own if each.score is not None]
        seconds = [each.seconds for each in own if each.seconds is not None]
        found.add_row(
            escape(arm),
            str(round_),
            " ".join(_mark(each) for each in own),
            f"{sum(scores) / len(scores):.4f}" if scores else DASH,
            f"{sum(seconds):.0f}" if seconds else DASH,
        )
    return found


def _mark(standing: Standing) -> str:
    color = COLORS.get(standing.status)
    text = f"{standing.seed}{MARKS[standing.status]}"
    return f"[{color}]{text}[/]" if color else text
