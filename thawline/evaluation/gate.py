"""The gate: whether a model may be registered, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thawline.config import Gate
from thawline.errors import DataError


def decide(
    gate: Gate, metrics: Mapping[str, Mapping[str, Any]], actions: Sequence[str]
) -> tuple[bool, list[str]]:
    """Applies the absolute rule: the primary action's pooled AUC is at least `gate.min_auc`.

    Args:
        gate: The config's `gate` section.
        metrics: Metrics tree of each hold-out (see `metrics.holdout_metrics`).
        actions: The model's actions; the first is the primary one.

    Returns:
        Whether the model passed, and a reason a rule, passed or not.

    Raises:
        DataError: The gate's hold-out was not scored, or its metrics lack the primary action.
    """
    figures = primary_figures(gate, metrics, actions)
    value = figures["auc"]
    name = f"{actions[0]} AUC on {gate.holdout}"
    if value is None or math.isnan(value):
        return False, [
            f"{name} is undefined: {figures.get('positives', 0)} positives among "
            f"{figures.get('candidates', 0)} candidates"
        ]
    if value < gate.min_auc:
        return False, [
            f"{name} is {_apart(value, gate.min_auc)}, below gate.min_auc {gate.min_auc:g}"
        ]
    return True, [f"{name} is {value:.4f}, at least gate.min_auc {gate.min_auc:g}"]


def primary_figures(
    gate: Gate, metrics: Mapping[str, Mapping[str, Any]], actions: Sequence[str]
) -> Mapping[str, Any]:
    """The primary action's pooled figures on the gate's hold-out; arguments as for `decide`.

    Raises:
        DataError: The gate's hold-out was not scored, or its metrics lack the primary action.
    """
    if gate.holdout not in metrics:
        raise DataError(
            f"gate.holdout is {gate.holdout}, but only {', '.join(metrics) or 'nothing'} was "
            "scored",
            "set gate.holdout to a hold-out that the dataset holds",
        )
    pooled: Mapping[str, Mapping[str, Any]] = metrics[gate.holdout]["pooled"]
    primary = actions[0]
    if primary not in pooled:
        raise DataError(
            f"the metrics of {gate.holdout} hold {', '.join(pooled) or 'no action'}, "
            f"not the primary action {primary}",
            "evaluate the model with the dataset that it was fine-tuned on",
        )
    return pooled[primary]


def _apart(value: float, limit: float) -> str:
    """`value` with as many digits as it takes to read as another number than `limit`."""
    for digits in range(4, 17):
        if round(value, digits) != round(limit, digits):
            return f"{value:.{digits}f}"
    return repr(value)
