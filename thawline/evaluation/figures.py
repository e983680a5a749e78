"""The figures of one action on a slice, and what of them each user contributes.

A hold-out's candidates are sorted once for each order that figures need; a slice takes its part of
each order, which is sorted already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from thawline.evaluation import auc, calibration, ranking
from thawline.evaluation.ranking import RequestFigures, defined_mean
from thawline.evaluation.scored import Scored


@dataclass(frozen=True)
class Part:
    """The candidates of a slice, int64 [n] each, in three orders."""

    rising: np.ndarray
    """By score."""
    by_request: np.ndarray
    """By request, the best first."""
    by_user: np.ndarray | None
    """By user, the worst first; None where users are not known."""


class Column:
    """One action's scores of a hold-out, sorted for every slice."""

    def __init__(self, scored: Scored, logits: np.ndarray, labels: np.ndarray, k: int) -> None:
        """Sorts the candidates.

        Args:
            scored: Whose candidates they are.
            logits: [K].
            labels: [K], 0 or 1.
            k: Of HIT@k and NDCG@k.
        """
        self.k = k
        self.scored = scored
        self.logits = logits
        self.positive = np.asarray(labels, bool)
        self.loss = calibration.cross_entropy(logits, labels)
        self.weight = scored.candidate_weight
        rising = np.argsort(logits)
        self.rank = np.empty(len(rising), np.int64)
        self.rank[rising] = auc.ranks_in_order(logits[rising])
        self.falling = self.rank.max(initial=0) - self.rank
        self.request = scored.request_index
        self.user = None if scored.user is None else scored.user[self.request]
        by_user = None if self.user is None else auc.by_group(self.user, self.rank)
        self.whole = Part(rising, auc.by_group(self.request, self.falling), by_user)

    def parts(self, codes: np.ndarray, count: int) -> Iterator[Part]:
        """The slices 0 to `count - 1` of candidates with `codes`, int [K]; others are in none."""
        rising = _split(self.whole.rising, codes, count)
        by_request = _split(self.whole.by_request, codes, count)
        by_user: list[np.ndarray] | list[None] = [None] * count
        if self.whole.by_user is not None:
            by_user = _split(self.whole.by_user, codes, count)
        for orders in zip(rising, by_request, by_user, strict=True):
            yield Part(*orders)

    def measure(self, part: Part, requests: RequestFigures | None = None) -> Measured:
        """Looks at a slice; `requests` spares their figures, where whole requests are cut."""
        if requests is None:
            order = part.by_request
            requests = ranking.request_figures(
                self.falling[order], self.positive[order], self.request[order], self.k
            )
        return Measured(self, part, requests)


class Measured:
    """One action on one slice."""

    def __init__(self, column: Column, part: Part, requests: RequestFigures) -> None:
        """Takes the slice's candidates in order of their score."""
        self.column = column
        self.part = part
        self.requests = requests
        rising = part.rising
        self.positive = column.positive[rising]
        self.weight = None if column.weight is None else column.weight[rising]
        self.rank = column.rank[rising]

    @cached_property
    def wins(self) -> np.ndarray:
        """`doubled_wins` of the candidates in order of their score, [n]."""
        return auc.doubled_wins(self.rank, self.positive, self.weight)

    @cached_property
    def probability(self) -> np.ndarray:
        """float64 [n], ascending."""
        return calibration.sigmoid(self.column.logits[self.part.rising])

    @cached_property
    def auc(self) -> float | None:
        """Of the whole slice."""
        return auc.auc_in_order(self.rank, self.positive, self.weight)

    @cached_property
    def users(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The users of the slice, int64 [u], and the AUC of each, NaN where it is undefined."""
        order = self.part.by_user
        if order is None or self.column.user is None:
            return None
        who = self.column.user[order]
        starts = auc.run_starts(who)
        weight = None if self.column.weight is None else self.column.weight[order]
        found = auc.group_aucs(self.column.rank[order], self.column.positive[order], starts, weight)
        return who[starts], found

    def figures(self) -> dict[str, Any]:
        """M, as `metrics.holdout_metrics` describes it."""
        k, requests = self.column.k, self.requests
        loss = calibration.mean(self.column.loss[self.part.rising], self.weight)
        rate = calibration.mean(self.positive.astype(np.float64), self.weight)
        predicted = calibration.mean(self.probability, self.weight)
        weight = self.column.scored.weight
        by_request = None if weight is None else weight[requests.request]
        return {
            "auc": self.auc,
            "user_auc": None if self.users is None else defined_mean(self.users[1]),
            "request_auc": defined_mean(requests.auc, by_request),
            "log_loss": loss,
            "normalized_entropy": (
                None if loss is None or rate is None else calibration.over_entropy(loss, rate)
            ),
            "calibration": predicted / rate if predicted is not None and rate else None,
            "ece": calibration.ece_in_order(self.probability, self.positive, self.weight),
            f"hit@{k}": defined_mean(requests.hit, by_request),
            f"ndcg@{k}": defined_mean(requests.ndcg, by_request),
            "mrr": defined_mean(requests.reciprocal, by_request),
            "positive_logit": self._positive_logit(),
            "positives": int(self.positive.sum()),
            "candidates": len(self.positive),
        }

    def _positive_logit(self) -> float | None:
        logits = self.column.logits[self.part.rising][self.positive]
        weight = None if self.weight is None else self.weight[self.positive]
        return calibration.mean(logits.astype(np.float64), weight)


def request_slices(requests: RequestFigures, codes: np.ndarray, count: int) -> list[RequestFigures]:
    """Figures of whole requests, cut by the requests' `codes`, int [R]."""
    chosen = _split(np.arange(len(requests.request)), codes[requests.request], count)
    return [requests.take(own) for own in chosen]


def _split(order: np.ndarray, codes: np.ndarray, count: int) -> list[np.ndarray]:
    """The candidates of each code, in the order given."""
    own = codes[order].astype(np.int16)
    # Stable, and by radix for so short a type.
    sorting = np.argsort(own, kind="stable")
    edges = np.searchsorted(own[sorting], np.arange(count + 1))
    chosen = order[sorting]
    return [chosen[edges[code] : edges[code + 1]] for code in range(count)]
