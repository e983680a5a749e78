"""Negatives for logs without impressions: popularity^alpha over what existed at the request.

Nothing here reads requests; `batches` calls `NegativeSampler.draw` once a batch.
"""

from __future__ import annotations

import numpy as np

from thawline.config import Negatives
from thawline.data.manifest import FIRST_ROW, PADDING_ROW, Catalog, Dataset
from thawline.data.popularity import MICROSECONDS_PER_HOUR, Popularity
from thawline.errors import ConfigError

REDRAWS = 8
"""How often a draw that hit one of the request's positives is repeated before it is given up."""

_CHAPTER_HALF_LIVES = 400
"""A chapter's weights grow by at most 2^(400 alpha) <= 2^800, which float64 holds."""

_NEGLIGIBLE = 1e-12
"""Items below this share of all weight are not carried into the next chapter."""

_GOLDEN = 0x9E3779B97F4A7C15


_CELLS_PER_ENTRY = 2


class _Chapter:
    """Entries and the prefix sums of their weights, with a guide table for fast searches.

    The guide divides the total weight into equal cells and knows the first entry of each, so that
    few steps are left to a binary search (Chen & Asau, "On generating random variates from an
    empirical distribution", AIIE Transactions 6, 1974). Steps are taken for all targets at once:
    their cache misses then overlap, which makes it several times faster than `np.searchsorted`.
    """

    def __init__(self, weight: np.ndarray, row: np.ndarray) -> None:
        """Takes weights float64 [E], at least one of them above 0, and rows int64 [E]."""
        self.cumulative = np.cumsum(weight)
        self._row = row
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
        return self._row.take(found)


class NegativeSampler:
    """Draws rows in proportion to popularity^alpha among items available at a request's time.

    All three popularities are one structure: *entries* (weight, row) in the order in which they
    become available, and their prefix sums. What is available at a time is a prefix, and a draw is
    a binary search in it.

    - `window`: an entry an item, weight (pretrain_count + support)^alpha, available right after
      `first_seen`.
    - `as_of`: an entry a bucket and item, available when the bucket is over; its weight is what it
      *adds* to the item's popularity^alpha. The entries of an item up to a time then sum to its
      popularity^alpha at that time: exact, in memory of the log's (bucket, item) pairs instead of
      buckets x items.
    - `decayed`: the same, with counts that grow as 2^(time / half life) in place of decaying ones.
      The two differ by a factor that all items share at any time, so draws are the same. Logs
      beyond 400 half-lives start anew every 400 from the decayed counts so far.

    Draws depend on (seed, request_id, slot, and epoch if resampling) alone: splitmix64 of a counter
    (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """

    def __init__(self, dataset: Dataset, config: Negatives, seed: int) -> None:
        """Builds the prefix sums.

        Args:
            dataset: Its catalog (`window`) or popularity file (`as_of`, `decayed`) is read.
            config: The config's `negatives`.
            seed: Of the draws.

        Raises:
            ConfigError: The dataset was built with other buckets.
            DataError: The popularity file is missing or damaged.
        """
        self.count = config.per_positive
        """Negatives a request, as configured."""
        self._seed = seed
        self._resample = config.resample
        if config.popularity == "window":
            self._from_catalog(dataset.catalog, config.alpha)
            return
        if config.bucket_minutes != dataset.manifest.bucket_minutes:
            raise ConfigError(
                f"negatives.bucket_minutes is {config.bucket_minutes}, but {dataset.root} was "
                f"built with {dataset.manifest.bucket_minutes}",
                "set it to the dataset's, or build the dataset again with `thawline windows`",
            )
        decays = config.popularity == "decayed" and config.alpha > 0
        half_life = config.half_life_hours if decays else None
        self._from_popularity(Popularity.read(dataset), config.alpha, half_life)

    def draw(
        self,
        request_id: np.ndarray,
        timestamp: np.ndarray,
        positives: np.ndarray,
        count: int,
        epoch: int,
    ) -> np.ndarray:
        """Draws `count` rows for each request, with replacement, never one of its positives.

        Args:
            request_id: int64 [B].
            timestamp: int64 [B]: microseconds since 1970 UTC.
            positives: int64 [B, P]: rows not to draw; padded with 0.
            count: Draws a request.
            epoch: Changes the draws if `negatives.resample` is on.

        Returns:
            int64 [B, count]; 0 (padding) where nothing is available yet, or where 9 draws in a row
            were positives.
        """
        drawn = np.full(len(request_id) * count, PADDING_ROW, np.int64)
        moment = np.searchsorted(self._available_from, timestamp, side="right") - 1
        total = np.where(moment >= 0, self._total[moment], 0.0)
        stream = self._streams(request_id, epoch)
        slot = np.arange(len(drawn))
        if not total.all():
            slot = slot[np.repeat(total > 0, count)]
        for attempt in range(REDRAWS + 1):
            if not len(slot):
                break
            request = slot // count
            number = slot - request * count + (attempt << 32)
            target = _uniform(stream[request], number) * total[request]
            row = self._find(target, moment[request])
            hit = np.zeros(len(slot), bool)
            for column in positives.T:
                hit |= row == column[request]
            row[hit] = PADDING_ROW
            drawn[slot] = row
            slot = slot[hit]
        return drawn.reshape(-1, count)

    def _find(self, target: np.ndarray, moment: np.ndarray) -> np.ndarray:
        if len(self._chapters) == 1:
            return self._chapters[0].find(target)
        found = np.empty(len(target), np.int64)
        chapter = self._chapter_of[moment]
        for number in np.unique(chapter):
            mine = chapter == number
            found[mine] = self._chapters[number].find(target[mine])
        return found

    def _streams(self, request_id: np.ndarray, epoch: int) -> np.ndarray:
        """uint64 [B]: where each request's splitmix64 counter starts."""
        state = _mix(np.array([self._seed], np.int64).view(np.uint64))
        state = _mix(state ^ np.uint64(epoch + 1 if self._resample else 0))
        return _mix(state ^ request_id.astype(np.int64, copy=False).view(np.uint64))

    def _from_catalog(self, catalog: Catalog, alpha: float) -> None:
        weight = _power(catalog.pretrain_count + catalog.support, alpha)
        known = np.flatnonzero(weight)
        seen, entries = np.unique(catalog.first_seen[known], return_counts=True)
        self._available_from = seen + 1
        self._total = np.zeros(len(seen) + 1)
        self._chapters = []
        self._chapter_of = np.zeros(len(seen), np.int64)
        if len(known):
            self._chapters.append(_Chapter(weight[known], known + FIRST_ROW))
            self._total[:-1] = self._chapters[0].cumulative[np.cumsum(entries) - 1]

    def _from_popularity(
        self, popularity: Popularity, alpha: float, half_life: float | None
    ) -> None:
        before, after = popularity.running(half_life)
        added = _power(after, alpha) - _power(before, alpha)
        time, first = np.unique(popularity.start, return_index=True)
        last = np.append(first[1:], len(popularity.start)) - 1
        growth = np.zeros(len(time))
        if half_life is not None and len(time):
            growth = (time - time[0]) / (half_life * MICROSECONDS_PER_HOUR)
        self._chapter_of = (growth // _CHAPTER_HALF_LIVES).astype(np.int64)
        # Empty stretches leave chapters without entries; number those that have some.
        starts, self._chapter_of = np.unique(self._chapter_of, return_inverse=True)
        self._available_from = time + popularity.width
        self._total = np.zeros(len(time) + 1)
        self._chapters = []
        for number, start in enumerate(starts):
            mine = np.flatnonzero(self._chapter_of == number)
            low, high = first[mine[0]], last[mine[-1]] + 1
            relative = growth - start * _CHAPTER_HALF_LIVES
            scale = np.exp2(alpha * np.repeat(relative[mine], last[mine] - first[mine] + 1))
            row, weight = popularity.row[low:high], added[low:high] * scale
            if low:
                latest = _last_entries(popularity.row[:low])
                moment = np.searchsorted(first, latest, side="right") - 1
                carried = _power(after[latest] * np.exp2(relative[moment]), alpha)
                kept = carried > carried.sum() * _NEGLIGIBLE
                row = np.concatenate([popularity.row[latest[kept]], row])
                weight = np.concatenate([carried[kept], weight])
            self._chapters.append(_Chapter(weight, row))
            self._total[mine] = self._chapters[-1].cumulative[last[mine] - high + len(row)]


def _last_entries(row: np.ndarray) -> np.ndarray:
    """Positions of the last entry of each row."""
    last = np.full(row.max() + 1, -1)
    last[row] = np.arange(len(row))
    return last[last >= 0]


def _power(count: np.ndarray, alpha: float) -> np.ndarray:
    """count^alpha, with 0^0 = 0: what was never positive is never drawn."""
    return np.where(count > 0, np.power(count, alpha, dtype=np.float64), 0.0)


def _mix(state: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer over uint64."""
    state = state ^ (state >> np.uint64(30))
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def _uniform(stream: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1): number `number` of each splitmix64 stream."""
    counter = (number + 1).astype(np.uint64)
    bits = _mix(stream + counter * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
