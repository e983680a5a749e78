"""What a table of true and false positives says of scores: for user interfaces that show one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Classification:
    """A ROC curve, and the counts at one of its thresholds."""

    action: str
    fpr: list[float]
    tpr: list[float]
    threshold: list[float]
    """The least probability that counts as positive at each point of the curve."""
    chosen: float
    """The threshold at which about as many candidates are called positive as are positive: at 0.5
    a model of rare actions, however good, would call none so."""
    confusion: list[list[int]]
    """At `chosen`: `[[true negatives, false positives], [false negatives, true positives]]`."""


def classify(tree: Mapping[str, Any]) -> Classification | None:
    """The primary action's ROC curve in a hold-out's metrics tree, and counts at one threshold.

    Args:
        tree: Of `metrics.holdout_metrics`, with `curves`. Counts are exact up to rounding where
            candidates are weighted.

    Returns:
        None where the curve is undefined.
    """
    action = next(iter(tree["pooled"]), None)
    curve = ((tree.get("curves") or {}).get(action) or {}).get("roc")
    if action is None or curve is None:
        return None
    positives = tree["pooled"][action]["positives"]
    negatives = tree["pooled"][action]["candidates"] - positives
    true, false = np.array(curve["tpr"]) * positives, np.array(curve["fpr"]) * negatives
    at = int(np.abs(true + false - positives).argmin())
    hits, alarms = round(true[at]), round(false[at])
    return Classification(
        action,
        curve["fpr"],
        curve["tpr"],
        curve["threshold"],
        curve["threshold"][at],
        [[negatives - alarms, alarms], [positives - hits, hits]],
    )
