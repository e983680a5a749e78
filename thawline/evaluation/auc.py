"""Area under the ROC curve: of a whole slice, of each user or request, and the curve's points.

Ties are exact: a tied pair counts half, and without weights pairs are counted in integers.
"""

from __future__ import annotations

import numpy as np


def auc(scores: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float | None:
    """Share of the pairs of a positive and a negative in which the positive scores higher.

    Args:
        scores: [K], without NaN.
        labels: [K], 0 or 1.
        weight: [K], at least 0: a pair counts the product of its weights. None: all alike.

    Returns:
        None where one of the classes is absent.
    """
    order = np.argsort(scores)
    sorted_weight = None if weight is None else np.asarray(weight, np.float64)[order]
    return auc_in_order(np.asarray(scores)[order], np.asarray(labels, bool)[order], sorted_weight)


def group_auc(
    scores: np.ndarray,
    labels: np.ndarray,
    group: np.ndarray,
    weight: np.ndarray | None = None,
) -> float | None:
    """Mean over groups (users or requests) of the AUC within each, where it is defined.

    Every group counts alike; `weight` [K] counts within the groups.

    Args:
        scores: [K], without NaN.
        labels: [K], 0 or 1.
        group: [K], integers from 0.
        weight: [K], at least 0; None: all alike.

    Returns:
        None where no group has both classes.
    """
    order = by_group(np.asarray(group, np.int64), dense_ranks(scores))
    sorted_weight = None if weight is None else np.asarray(weight, np.float64)[order]
    found = group_aucs(
        np.asarray(scores)[order],
        np.asarray(labels, bool)[order],
        run_starts(np.asarray(group)[order]),
        sorted_weight,
    )
    defined = found[~np.isnan(found)]
    return float(defined.mean()) if len(defined) else None


def dense_ranks(scores: np.ndarray) -> np.ndarray:
    """int64 [K]: 0 for the lowest score; ties share a rank."""
    order = np.argsort(scores)
    rank = np.empty(len(order), np.int64)
    rank[order] = ranks_in_order(np.asarray(scores)[order])
    return rank


def ranks_in_order(ordered: np.ndarray) -> np.ndarray:
    """int64 [K]: dense ranks of ascending scores."""
    step = np.zeros(len(ordered), np.int64)
    np.not_equal(ordered[1:], ordered[:-1], out=step[1:], casting="unsafe")
    return np.cumsum(step)


def by_group(group: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """int64 [K]: the order by group, and by rank within one; integers from 0 both."""
    return np.argsort(group * (int(rank.max(initial=0)) + 1) + rank)


def run_starts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal values starts."""
    if not len(values):
        return np.empty(0, np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))


def doubled_wins(
    rank: np.ndarray,
    positive: np.ndarray,
    weight: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> np.ndarray:
    """Of each candidate, twice the weight of the other class that it is rightly ordered against.

    A tied one counts once. The sum over the positives is twice the pairs won, and so is the sum
    over the negatives.

    Args:
        rank: [K], ascending within each group.
        positive: bool [K].
        weight: float64 [K]; None: candidates are counted, in integers.
        starts: Where the groups start within which candidates are compared; None: one group.

    Returns:
        [K], int64 or float64.
    """
    count = len(rank)
    if not count:
        return np.zeros(0, np.int64)
    up = positive.astype(np.int64) if weight is None else np.where(positive, weight, 0.0)
    down = (~positive).astype(np.int64) if weight is None else np.where(positive, 0.0, weight)
    risen = np.concatenate(([0], np.cumsum(up)))
    fallen = np.concatenate(([0], np.cumsum(down)))
    tie = np.empty(count, bool)
    tie[:1] = False
    np.equal(rank[1:], rank[:-1], out=tie[1:])
    if starts is not None:
        tie[starts] = False
    edges = np.append(np.flatnonzero(~tie), count)
    beside = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    below = (fallen[edges[:-1]] + fallen[edges[1:]])[beside]
    above = (risen[edges[:-1]] + risen[edges[1:]])[beside]
    if starts is None:
        return np.where(positive, below, 2 * risen[-1] - above)
    ends = np.append(starts[1:], count)
    sizes = ends - starts
    below -= np.repeat(2 * fallen[starts], sizes)
    return np.where(positive, below, np.repeat(2 * risen[ends], sizes) - above)


def auc_in_order(
    rank: np.ndarray, positive: np.ndarray, weight: np.ndarray | None = None
) -> float | None:
    """The AUC of ascending scores or ranks [K]; None where a class is absent."""
    if not len(rank):
        return None
    value = float(group_aucs(rank, positive, np.zeros(1, np.int64), weight)[0])
    return None if np.isnan(value) else value


def group_aucs(
    rank: np.ndarray,
    positive: np.ndarray,
    starts: np.ndarray,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    """The AUC within each group.

    Args:
        rank: [K], ascending within each group.
        positive: bool [K].
        starts: int64 [G]: where the groups start.
        weight: float64 [K]; None: all alike.

    Returns:
        float64 [G]; NaN where a class is absent.
    """
    if not len(starts):
        return np.empty(0)
    if weight is None:
        won, pairs = _counted(rank, positive, starts)
    else:
        up = np.where(positive, weight, 0.0)
        mass = np.add.reduceat(up, starts)
        pairs = 2 * mass * (np.add.reduceat(weight, starts) - mass)
        # Differences of sums of weights: what is left of a class that is absent is rounding.
        both = np.logical_or.reduceat(up > 0, starts)
        both &= np.logical_or.reduceat((weight > 0) & ~positive, starts)
        pairs[~both] = 0.0
        won = np.add.reduceat(up * doubled_wins(rank, positive, weight, starts), starts)
    return np.divide(won, pairs, out=np.full(len(starts), np.nan), where=pairs > 0)


def _counted(
    rank: np.ndarray, positive: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [G] each: twice the pairs won within each group, and twice its pairs.

    Looks at the ties of positives alone, which are few: this is most of what slices cost.
    """
    count = len(rank)
    risen = np.zeros(count + 1, np.int64)
    np.cumsum(positive, out=risen[1:])
    new = np.empty(count, bool)
    np.not_equal(rank[1:], rank[:-1], out=new[1:])
    new[starts] = True
    edges = np.append(np.flatnonzero(new), count)
    fallen = edges - risen[edges]
    own = (np.cumsum(new) - 1)[positive]
    won = np.concatenate(([0], np.cumsum(fallen[own] + fallen[own + 1])))
    ends = np.append(starts[1:], count)
    positives = risen[ends] - risen[starts]
    before = starts - risen[starts]
    pairs = 2 * positives * (ends - starts - positives)
    return won[risen[ends]] - won[risen[starts]] - 2 * before * positives, pairs


def roc_curve_points(
    probability: np.ndarray,
    labels: np.ndarray,
    points: int = 101,
    weight: np.ndarray | None = None,
) -> dict[str, list[float]] | None:
    """At most `points` corners of the exact ROC curve, evenly spread along it.

    Returns:
        `{"fpr", "tpr", "threshold"}`, each from (0, 0) to (1, 1); a threshold is the least
        probability that counts as positive there (1 at the start). None where a class is absent.
    """
    values, rank = np.unique(probability, return_inverse=True)
    positive = np.asarray(labels, bool)
    up = _by_rank(rank, positive, len(values), weight)
    right = _by_rank(rank, ~positive, len(values), weight)
    if not up.sum() or not right.sum():
        return None
    tpr = np.concatenate(([0.0], np.cumsum(up) / up.sum()))
    fpr = np.concatenate(([0.0], np.cumsum(right) / right.sum()))
    tpr[-1] = fpr[-1] = 1.0
    threshold = np.concatenate(([1.0], values[::-1].astype(np.float64)))
    way = (tpr + fpr) / 2
    kept = np.unique(np.searchsorted(way, np.linspace(0.0, 1.0, points)).clip(max=len(way) - 1))
    kept = np.union1d(kept, [0, len(way) - 1])
    return {
        "fpr": fpr[kept].tolist(),
        "tpr": tpr[kept].tolist(),
        "threshold": threshold[kept].tolist(),
    }


def _by_rank(
    rank: np.ndarray, chosen: np.ndarray, size: int, weight: np.ndarray | None
) -> np.ndarray:
    """Count or weight of the chosen candidates at each rank, the highest rank first."""
    own = None if weight is None else weight[chosen]
    return np.bincount(rank[chosen], own, minlength=size)[::-1]
