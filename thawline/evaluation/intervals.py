"""95 % intervals by a bootstrap over users: users are drawn with replacement, with all they did.

Every figure but the AUC is a function of sums over users, so a resample is a row of counts times a
matrix. The AUC is a sum over pairs of users,

    AUC(w) = sum_uv w_u w_v K_uv / (sum_u w_u P_u) (sum_v w_v N_v),

where `K_uv` counts the pairs that positives of u win against negatives of v, and `P`, `N` are the
users' positives and negatives. Below `LINEAR_FROM` users each resample's is computed exactly, from
sums along the sorted scores. From there on its linear part is taken: with `A` the AUC and
`K'_uv = K_uv - A P_u N_v`, whose sum is 0,

    sum_uv w_u w_v K'_uv = sum_u w_u (sum_v K'_uv + K'_vu) + sum_uv (w_u - 1)(w_v - 1) K'_uv.

The last term is of order 1 / users where the first is of order 1 / sqrt(users); its mean over
resamples, `sum_u K'_uu`, stands for it. At 2,000 users that moves a resample by about 2 % of the
spread, less than 1,000 resamples leave to chance in the ends of an interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from thawline.evaluation.figures import Measured

LINEAR_FROM = 2_000
"""From so many users on, resampled AUCs are their linear part."""

SEED = 0
"""The same users are drawn for every model, so that intervals compare."""

SHARES = (2.5, 97.5)
"""Percentiles of the resamples that are an interval's ends."""

BLOCK = 1 << 23
"""Counts of users, or of candidates, that are held at a time."""

WIDTH = 13
"""Sums that a slice's figures are made of."""


def figure_names(k: int) -> tuple[str, ...]:
    """Figures that have an interval, in the order of `UserSums.figures`.

    The ECE has none: that of a resample is above the sample's by construction. Nor has the mean
    logit of positives, which no verdict is made of.
    """
    return (
        "auc",
        "user_auc",
        "request_auc",
        "log_loss",
        "normalized_entropy",
        "calibration",
        f"hit@{k}",
        f"ndcg@{k}",
        "mrr",
    )


class UserSums:
    """One action on one slice: what each of U users contributes to its figures."""

    def __init__(self, measured: Measured, user: np.ndarray) -> None:
        """Sums over each user's candidates and requests.

        Args:
            measured: The slice.
            user: int64 [R]: the users of the whole hold-out's requests, from 0 on.
        """
        column, requests = measured.column, measured.requests
        num_users = int(user.max(initial=-1)) + 1
        who = user[column.request[measured.part.rising]]
        weight = np.ones(len(who)) if measured.weight is None else measured.weight
        positive = measured.positive

        def of(values: np.ndarray, users: np.ndarray = who) -> np.ndarray:
            return np.bincount(users, values, minlength=num_users)

        self.point = measured.auc
        self.pairs_within = 0.0
        self.names = figure_names(column.k)
        asking = user[requests.request]
        counts = np.ones(len(asking))
        if column.scored.weight is not None:
            counts = column.scored.weight[requests.request]
        up, whole = of(weight * positive), of(weight)
        down = whole - up
        won = of(weight * measured.wins) / 2
        if self.point is not None:
            won -= self.point * (up * down.sum() + down * up.sum())
        self.sums = np.zeros((num_users, WIDTH))
        self.sums[:, :5] = np.stack(
            [
                of(weight * column.loss[measured.part.rising]),
                up,
                of(weight * measured.probability),
                whole,
                won,
            ],
            axis=1,
        )
        for place, values in enumerate(
            (requests.hit, requests.ndcg, requests.reciprocal, requests.auc)
        ):
            known = ~np.isnan(values)
            self.sums[:, 5 + place] = of((counts * values)[known], asking[known])
        self.sums[:, 9] = of(counts * ~np.isnan(requests.hit), asking)
        self.sums[:, 10] = of(counts * ~np.isnan(requests.auc), asking)
        if measured.users is not None:
            own, found = measured.users
            self.sums[own, 11] = np.nan_to_num(found)
            self.sums[own, 12] = ~np.isnan(found)
            if self.point is not None:
                within = np.nansum(found * (up * down)[own]) - self.point * (up * down).sum()
                self.pairs_within = float(within)
        self.exact = None
        if num_users < LINEAR_FROM and self.point is not None:
            self.exact = _Pairs(who, measured.rank, positive, weight)

    def figures(self, counts: np.ndarray, sums: np.ndarray) -> dict[str, np.ndarray]:
        """The figures of B resamples, [B] each; NaN where one is undefined.

        Args:
            counts: [B, U]: how often each user was drawn.
            sums: [B, WIDTH]: `counts @ self.sums`.
        """
        loss, positives, predicted, whole, won = sums[:, :5].T
        negatives = whole - positives
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = positives / whole
            entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
            if self.point is None:
                area = np.full(len(sums), np.nan)
            elif self.exact is not None:
                area = self.exact.aucs(counts)
            else:
                area = (self.point + (won + self.pairs_within) / (positives * negatives)).clip(
                    0.0, 1.0
                )
            values = (
                area,
                sums[:, 11] / sums[:, 12],
                sums[:, 8] / sums[:, 10],
                loss / whole,
                loss / whole / entropy,
                predicted / positives,
                sums[:, 5] / sums[:, 9],
                sums[:, 6] / sums[:, 9],
                sums[:, 7] / sums[:, 9],
            )
        return dict(zip(self.names, values, strict=True))


class _Pairs:
    """The pairs of positives and negatives, for exact AUCs of resamples."""

    def __init__(
        self, user: np.ndarray, rank: np.ndarray, positive: np.ndarray, weight: np.ndarray
    ) -> None:
        """Takes candidates in order of their rank, [n] each."""
        self.positives, self.negatives = user[positive], user[~positive]
        self.up, self.down = weight[positive], weight[~positive]
        below = rank[~positive]
        self.low = np.searchsorted(below, rank[positive], side="left")
        self.high = np.searchsorted(below, rank[positive], side="right")

    def aucs(self, counts: np.ndarray) -> np.ndarray:
        """[B] from counts [B, U]; NaN where a class was not drawn."""
        step = max(1, BLOCK // (len(self.up) + len(self.down)))
        found = []
        for start in range(0, len(counts), step):
            drawn = counts[start : start + step]
            fallen = np.zeros((len(drawn), len(self.down) + 1))
            np.cumsum(drawn[:, self.negatives] * self.down, axis=1, out=fallen[:, 1:])
            risen = drawn[:, self.positives] * self.up
            won = (risen * (fallen[:, self.low] + fallen[:, self.high])).sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                found.append(won / (2 * risen.sum(axis=1) * fallen[:, -1]))
        return np.concatenate(found)


def intervals(
    slices: Mapping[tuple[str, ...], UserSums], resamples: int, seed: int = SEED
) -> dict[tuple[str, ...], dict[str, list[float] | None]]:
    """The 95 % interval of every figure of every slice, all from the same resamples.

    Percentiles of the resamples in which a figure is defined (Efron & Tibshirani 1993, ch. 13).

    Args:
        slices: Slices of one hold-out, by any name.
        resamples: How many.
        seed: Of the draws.

    Returns:
        By the same names, `[low, high]` by figure; None where it is undefined in more than half
        the resamples, or where fewer than two users have a candidate.
    """
    if not slices:
        return {}
    names = list(slices)
    whole = np.concatenate([slices[name].sums for name in names], axis=1)
    drawn: dict[tuple[str, ...], list[dict[str, np.ndarray]]] = {name: [] for name in names}
    for counts in draws(len(whole), resamples, seed):
        sums = counts @ whole
        for place, name in enumerate(names):
            own = sums[:, place * WIDTH : (place + 1) * WIDTH]
            drawn[name].append(slices[name].figures(counts, own))
    found = {}
    for name, blocks in drawn.items():
        enough = np.count_nonzero(slices[name].sums[:, 3]) > 1
        found[name] = {
            figure: _ends(np.concatenate([block[figure] for block in blocks])) if enough else None
            for figure in slices[name].names
        }
    return found


def draws(users: int, resamples: int, seed: int = SEED) -> Iterator[np.ndarray]:
    """How often each user is in each resample: float64 [B, users], block by block.

    The draws depend on `users` and `seed` alone, not on the size of the blocks.
    """
    generator = np.random.default_rng(seed)
    step = max(1, BLOCK // max(users, 1))
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        counts = np.empty((size, users))
        for row in counts:
            row[:] = np.bincount(generator.integers(0, users, users), minlength=users)
        yield counts


def _ends(values: np.ndarray) -> list[float] | None:
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None
    low, high = np.percentile(defined, SHARES)
    return [float(low), float(high)]
