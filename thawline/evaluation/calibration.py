"""Whether predicted probabilities are rates: log loss, normalized entropy, ratio, ECE, reliability.

Everything is computed in float64 from logits.
"""

from __future__ import annotations

import math

import numpy as np

BINS = 15
"""Bins of the expected calibration error and of the reliability curve."""


def log_loss(
    logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None
) -> float | None:
    """Mean binary cross-entropy in nats; None for no candidate of any weight.

    Args:
        logits: [K].
        labels: [K], 0 or 1.
        weight: [K], at least 0; None: all alike.
    """
    return mean(cross_entropy(logits, labels), weight)


def normalized_entropy(
    logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None
) -> float | None:
    """Log loss over that of always predicting the observed rate (He et al. 2014).

    Below 1, the model knows more than the rate. Arguments are those of `log_loss`.

    Returns:
        None where one of the classes is absent.
    """
    loss, rate = log_loss(logits, labels, weight), mean(np.asarray(labels, np.float64), weight)
    return None if loss is None or rate is None else over_entropy(loss, rate)


def over_entropy(loss: float, rate: float) -> float | None:
    """A log loss over the entropy of a rate, in nats; None where that is 0."""
    if not 0.0 < rate < 1.0:
        return None
    return loss / -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def calibration_ratio(
    logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None
) -> float | None:
    """Mean predicted probability over the observed rate: above 1, the model promises too much.

    Arguments are those of `log_loss`.

    Returns:
        None where there is no positive.
    """
    predicted = mean(sigmoid(logits), weight)
    observed = mean(np.asarray(labels, np.float64), weight)
    return predicted / observed if predicted is not None and observed else None


def expected_calibration_error(
    logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None, bins: int = BINS
) -> float | None:
    """Mean distance of predicted and observed rates over the bins of `reliability`.

    Bins hold equally many candidates, or equal weight (the adaptive ECE of Nguyen & O'Connor 2015),
    since click probabilities crowd in a corner of [0, 1]. A perfectly calibrated model's is above 0
    by chance. Arguments are those of `log_loss`.
    """
    order = np.argsort(logits)
    sorted_weight = None if weight is None else np.asarray(weight, np.float64)[order]
    return ece_in_order(
        sigmoid(np.asarray(logits)[order]), np.asarray(labels)[order], sorted_weight, bins
    )


def reliability(
    probability: np.ndarray,
    labels: np.ndarray,
    bins: int = BINS,
    weight: np.ndarray | None = None,
) -> list[dict[str, float | int]]:
    """Predicted against observed rates in at most `bins` bins of about equally many candidates.

    With weights, of about equal weight: a weight of 2 is the candidate twice. Equal probabilities
    share a bin, so a constant scorer has one.

    Returns:
        `{"predicted": mean probability, "observed": share of positives, "candidates": n}` a bin,
        in order of the probability; bins without weight are left out.
    """
    order = np.argsort(probability)
    sorted_weight = None if weight is None else np.asarray(weight, np.float64)[order]
    binned = _binned(
        np.asarray(probability, np.float64)[order], np.asarray(labels)[order], sorted_weight, bins
    )
    return [
        {"predicted": float(p / w), "observed": float(o / w), "candidates": int(n)}
        for p, o, w, n in zip(*binned, strict=True)
        if w > 0
    ]


def ece_in_order(
    probability: np.ndarray, labels: np.ndarray, weight: np.ndarray | None, bins: int = BINS
) -> float | None:
    """`expected_calibration_error` of ascending probabilities [K]."""
    predicted, observed, mass, _ = _binned(probability, labels, weight, bins)
    whole = float(mass.sum())
    return float(np.abs(predicted - observed).sum()) / whole if whole > 0 else None


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 [K]: binary cross-entropy of each candidate, in nats."""
    signed = np.where(np.asarray(labels, bool), -1.0, 1.0) * np.asarray(logits, np.float64)
    return np.maximum(signed, 0.0) + np.log1p(np.exp(-np.abs(signed)))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """float64 [K]: probabilities."""
    wide = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1.0, small) / (1.0 + small)


def logit(probability: np.ndarray) -> np.ndarray:
    """float64 [K]: finite, whatever the probabilities."""
    epsilon = np.finfo(np.float64).eps
    clipped = np.asarray(probability, np.float64).clip(epsilon, 1.0 - epsilon)
    return np.log(clipped) - np.log1p(-clipped)


def mean(values: np.ndarray, weight: np.ndarray | None = None) -> float | None:
    """Mean of [K]; None for nothing of any weight."""
    if weight is None:
        return float(values.mean()) if len(values) else None
    whole = float(weight.sum())
    return float((weight * values).sum()) / whole if whole > 0 else None


def _binned(
    ordered: np.ndarray, labels: np.ndarray, weight: np.ndarray | None, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each bin: weight times predictions, of positives, weight, and candidates."""
    count = len(ordered)
    if not count:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0, np.int64)
    if weight is None:
        targets = (np.arange(1, bins) * count) // bins
    else:
        until = np.cumsum(weight)
        # Where the same candidates, as often as their weight, would be cut.
        targets = np.searchsorted(until * bins, np.arange(1, bins) * until[-1], side="right")
        targets = targets.clip(max=count - 1)
    # A cut moves down to the start of its run of ties.
    cuts = np.searchsorted(ordered, ordered[targets])
    edges = np.unique(np.concatenate(([0], cuts)))
    sizes = np.diff(np.append(edges, count))
    positive = np.asarray(labels, np.float64)
    if weight is not None:
        ordered, positive = weight * ordered, weight * positive
    mass = sizes.astype(np.float64) if weight is None else np.add.reduceat(weight, edges)
    return np.add.reduceat(ordered, edges), np.add.reduceat(positive, edges), mass, sizes
