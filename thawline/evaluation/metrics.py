"""AUC, log loss and HIT@k of a hold-out, pooled and by tier, and the small curves of a report.

Everything returned is JSON-able: an undefined figure is None, never NaN and never 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thawline.data.manifest import FIRST_ROW, TIERS
from thawline.errors import DataError, ThawlineError, TrainingError
from thawline.evaluation.scored import Scored

COLD = TIERS.index("cold")


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Area under the ROC curve; a tied pair counts half. Exact: pairs are counted in integers.

    Args:
        scores: [K], without NaN.
        labels: [K], 0 or 1.

    Returns:
        None where one of the classes is absent.
    """
    return _auc(_dense_ranks(scores), np.asarray(labels, bool))


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Mean binary cross-entropy in nats, in float64 from logits; None for no candidate.

    Args:
        logits: [K].
        labels: [K], 0 or 1.
    """
    return _mean(_cross_entropy(logits, labels))


def hit_rate(scores: np.ndarray, labels: np.ndarray, group: np.ndarray, k: int) -> float | None:
    """HIT@k: share of the requests with a positive whose k best candidates hold one.

    Where the k-th place is tied, a request counts with the probability that a positive is among
    the first k when ties are broken at random, so that a constant scorer gets what a shuffle gets.

    Args:
        scores: [K], without NaN.
        labels: [K], 0 or 1.
        group: [K], integers from 0: the request of each candidate.
        k: At least 1.

    Returns:
        None where no request has a positive.
    """
    order, falling = _best_first(_dense_ranks(scores), np.asarray(group, np.int64))
    return _hit_rate(falling, np.asarray(labels, bool)[order], np.asarray(group)[order], k)


def holdout_metrics(
    scored: Scored,
    tier: np.ndarray,
    *,
    hit_at: int,
    trivial: Mapping[str, np.ndarray] | None = None,
    first_row: int = FIRST_ROW,
) -> dict[str, Any]:
    """The metrics tree of one hold-out.

    A tier's slice holds the candidates whose item is of that tier; rows below `first_row` (items
    that the catalog does not know) are cold.

    Args:
        scored: The hold-out, scored.
        tier: int8 [num_rows - first_row]: index into `TIERS` of each row from `first_row` on.
        hit_at: The k of HIT@k.
        trivial: Scores [K] of scorers that know next to nothing, by name.
        first_row: First row of the catalog.

    Returns:
        `{"requests", "pooled": {action: M}, "tiers": {tier: {action: M}}, "oracle": {action: M}
        or None, "trivial": {scorer: AUC of the primary action}}` with M = `{"auc", "log_loss",
        "hit@k", "positives", "candidates"}`.

    Raises:
        TrainingError: A score that is NaN or infinite; the message names the request.
        DataError: Labels other than 0 and 1, rows beyond `tier`, or an oracle or trivial scorer
            with unusable values.
    """
    _check(scored, trivial or {})
    tiers = _tier_of(scored.row, tier, first_row)
    pooled: dict[str, Any] = {}
    by_tier: dict[str, Any] = {name: {} for name in TIERS}
    oracle: dict[str, Any] = {}
    for index, action in enumerate(scored.actions):
        column = _Column(scored.logits[:, index], scored.labels[:, index], scored.request_index)
        loss = _cross_entropy(column.scores, column.labels)
        pooled[action] = column.metrics(loss, hit_at, None)
        for code, name in enumerate(TIERS):
            by_tier[name][action] = column.metrics(loss, hit_at, tiers == code)
        known = _oracle(scored, index)
        if known is not None:
            truth = _Column(known, scored.labels[:, index], scored.request_index)
            loss = _cross_entropy(_logit(truth.scores), truth.labels)
            oracle[action] = truth.metrics(loss, hit_at, None)
    return {
        "requests": scored.num_requests,
        "pooled": pooled,
        "tiers": by_tier,
        "oracle": oracle or None,
        "trivial": {
            name: auc(scores, scored.labels[:, 0]) for name, scores in (trivial or {}).items()
        },
    }


def holdout_curves(scored: Scored, *, points: int = 101, bins: int = 12) -> dict[str, Any]:
    """The ROC (the model's and, where known, the oracle's) and the reliability of each action.

    Returns:
        `{action: {"roc": ROC, "oracle_roc": ROC or None, "reliability": [bin, ...]}}`, see
        `roc_curve_points` and `reliability`.

    Raises:
        TrainingError: A score that is NaN or infinite.
        DataError: Labels or an oracle that cannot be used.
    """
    _check(scored, {})
    curves = {}
    for index, action in enumerate(scored.actions):
        probability = _sigmoid(scored.logits[:, index])
        labels = scored.labels[:, index]
        truth = _oracle(scored, index)
        curves[action] = {
            "roc": roc_curve_points(probability, labels, points),
            "oracle_roc": None if truth is None else roc_curve_points(truth, labels, points),
            "reliability": reliability(probability, labels, bins),
        }
    return curves


def roc_curve_points(
    probability: np.ndarray, labels: np.ndarray, points: int = 101
) -> dict[str, list[float]] | None:
    """At most `points` corners of the exact ROC curve, evenly spread along it.

    Returns:
        `{"fpr", "tpr", "threshold"}`, each from (0, 0) to (1, 1); a threshold is the least
        probability that counts as positive there (1 at the start). None where a class is absent.
    """
    values, rank = np.unique(probability, return_inverse=True)
    positive = np.asarray(labels, bool)
    num_positives, num_negatives = int(positive.sum()), int((~positive).sum())
    if not num_positives or not num_negatives:
        return None
    up = np.bincount(rank[positive], minlength=len(values))[::-1]
    right = np.bincount(rank[~positive], minlength=len(values))[::-1]
    tpr = np.concatenate(([0.0], np.cumsum(up) / num_positives))
    fpr = np.concatenate(([0.0], np.cumsum(right) / num_negatives))
    threshold = np.concatenate(([1.0], values[::-1].astype(np.float64)))
    way = (tpr + fpr) / 2
    kept = np.unique(np.searchsorted(way, np.linspace(0.0, 1.0, points)).clip(max=len(way) - 1))
    kept = np.union1d(kept, [0, len(way) - 1])
    return {
        "fpr": fpr[kept].tolist(),
        "tpr": tpr[kept].tolist(),
        "threshold": threshold[kept].tolist(),
    }


def reliability(
    probability: np.ndarray, labels: np.ndarray, bins: int = 12
) -> list[dict[str, float | int]]:
    """Predicted against observed rates in at most `bins` bins of about equally many candidates.

    Equal probabilities share a bin, so a constant scorer has one.

    Returns:
        `{"predicted": mean probability, "observed": share of positives, "candidates": n}` a bin,
        in order of the probability.
    """
    if not len(probability):
        return []
    order = np.argsort(probability)
    ordered = np.asarray(probability, np.float64)[order]
    positive = np.asarray(labels, np.float64)[order]
    targets = (np.arange(1, bins) * len(ordered)) // bins
    # A cut moves down to the start of its run of ties.
    cuts = np.searchsorted(ordered, ordered[targets])
    edges = np.unique(np.concatenate(([0], cuts, [len(ordered)])))
    sizes = np.diff(edges)
    predicted = np.add.reduceat(ordered, edges[:-1]) / sizes
    observed = np.add.reduceat(positive, edges[:-1]) / sizes
    return [
        {"predicted": float(p), "observed": float(o), "candidates": int(n)}
        for p, o, n in zip(predicted, observed, sizes, strict=True)
    ]


class _Column:
    """One action's scores, sorted once for every slice."""

    def __init__(self, scores: np.ndarray, labels: np.ndarray, group: np.ndarray) -> None:
        self.scores = scores
        self.labels = labels.astype(bool)
        self.rank = _dense_ranks(scores)
        self.order, self.falling = _best_first(self.rank, group)
        self.group_in_order = group[self.order]
        self.labels_in_order = self.labels[self.order]

    def metrics(self, loss: np.ndarray, k: int, keep: np.ndarray | None) -> dict[str, Any]:
        """M over the candidates where `keep` (bool [K]) is true; None keeps all."""
        here: Any = slice(None) if keep is None else keep
        sorted_here: Any = slice(None) if keep is None else keep[self.order]
        labels = self.labels[here]
        return {
            "auc": _auc(self.rank[here], labels),
            "log_loss": _mean(loss[here]),
            f"hit@{k}": _hit_rate(
                self.falling[sorted_here],
                self.labels_in_order[sorted_here],
                self.group_in_order[sorted_here],
                k,
            ),
            "positives": int(labels.sum()),
            "candidates": len(labels),
        }


def _dense_ranks(scores: np.ndarray) -> np.ndarray:
    """int64 [K]: 0 for the lowest score; ties share a rank."""
    scores = np.asarray(scores)
    order = np.argsort(scores)
    ordered = scores[order]
    step = np.empty(len(scores), np.int64)
    step[:1] = 0
    np.not_equal(ordered[1:], ordered[:-1], out=step[1:], casting="unsafe")
    rank = np.empty_like(step)
    rank[order] = np.cumsum(step)
    return rank


def _best_first(rank: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order by group, best first within it, and the ranks in that order counted downwards."""
    if not len(rank):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    best = int(rank.max())
    falling = best - rank
    order = np.argsort(group * (best + 1) + falling)
    return order, falling[order]


def _auc(rank: np.ndarray, positive: np.ndarray) -> float | None:
    num_positives = int(positive.sum())
    num_negatives = len(positive) - num_positives
    if not num_positives or not num_negatives:
        return None
    size = int(rank.max()) + 1
    negatives = np.bincount(rank[~positive], minlength=size)
    below = np.cumsum(negatives) - negatives
    at = rank[positive]
    won = int((2 * below[at] + negatives[at]).sum())
    return won / (2 * num_positives * num_negatives)


def _hit_rate(falling: np.ndarray, positive: np.ndarray, group: np.ndarray, k: int) -> float | None:
    """HIT@k of candidates in the order of `_best_first`."""
    if not positive.any():
        return None
    starts, sizes = _runs(group)
    with_positive = np.logical_or.reduceat(positive, starts)
    if not with_positive.all():
        kept = np.repeat(with_positive, sizes)
        falling, positive = falling[kept], positive[kept]
        sizes = sizes[with_positive]
        starts = np.cumsum(sizes) - sizes
    last = np.repeat(falling[starts + np.minimum(sizes, k) - 1], sizes)
    above, tied = falling < last, falling == last
    certain = np.logical_or.reduceat(above & positive, starts)
    places = np.minimum(sizes, k) - np.add.reduceat(above.astype(np.int64), starts)
    num_tied = np.add.reduceat(tied.astype(np.int64), starts)
    tied_positives = np.add.reduceat((tied & positive).astype(np.int64), starts)
    # No positive among `places` draws without replacement from the tied: a product of shares.
    missed = np.ones(len(starts))
    for draw in range(int(places.max())):
        open_place = draw < places
        left = (num_tied - tied_positives - draw)[open_place]
        missed[open_place] *= np.maximum(left, 0) / (num_tied - draw)[open_place]
    return float(np.where(certain, 1.0, 1.0 - missed).mean())


def _runs(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate(([0], np.flatnonzero(group[1:] != group[:-1]) + 1))
    return starts, np.diff(np.append(starts, len(group)))


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    signed = np.where(np.asarray(labels, bool), -1.0, 1.0) * np.asarray(logits, np.float64)
    return np.maximum(signed, 0.0) + np.log1p(np.exp(-np.abs(signed)))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1.0, small) / (1.0 + small)


def _logit(probability: np.ndarray) -> np.ndarray:
    epsilon = np.finfo(np.float64).eps
    clipped = np.asarray(probability, np.float64).clip(epsilon, 1.0 - epsilon)
    return np.log(clipped) - np.log1p(-clipped)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _oracle(scored: Scored, index: int) -> np.ndarray | None:
    """True probabilities [K] of an action; None unless they are known for every candidate."""
    if scored.oracle is None or np.isnan(scored.oracle[:, index]).any():
        return None
    return scored.oracle[:, index]


def _tier_of(row: np.ndarray, tier: np.ndarray, first_row: int) -> np.ndarray:
    if len(row) and int(row.max()) >= first_row + len(tier):
        raise DataError(
            f"candidate row {int(row.max())} is beyond the catalog's last row "
            f"{first_row + len(tier) - 1}",
            "evaluate the model with the dataset that it was fine-tuned on",
        )
    known = row >= first_row
    tiers = np.full(len(row), COLD, np.int8)
    tiers[known] = np.asarray(tier)[row[known] - first_row]
    return tiers


def _check(scored: Scored, trivial: Mapping[str, np.ndarray]) -> None:
    for index, action in enumerate(scored.actions):
        _refuse(
            scored,
            ~np.isfinite(scored.logits[:, index]),
            f"the model's {action} score is NaN or infinite",
            TrainingError,
            "lower finetune.learning_rate and tables.item.learning_rate or set "
            "finetune.clip_norm, and fine-tune again",
        )
        _refuse(
            scored,
            (scored.labels[:, index] != 0) & (scored.labels[:, index] != 1),
            f"label_{action} is neither 0 nor 1",
            DataError,
            "build the dataset again",
        )
        if scored.oracle is not None:
            truth = scored.oracle[:, index]
            _refuse(
                scored,
                (truth < 0) | (truth > 1),
                f"oracle_{action} is not a probability",
                DataError,
                "check the file of events.truth and build the dataset again",
            )
    for name, scores in trivial.items():
        if len(scores) != scored.num_candidates:
            raise DataError(
                f"trivial scorer {name} gave {len(scores)} scores for "
                f"{scored.num_candidates} candidates",
                "score the same candidates",
            )
        _refuse(
            scored,
            np.isnan(scores),
            f"trivial scorer {name} gave NaN",
            DataError,
            "check first_seen and support in the dataset's catalog.parquet",
        )


def _refuse(
    scored: Scored, bad: np.ndarray, what: str, error: type[ThawlineError], remedy: str
) -> None:
    if bad.any():
        first = int(np.argmax(bad))
        request = int(scored.request_id[scored.request_index[first]])
        count = int(bad.sum())
        raise error(
            f"{what} for request_id {request}, candidate row {int(scored.row[first])} "
            f"({count} of {len(bad)} candidates)",
            remedy,
        )
