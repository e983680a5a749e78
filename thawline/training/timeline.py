"""A schedule as a picture made of characters: one line a component, one span of cells an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thawline.theory.timing import written_then_replayed
from thawline.training.schedule import Plan, Schedule, Windows

FROZEN, TRAINS, RENEWED = "·", "━", "↺"
CELLS = (12, 6, 4, 2)
"""Cells an epoch: multiples of many, so that halves, thirds and quarters fall on edges."""
WIDTH = 52
"""Characters of a line, so that a name fits behind it on a terminal of 80."""


def cells_for(epochs: int) -> int:
    """The most cells an epoch with which a line fits in `WIDTH`, if any do."""
    return next((cells for cells in CELLS if epochs * (cells + 1) <= WIDTH), CELLS[-1])


def draw(plan: Plan, epochs: int, cells: int | None = None) -> dict[str, str]:
    """When a component trains: one line for it, or one for each of its tiers.

    Args:
        plan: Of the component.
        epochs: Of the run; between two of them stands a `|`, or `RENEWED` where the rows are set
            to others.
        cells: Characters an epoch; None: `cells_for` so many epochs.

    Returns:
        Lines by tier; the tier is empty where the plan has none.
    """
    tiers = dict(plan.tiers) or {"": plan.windows}
    border = RENEWED if plan.renewal else "|"
    cells = cells or cells_for(epochs)
    return {tier: _line(windows, epochs, cells, border) for tier, windows in tiers.items()}


def lines(schedule: Schedule, components: Iterable[str]) -> list[tuple[str, str]]:
    """A line for each component (or tier of one): its name and its picture."""
    return [
        (f"{name} {tier}".rstrip(), picture)
        for name in components
        for tier, picture in draw(schedule.of(name), schedule.epochs).items()
    ]


def describe(
    schedule: Schedule, components: Iterable[str], *, examples: str = "all"
) -> dict[str, Any]:
    """A schedule as plain values, for `schedule.json` and the report.

    `replayed` is the share of examples that a component's training writes and a later epoch shows
    again (`theory.written_then_replayed`): what a table could have memorised. It is 0 where each
    epoch shows other examples (`finetune.examples`: fresh).
    """
    fresh = examples == "fresh"
    return {
        "epochs": schedule.epochs,
        "examples": examples,
        "components": {
            name: _describe(schedule.of(name), schedule.epochs, fresh=fresh) for name in components
        },
    }


def _describe(plan: Plan, epochs: int, *, fresh: bool) -> dict[str, Any]:
    spans = _spans(plan.windows)
    return {
        "windows": spans,
        "tiers": {tier: _spans(windows) for tier, windows in plan.tiers},
        "renewal": plan.renewal,
        "curve": {
            "kind": plan.curve.kind,
            "warm_up": plan.curve.warm_up,
            "restart": plan.curve.restart,
        },
        "reset_state": plan.reset_state,
        "replayed": 0.0 if fresh else written_then_replayed(spans, epochs),
    }


def _spans(windows: Windows) -> list[tuple[float, float]]:
    return [(window.start, window.end) for window in windows]


def _line(windows: Windows, epochs: int, cells: int, border: str) -> str:
    trained = set().union(*(window.steps(cells) for window in windows))
    drawn = [TRAINS if cell in trained else FROZEN for cell in range(epochs * cells)]
    return border.join("".join(drawn[epoch * cells :][:cells]) for epoch in range(epochs))
