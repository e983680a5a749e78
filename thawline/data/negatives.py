"""Negatives for logs without impressions: popularity^alpha over what existed at the request.

Nothing here reads requests; `batches` calls `NegativeSampler.negatives` once a batch. How often a
row is drawn on the whole is told by `expected_draws`, for the audit.
"""

from __future__ import annotations

import numpy as np

from thawline.config import Negatives
from thawline.data.draws import Chapter, Taken, mix, uniform
from thawline.data.manifest import FIRST_ROW, PADDING_ROW, Catalog, Dataset
from thawline.data.popularity import MICROSECONDS_PER_HOUR, Popularity
from thawline.errors import ConfigError

REDRAWS = 8
"""How often a draw that hit one of the request's positives is repeated before it is given up."""

REDRAWS_OF_KNOWN = 31
"""The same where a whole history is excluded: it may hold much of what is popular."""

_IN_BATCH = 1 << 40
"""Where the random numbers of in-batch negatives start, far from those of the others."""

_CHAPTER_HALF_LIVES = 400
"""A chapter's weights grow by at most 2^(400 alpha) <= 2^800, which float64 holds."""

_NEGLIGIBLE = 1e-12
"""Items below this share of all weight are not carried into the next chapter."""


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
    (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). In-batch
    negatives depend on the batch beside.

    With `catalogue_leak` all entries are available at all times, with the positives of the whole
    log as their popularity. Rows of the future are then only ever negatives, which a model learns
    by heart: this is here for the study of that leak.
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
        self.in_batch = config.in_batch
        """Negatives a request from its batch."""
        self._seed = seed
        self._resample = config.resample
        self._exclude_known = config.exclude_known
        self._redraws = REDRAWS_OF_KNOWN if config.exclude_known else REDRAWS
        self._num_rows = dataset.catalog.num_rows
        self._first_seen = dataset.catalog.first_seen
        if config.catalogue_leak:
            self._from_all(Popularity.read(dataset), config.alpha)
            return
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

    def negatives(
        self,
        request_id: np.ndarray,
        timestamp: np.ndarray,
        positives: np.ndarray,
        history: np.ndarray,
        epoch: int,
    ) -> np.ndarray:
        """The negatives of a batch, as configured.

        Args:
            request_id: int64 [B].
            timestamp: int64 [B]: microseconds since 1970 UTC.
            positives: int64 [B, P]: the requests' positives; padded with 0.
            history: int64 [B, L]: the users' known positives; padded with 0. Never drawn with
                `negatives.exclude_known`. What a user will like only later is not in it: to exclude
                that would tell the model of the future.
            epoch: Changes the draws if `negatives.resample` is on.

        Returns:
            int64 [B, count + in_batch]; 0 (padding) where there was none.
        """
        taken = np.concatenate([positives, history], axis=1) if self._exclude_known else positives
        drawn = self.draw(request_id, timestamp, taken, self.count, epoch)
        if not self.in_batch:
            return drawn
        others = self._draw_in_batch(request_id, timestamp, positives, taken, epoch)
        return np.concatenate([drawn, others], axis=1)

    def expected_draws(self, timestamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How often each row is drawn for requests at some times, in-batch negatives aside.

        Draws that are repeated because they hit a positive are not counted.

        Args:
            timestamp: int64 [R]: microseconds since 1970 UTC.

        Returns:
            float64 [num_rows]: expected draws, and those for requests at or before the row's
            `first_seen`, which are 0 unless the sampler leaks.
        """
        expected, early = np.zeros(self._num_rows), np.zeros(self._num_rows)
        time = np.sort(timestamp)
        moment = np.searchsorted(self._available_from, time, side="right") - 1
        time, moment = time[moment >= 0], moment[moment >= 0]
        for number, chapter in enumerate(self._chapters):
            mine = self._chapter_of[moment] == number
            # From the last request backwards: early terms may dwarf late ones, never late ones
            # early ones that matter to a late entry.
            left = np.zeros(mine.sum() + 1)
            share = self.count / self._total[moment[mine]]
            left[:-1] = np.cumsum(share[::-1])[::-1]
            moments = np.flatnonzero(self._chapter_of == number)
            at = np.searchsorted(self._total[moments], chapter.cumulative)
            opened = self._available_from[moments[np.minimum(at, len(moments) - 1)]]
            weight = np.diff(chapter.cumulative, prepend=0.0)
            after = left[np.searchsorted(time[mine], opened)]
            np.add.at(expected, chapter.row, weight * after)
            born = self._first_seen[chapter.row - FIRST_ROW]
            known = left[np.searchsorted(time[mine], np.maximum(opened, born + 1))]
            np.add.at(early, chapter.row, weight * (after - known))
        return expected, early

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
            int64 [B, count]; 0 (padding) where nothing is available yet, or where too many draws in
            a row were positives.
        """
        drawn = np.full(len(request_id) * count, PADDING_ROW, np.int64)
        moment = np.searchsorted(self._available_from, timestamp, side="right") - 1
        total = np.where(moment >= 0, self._total[moment], 0.0)
        stream = self._streams(request_id, epoch)
        slot = np.arange(len(drawn))
        if not total.all():
            slot = slot[np.repeat(total > 0, count)]
        taken = Taken(positives)
        for attempt in range(self._redraws + 1):
            if not len(slot):
                break
            request = slot // count
            number = slot - request * count + (attempt << 32)
            target = uniform(stream[request], number) * total[request]
            row = self._find(target, moment[request])
            hit = taken.has(request, row)
            row[hit] = PADDING_ROW
            drawn[slot] = row
            slot = slot[hit]
        return drawn.reshape(-1, count)

    def _draw_in_batch(
        self,
        request_id: np.ndarray,
        timestamp: np.ndarray,
        positives: np.ndarray,
        excluded: np.ndarray,
        epoch: int,
    ) -> np.ndarray:
        """int64 [B, in_batch]: positives of other requests that existed at the request's time."""
        drawn = np.full(len(request_id) * self.in_batch, PADDING_ROW, np.int64)
        pool = positives[positives >= FIRST_ROW]
        slot = np.arange(len(drawn) if len(pool) else 0)
        stream, taken = self._streams(request_id, epoch), Taken(excluded)
        for attempt in range(self._redraws + 1):
            if not len(slot):
                break
            request = slot // self.in_batch
            number = slot - request * self.in_batch + (attempt << 32) + _IN_BATCH
            row = pool[(uniform(stream[request], number) * len(pool)).astype(np.int64)]
            unborn = self._first_seen[row - FIRST_ROW] >= timestamp[request]
            hit = taken.has(request, row) | unborn
            drawn[slot] = np.where(hit, PADDING_ROW, row)
            slot = slot[hit]
        return drawn.reshape(-1, self.in_batch)

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
        state = mix(np.array([self._seed], np.int64).view(np.uint64))
        state = mix(state ^ np.uint64(epoch + 1 if self._resample else 0))
        return mix(state ^ request_id.astype(np.int64, copy=False).view(np.uint64))

    def _from_catalog(self, catalog: Catalog, alpha: float) -> None:
        weight = _power(catalog.pretrain_count + catalog.support, alpha)
        known = np.flatnonzero(weight)
        # A catalog that extends another one is not in order of first_seen.
        known = known[np.argsort(catalog.first_seen[known], kind="stable")]
        seen, entries = np.unique(catalog.first_seen[known], return_counts=True)
        self._available_from = seen + 1
        self._total = np.zeros(len(seen) + 1)
        self._chapters = []
        self._chapter_of = np.zeros(len(seen), np.int64)
        if len(known):
            self._chapters.append(Chapter(weight[known], known + FIRST_ROW))
            self._total[:-1] = self._chapters[0].cumulative[np.cumsum(entries) - 1]

    def _from_all(self, popularity: Popularity, alpha: float) -> None:
        count = np.bincount(popularity.row, popularity.count, minlength=self._num_rows)
        row = np.flatnonzero(count)
        self._available_from = np.array([np.iinfo(np.int64).min])
        self._chapter_of = np.zeros(1, np.int64)
        self._chapters = [Chapter(_power(count[row], alpha), row)] if len(row) else []
        total = self._chapters[0].cumulative[-1] if len(row) else 0.0
        self._total = np.array([total, 0.0])

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
            self._chapters.append(Chapter(weight, row))
            self._total[mine] = self._chapters[-1].cumulative[last[mine] - high + len(row)]


def _last_entries(row: np.ndarray) -> np.ndarray:
    """Positions of the last entry of each row."""
    last = np.full(row.max() + 1, -1)
    last[row] = np.arange(len(row))
    return last[last >= 0]


def _power(count: np.ndarray, alpha: float) -> np.ndarray:
    """count^alpha, with 0^0 = 0: what was never positive is never drawn."""
    return np.where(count > 0, np.power(count, alpha, dtype=np.float64), 0.0)
