"""What `study.json` says of an arm from its config alone: what it resolves to, what rows meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thawline.config import Config
from thawline.theory.timing import replayed_by_epoch
from thawline.training.schedule import Plan, Schedule, Windows


def resolved(config: Config) -> dict[str, Any]:
    """What comparisons of arms are most often about, of the arm's own config."""
    return {
        "recipe": config.finetune.recipe,
        "table_learning_rate": config.tables.item.learning_rate,
        "optimizer": config.tables.item.optimizer,
        "adapter": config.model.adapter,
        "epochs": config.finetune.epochs,
        "staleness": config.finetune.staleness,
    }


def exposure(config: Config, schedule: Schedule) -> dict[str, dict[str, Any]]:
    """What the rows of each ID table and the network do to each other in a run.

    `replayed` is the share of the examples that are written into the table and shown again (the
    timing law, `theory.timing`): what it may have memorised. `moving` is the share of the network's
    training before the last epoch in which the table trains that is on moving rows: how much of it
    is on rows that are others when it ends. Both are bounds from the schedule alone. `renewal` says
    that an epoch starts from other rows, which forget what was written; `tiers` has the two shares
    for tiers of rows that train in windows of their own.
    """
    dense = schedule.of("dense").windows
    fresh = config.finetune.examples == "fresh"
    found = {}
    for name in ("item", *config.tables.others):
        plan = schedule.of(name)
        if name == "item" and not config.model.gradient_paths:
            # No gradient reaches the rows, whenever they may train.
            plan = Plan()
        own: dict[str, Any] = _shares(plan.windows, dense, schedule.epochs, fresh=fresh)
        own["renewal"] = plan.renewal
        own["tiers"] = {
            tier: _shares(windows, dense, schedule.epochs, fresh=fresh)
            for tier, windows in plan.tiers
        }
        found[name] = own
    return found


def _shares(windows: Windows, dense: Windows, epochs: int, *, fresh: bool) -> dict[str, float]:
    spans, others = _spans(windows), _spans(dense)
    replayed = 0.0 if fresh else replayed_by_epoch(spans, epochs)[-1]
    # A window that ends with an epoch has no part in the next one.
    last = math.ceil(max((end for _, end in spans), default=1.0)) - 1
    before = _common(others, [(0.0, float(last))])
    trained = _length(before)
    moving = _length(_common(before, spans))
    return {"replayed": replayed, "moving": moving / trained if trained else 0.0}


def _spans(windows: Windows) -> list[tuple[float, float]]:
    return [(window.start, window.end) for window in windows]


def _common(
    spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Where disjoint spans and other disjoint ones overlap."""
    both = [(max(start, a), min(end, b)) for start, end in spans for a, b in others]
    return [(start, end) for start, end in both if start < end]


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
