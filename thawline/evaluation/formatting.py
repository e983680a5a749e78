"""How figures are written on the report's page. What is undefined is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence

DASH = UNDEFINED = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"

_LABELS = {
    "auc": "AUC",
    "user_auc": "AUC within users",
    "request_auc": "AUC within requests",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "ece": "ECE",
    "mrr": "MRR",
    "positive_logit": "mean logit of positives",
}
TERMS = {
    "AUC": "How often a positive is scored above a negative; 0.5 is chance. Within users or "
    "requests: the mean of theirs.",
    "HIT@k": "Share of the requests with a positive whose k best candidates hold one.",
    "NDCG@k": "Gain of the positives among the k best, less the lower they stand; 1 is the best "
    "order.",
    "MRR": "Mean over requests of 1 over the first positive's place.",
    "log loss": "Mean cross-entropy a candidate, in nats; lower is better.",
    "normalized entropy": "Log loss over that of always predicting the mean rate; below 1 is "
    "better than that.",
    "calibration": "Mean prediction over the observed rate; 1 is right.",
    "ECE": "Mean distance of predictions from observed rates, over bins; 0 is right.",
    "head, torso, tail, cold": "Items by how often the fine-tuning window holds them; cold ones "
    "not at all, or hardly.",
    "oracle": "What the simulator's true probabilities reach: the ceiling.",
}
"""What a reader may want to look up."""

_COUNTED = ("hit@", "ndcg@", "recall@")


def label(name: str) -> str:
    """A figure's name for a reader: `hit@3` is `HIT@3`."""
    if name.startswith(_COUNTED):
        kind, _, k = name.partition("@")
        return f"{kind if kind == 'recall' else kind.upper()}@{k}"
    return _LABELS.get(name, name.replace("_", " "))


def figure(value: float | None, digits: int = 4) -> str:
    """A figure with so many decimals."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    return f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 4) -> str:
    """A difference, with its sign."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    return f"{value:+.{digits}f}".replace("-", MINUS)


def interval(bounds: Sequence[float | None] | None, *, sign: bool = False) -> str | None:
    """`0.71–0.75`, or with signs `+0.01 to +0.03`; None where there is no interval."""
    if bounds is None or any(bound is None or not math.isfinite(bound) for bound in bounds):
        return None
    low, high = bounds
    return f"{signed(low)} to {signed(high)}" if sign else f"{figure(low)}{DASH}{figure(high)}"


def count(value: float | None) -> str:
    """A whole number with thousands apart."""
    return UNDEFINED if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as a time that a person would say."""
    if seconds is None:
        return UNDEFINED
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
