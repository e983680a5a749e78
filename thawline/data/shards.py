"""Splitting an epoch between several readers: which rows each of them reads. No file is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thawline.errors import ConfigError


class Piece(NamedTuple):
    """Consecutive rows of one row group."""

    group: int
    low: int
    """First row ..."""
    high: int
    """... and the one after the last, counted within the group."""


@dataclass(frozen=True)
class Shard:
    """One of `count` readers that read every row exactly once between them.

    Each gets one stretch of the epoch's order of row groups. Their numbers of rows differ by one
    at most, and only a row group at the end of a stretch is read by two of them.

    Example:
        >>> shards = [Shard(index, 4) for index in range(4)]
        >>> [shard.span(10) for shard in shards]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """

    index: int = 0
    """From 0 on."""
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"shard {self.index} of {self.count} does not exist",
                "give an index from 0 to count - 1",
            )

    @classmethod
    def of(cls, rank: int, world_size: int, worker: int = 0, workers: int = 1) -> Shard:
        """The shard of a loader's worker process within a rank of a distributed job.

        Raises:
            ConfigError: A rank or a worker that does not exist.
        """
        inner = cls(worker, workers)
        outer = cls(rank, world_size)
        return cls(outer.index * workers + inner.index, world_size * workers)

    def span(self, rows: int) -> tuple[int, int]:
        """The first of this shard's rows among `rows`, and the one after the last."""
        return self.index * rows // self.count, (self.index + 1) * rows // self.count

    def pieces(self, sizes: np.ndarray, order: np.ndarray) -> list[Piece]:
        """This shard's stretch of the row groups.

        Args:
            sizes: int64 [G]: rows of each group, at least 1.
            order: int64 [G]: the order in which the epoch reads the groups.
        """
        ends = np.cumsum(sizes[order])
        starts = ends - sizes[order]
        low, high = self.span(int(ends[-1]) if len(ends) else 0)
        inside = np.flatnonzero((ends > low) & (starts < high))
        first = np.maximum(low - starts[inside], 0)
        last = np.minimum(high, ends[inside]) - starts[inside]
        return [Piece(*piece) for piece in np.stack([order[inside], first, last], axis=1).tolist()]
