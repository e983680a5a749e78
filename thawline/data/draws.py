"""What a draw is made of: uniform numbers, weights to find a row by, and rows that are taken."""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_CELLS_PER_ENTRY = 2


class Chapter:
    """Entries and the prefix sums of their weights, with a guide table for fast searches.

    The guide divides the total weight into equal cells and knows the first entry of each, so that
    few steps are left to a binary search (Chen & Asau, "On generating random variates from an
    empirical distribution", AIIE Transactions 6, 1974). Steps are taken for all targets at once:
    their cache misses then overlap, which makes it several times faster than `np.searchsorted`.
    """

    def __init__(self, weight: np.ndarray, row: np.ndarray) -> None:
        """Takes weights float64 [E], at least one of them above 0, and rows int64 [E]."""
        self.cumulative = np.cumsum(weight)
        self.row = row
        cells = _CELLS_PER_ENTRY * len(row)
        self._scale = cells / self.cumulative[-1]
        cell = (self.cumulative * self._scale).astype(np.int64)
        self._guide = np.searchsorted(cell, np.arange(cells + 2)).astype(np.int32)

    def find(self, target: np.ndarray) -> np.ndarray:
        """Rows [n] of the first entries whose prefix sum is above `target` [n]."""
        cell = (target * self._scale).astype(np.int64)
        found, end = self._guide.take(cell), self._guide.take(cell + 1)
        left = np.flatnonzero(found < end)
        low, high, goal = found[left], end[left], target[left]
        while len(left):
            middle = (low + high) >> 1
            above = self.cumulative.take(middle) > goal
            low = np.where(above, low, middle + 1)
            high = np.where(above, middle, high)
            found[left] = low
            more = np.flatnonzero(low < high)
            left, low, high, goal = left[more], low[more], high[more], goal[more]
        return self.row.take(found)


class Taken:
    """Which rows may not be drawn for which request."""

    def __init__(self, rows: np.ndarray) -> None:
        """Takes rows int64 [B, P]; 0 is none."""
        # One column after the other is faster than a search, for histories of hundreds too.
        columns = np.ascontiguousarray(rows.T)
        self._columns = columns[columns.any(axis=1)]

    def has(self, request: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Whether (bool [n]) a row [n] is taken for the request at an index [n]."""
        taken = np.zeros(len(row), bool)
        for column in self._columns:
            taken |= row == column.take(request)
        return taken


def mix(state: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer over uint64."""
    state = state ^ (state >> np.uint64(30))
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def uniform(stream: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1): number `number` of each splitmix64 stream."""
    counter = (number + 1).astype(np.uint64)
    bits = mix(stream + counter * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
