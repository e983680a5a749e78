"""How often items were positive: time buckets as arrays, running counts, log shares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from thawline.data.manifest import FIRST_ROW, PADDING_ROW, Dataset, read_table
from thawline.errors import DataError

MICROSECONDS_PER_HOUR = 3_600_000_000


@dataclass(frozen=True)
class Popularity:
    """One entry for each time bucket and row with positives, ordered by bucket."""

    start: np.ndarray
    """int64 [E]: start of the bucket, microseconds since 1970 UTC."""
    row: np.ndarray
    """int64 [E]."""
    count: np.ndarray
    """int64 [E]: positives of all users."""
    width: int
    """Microseconds of a bucket."""

    @classmethod
    def read(cls, dataset: Dataset) -> Popularity:
        """Reads a dataset's `popularity.parquet`.

        Raises:
            DataError: A missing or damaged file, one out of order or with counts below 1.
        """
        path = dataset.root / "popularity.parquet"
        table = read_table(path)
        start = table.column("bucket").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        popularity = cls(
            start=start.to_numpy(),
            row=table.column("row").to_numpy().astype(np.int64, copy=False),
            count=table.column("count").to_numpy().astype(np.int64, copy=False),
            width=dataset.manifest.bucket_minutes * 60_000_000,
        )
        if np.any(np.diff(popularity.start) < 0) or np.any(popularity.count < 1):
            raise DataError(
                f"{path} is not ordered by bucket, or holds counts below 1",
                "build the dataset again with `thawline windows`",
            )
        return popularity

    @property
    def end(self) -> np.ndarray:
        """int64 [E]: when the bucket is over and its count may be known."""
        return self.start + self.width

    def running(self, half_life_hours: float | None) -> tuple[np.ndarray, np.ndarray]:
        """Each entry's item's count up to that entry, as of the entry's bucket.

        Args:
            half_life_hours: Counts halve in this time. None: they do not decay.

        Returns:
            float64 [E] without and with the entry's own count.
        """
        size = int(self.row.max(initial=0)) + 1
        value = np.zeros(size)
        updated = np.zeros(size, np.int64)
        before = np.zeros(len(self.row))
        edges = np.flatnonzero(np.diff(self.start, prepend=-1, append=-1))
        for low, high in pairwise(edges):
            rows = self.row[low:high]
            old = value[rows]
            if half_life_hours is not None:
                old *= decay(self.start[low] - updated[rows], half_life_hours)
                updated[rows] = self.start[low]
            before[low:high] = old
            value[rows] = old + self.count[low:high]
        return before, before + self.count

    def at(
        self, row: np.ndarray, timestamp: np.ndarray, half_life_hours: float | None
    ) -> np.ndarray:
        """Positives of rows in the buckets that were over at a time.

        Args:
            row: int64 [K].
            timestamp: int64 [K]: microseconds since 1970 UTC.
            half_life_hours: Counts halve in this time after their bucket. None: they do not decay.

        Returns:
            float64 [K].
        """
        if not len(self.row):
            return np.zeros(len(row))
        _, after = self.running(half_life_hours)
        order = np.argsort(self.row, kind="stable")
        buckets, bucket = np.unique(self.start, return_inverse=True)
        key = (self.row * len(buckets) + bucket)[order]
        over = np.searchsorted(buckets + self.width, timestamp, side="right")
        place = np.searchsorted(key, row * len(buckets) + over) - 1
        entry = order[place]
        value = np.where((place >= 0) & (self.row[entry] == row), after[entry], 0.0)
        if half_life_hours is not None:
            value *= decay(np.maximum(timestamp - self.end[entry], 0), half_life_hours)
        return value


def decay(microseconds: np.ndarray, half_life_hours: float) -> np.ndarray:
    """What is left of a count after a time: 2 ** -(time / half life), float64."""
    return np.exp2(microseconds / (-half_life_hours * MICROSECONDS_PER_HOUR))


def log_shares(counts: np.ndarray) -> np.ndarray:
    """Log of each table row's share of `counts`, with one added to each.

    Args:
        counts: int64 [N], of the catalog's items.

    Returns:
        float32 [N + 2]: 0 for the padding row; an unknown item has count 0.
    """
    smoothed = np.concatenate([np.ones(FIRST_ROW), counts + 1.0])
    shares = np.log(smoothed / smoothed[FIRST_ROW:].sum())
    shares[PADDING_ROW] = 0.0
    return shares.astype(np.float32)
