"""How high the positives of a request stand among its candidates: HIT@k, NDCG@k, MRR.

Ties are broken at random, and each figure is the exact mean over the ways to break them, so that a
constant scorer gets what a shuffle gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thawline.evaluation.auc import by_group, dense_ranks, group_aucs, run_starts


@dataclass(frozen=True)
class RequestFigures:
    """Figures of n requests, each over its own candidates in a slice."""

    request: np.ndarray
    """int64 [n]: which requests."""
    hit: np.ndarray
    """float64 [n]: HIT@k; NaN for a request without a positive, as below."""
    ndcg: np.ndarray
    """float64 [n]: NDCG@k."""
    reciprocal: np.ndarray
    """float64 [n]: one over the place of the first positive."""
    auc: np.ndarray
    """float64 [n]: NaN for a request with one class alone."""

    def take(self, chosen: np.ndarray) -> RequestFigures:
        """Some of the requests, by mask or index."""
        return RequestFigures(
            self.request[chosen],
            self.hit[chosen],
            self.ndcg[chosen],
            self.reciprocal[chosen],
            self.auc[chosen],
        )


def hit_rate(scores: np.ndarray, labels: np.ndarray, group: np.ndarray, k: int) -> float | None:
    """HIT@k: share of the requests with a positive whose k best candidates hold one.

    Args:
        scores: [K], without NaN.
        labels: [K], 0 or 1.
        group: [K], integers from 0: the request of each candidate.
        k: At least 1.

    Returns:
        None where no request has a positive.
    """
    return defined_mean(_figures(scores, labels, group, k).hit)


def ndcg(scores: np.ndarray, labels: np.ndarray, group: np.ndarray, k: int) -> float | None:
    """NDCG@k: mean over the requests with a positive of DCG@k over the best possible one.

    A positive at place r (from 1) gains `1 / log2(r + 1)` if r is at most k (Järvelin & Kekäläinen
    2002); arguments and result are those of `hit_rate`.
    """
    return defined_mean(_figures(scores, labels, group, k).ndcg)


def mrr(scores: np.ndarray, labels: np.ndarray, group: np.ndarray) -> float | None:
    """Mean over the requests with a positive of one over the place of the first one.

    Arguments and result are those of `hit_rate`.
    """
    return defined_mean(_figures(scores, labels, group, 1).reciprocal)


def defined_mean(values: np.ndarray, weight: np.ndarray | None = None) -> float | None:
    """Mean of the values that are not NaN; None where there is none of any weight."""
    defined = ~np.isnan(values)
    if weight is None:
        return float(values[defined].mean()) if defined.any() else None
    whole = float(weight[defined].sum())
    return float((weight * values)[defined].sum()) / whole if whole > 0 else None


def request_figures(
    falling: np.ndarray, positive: np.ndarray, request: np.ndarray, k: int
) -> RequestFigures:
    """The figures of each request.

    Args:
        falling: [K]: ranks counted from the best score down, ascending within each request.
        positive: bool [K].
        request: int64 [K]: the candidates' requests, those of a request in a row.
        k: At least 1.
    """
    starts = run_starts(request)
    if not len(starts):
        return RequestFigures(np.empty(0, np.int64), *(np.empty(0) for _ in range(4)))
    count = len(request)
    sizes = np.diff(np.append(starts, count))
    tie = np.zeros(count, bool)
    np.equal(falling[1:], falling[:-1], out=tie[1:])
    tie[starts] = False
    edges = np.append(np.flatnonzero(~tie), count)
    run = np.cumsum(~tie) - 1
    num_positives = np.add.reduceat(positive.astype(np.int64), starts)
    some = num_positives > 0
    hit, gain, reciprocal = (np.full(len(starts), np.nan) for _ in range(3))
    if some.any():
        first = np.minimum.reduceat(np.where(positive, np.arange(count), count), starts)[some]
        at = run[first]
        above = edges[at] - starts[some]
        tied = edges[at + 1] - edges[at]
        tied_positives = np.add.reduceat(positive.astype(np.int64), edges[:-1])[at]
        hit[some], reciprocal[some] = _first_place(above, tied, tied_positives, k)
        place = np.arange(count) - np.repeat(starts, sizes)
        discount = np.append(1.0 / np.log2(np.arange(k) + 2.0), 0.0)
        shared = np.add.reduceat(discount[np.minimum(place, k)], edges[:-1]) / np.diff(edges)
        gained = np.add.reduceat(np.where(positive, shared[run], 0.0), starts)[some]
        best = np.cumsum(discount)[np.minimum(num_positives[some], k) - 1]
        gain[some] = gained / best
    return RequestFigures(
        request[starts], hit, gain, reciprocal, 1.0 - group_aucs(falling, positive, starts)
    )


def _first_place(
    above: np.ndarray, tied: np.ndarray, positives: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chance that the first positive is among the first k places, and mean of one over its place.

    Args:
        above: [n]: candidates that score higher than the best positive.
        tied: [n]: candidates with its score, itself included.
        positives: [n]: positives among these.
        k: At least 1.
    """
    hit = np.zeros(len(above))
    reciprocal = np.zeros(len(above))
    # Chance that every tied candidate drawn so far was a negative.
    missed = np.ones(len(above))
    left = np.arange(len(above))
    draw = 0
    while len(left):
        chance = missed[left] * positives[left] / (tied[left] - draw)
        place = above[left] + draw + 1
        reciprocal[left] += chance / place
        hit[left] += np.where(place <= k, chance, 0.0)
        missed[left] -= chance
        draw += 1
        left = left[tied[left] - positives[left] >= draw]
    return hit, reciprocal


def _figures(scores: np.ndarray, labels: np.ndarray, group: np.ndarray, k: int) -> RequestFigures:
    rank = dense_ranks(scores)
    falling = rank.max(initial=0) - rank
    requests = np.asarray(group, np.int64)
    order = by_group(requests, falling)
    positive = np.asarray(labels, bool)[order]
    return request_figures(falling[order], positive, requests[order], k)
