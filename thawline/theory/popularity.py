"""How often each row of a table is read, held so that sums over a billion rows are short."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thawline.errors import ConfigError, DataError

HEAD = 1 << 16
"""Rows of a Zipf law that are summed one by one."""
NODES = 32
"""Gauss-Legendre nodes in a panel of the tail."""
PANEL = 0.5
"""Widest panel, in log rows."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Popularity:
    """Classes of equally popular rows: a sum over all rows is a weighted sum over the classes."""

    rows: int
    """Rows of the table, those that are never read included."""
    share: Floats
    """float64 [M], falling: the share of lookups that reads one row of the class."""
    weight: Floats
    """float64 [M]: rows in the class; a fraction where the class stands for a piece of a tail."""

    def total(self, term: Callable[[Floats], Floats]) -> float:
        """Sum over the rows that are read of `term(share)`, elementwise over float64 [M]."""
        return float(self.weight @ term(self.share))

    @property
    def hottest(self) -> float:
        """Share of the most popular row."""
        return float(self.share[0])

    @classmethod
    def zipf(cls, rows: int, alpha: float) -> Popularity:
        """Rows whose share falls as rank^-alpha; alpha 0 is uniform.

        The first `HEAD` rows stand for themselves. A sum of f over the ranks a..b after them is
        the integral of f from a - 1/2 to b + 1/2 up to the first Euler-Maclaurin term of the
        midpoint rule, -(f'(b + 1/2) - f'(a - 1/2)) / 24. The integral is taken in the logarithm of
        the rank by Gauss-Legendre nodes, so that it costs a few hundred classes.

        For f = p g(p) with g >= 0 rising and concave (such as p, p^2 and the terms of
        `stale_share`) |x f'(x)| <= 2 alpha f(x), and f falls, so the ranks up to a sum to at least
        a f(a): the term left out is at most alpha / (12 a^2) of the whole, 2e-11 alpha.

        Args:
            rows: Rows of the table, at least 1; a billion is no more work than 100,000.
            alpha: The Zipf exponent, at least 0.

        Raises:
            ConfigError: No rows, or an exponent below 0 or not finite.
        """
        if rows < 1:
            raise ConfigError(f"a table of {rows} rows has no lookups", "give at least 1 row")
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ConfigError(f"the Zipf exponent is {alpha:g}", "give a number of at least 0")
        rank = np.arange(1, min(rows, HEAD) + 1, dtype=np.float64)
        weight = np.ones_like(rank)
        if rows > HEAD:
            tail, pieces = _tail(HEAD + 0.5, rows + 0.5)
            rank, weight = np.concatenate([rank, tail]), np.concatenate([weight, pieces])
        share = rank**-alpha
        return cls(rows, share / (weight @ share), weight)

    @classmethod
    def from_counts(cls, counts: ArrayLike) -> Popularity:
        """Rows read as often as they were counted, exactly.

        Args:
            counts: int or float [N], finite and not negative: one count a row, in any order.
                Equal counts share a class.

        Raises:
            DataError: No count above 0, or one that is negative or not finite.
        """
        values, repeats = np.unique(np.asarray(counts, dtype=np.float64), return_counts=True)
        if len(values) and not (np.isfinite(values).all() and values[0] >= 0):
            raise DataError(
                "a row's count is negative or not finite", "count the positives of each item again"
            )
        if not len(values) or values[-1] == 0:
            raise DataError(
                "no row was ever read: every count is 0", "take windows that hold positives"
            )
        seen = values > 0
        share, weight = values[seen][::-1], repeats[seen][::-1].astype(np.float64)
        return cls(int(repeats.sum()), share / (weight @ share), weight)


def _tail(start: float, end: float) -> tuple[Floats, Floats]:
    """Nodes and weights of an integral over ranks from `start` to `end`: float64 [M] each."""
    low, high = math.log(start), math.log(end)
    edges = np.linspace(low, high, math.ceil((high - low) / PANEL) + 1)
    node, weight = np.polynomial.legendre.leggauss(NODES)
    half = np.diff(edges)[:, None] / 2
    rank = np.exp(edges[:-1, None] + half * (node + 1))
    return rank.ravel(), (half * weight * rank).ravel()
