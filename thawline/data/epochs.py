"""Epochs over row groups: their order, and batches cut from a shuffled buffer of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from thawline.data.background import Cancelled, run_ahead
from thawline.data.ragged import Joiner, Rows
from thawline.data.row_groups import RowGroups

T = TypeVar("T")


@dataclass(frozen=True)
class Epochs:
    """Every row of some row groups once an epoch, in batches.

    Row groups come in a random order; `buffer_groups` of them at a time form a buffer, whose rows
    are permuted and cut into batches. What does not fill a batch goes into the next buffer, so
    that only the last batch is short. The next buffer is read bit by bit between this one's
    batches, so that no batch waits for a whole buffer; memory holds these two.
    """

    groups: RowGroups
    batch_size: int
    """Rows a batch."""
    seed: int
    shuffle: bool
    """False: file order."""
    buffer_groups: int
    """Row groups a buffer."""
    sort_by: str | None
    """Name of lists (`Rows.lists`): rows of a buffer are ordered by their length before the cut
    (ties at random), and the batches are then permuted."""
    prefetch: int
    """Batches made ahead by a thread; 0 makes them in the caller's."""

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.groups.num_rows // self.batch_size)

    def batches(self, epoch: int, make: Callable[[Rows, np.ndarray], T]) -> Iterator[T]:
        """One epoch, in an order fixed by `seed` and `epoch`.

        Args:
            epoch: From 0 on.
            make: Makes a batch from a buffer and the positions int64 [batch_size] in it.

        Raises:
            DataError: A damaged file, once the reader comes to it.
        """

        def source(cancelled: Cancelled) -> Iterator[T]:
            return (make(rows, batch) for rows, batch in self._cut_all(epoch, cancelled))

        return run_ahead(source, self.prefetch)

    def _cut_all(self, epoch: int, cancelled: Cancelled) -> Iterator[tuple[Rows, np.ndarray]]:
        rng = np.random.default_rng([self.seed, epoch]) if self.shuffle else None
        chunks = self._read_all(rng, cancelled)
        filling, spare = Joiner(self.buffer_groups), Joiner(self.buffer_groups)
        filled = _fill(filling, chunks, self.buffer_groups)
        while filled:
            buffer = filling.rows()
            filling, spare = spare, filling
            filling.clear()
            batches, rest = self._cut(buffer, rng)
            filling.add(buffer.take(rest))
            filled = 0
            for number, batch in enumerate(batches, 1):
                yield buffer, batch
                due = self.buffer_groups * number // len(batches)
                filled += _fill(filling, chunks, due - filled)
            filled += _fill(filling, chunks, self.buffer_groups - filled)
            if not filled and len(rest):
                yield buffer, rest

    def _read_all(self, rng: np.random.Generator | None, cancelled: Cancelled) -> Iterator[Rows]:
        order = np.arange(len(self.groups)) if rng is None else rng.permutation(len(self.groups))
        for position in order.tolist():
            if cancelled():
                return
            yield self.groups.read(position)

    def _cut(self, buffer: Rows, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Positions of full batches [n, batch_size] and of the rest [less than batch_size]."""
        order = np.arange(len(buffer)) if rng is None else rng.permutation(len(buffer))
        full, rest = np.split(order, [len(order) - len(order) % self.batch_size])
        if self.sort_by is not None:
            lengths = buffer.lists[self.sort_by].lengths[full]
            full = full[np.argsort(lengths, kind="stable")]
        batches = full.reshape(-1, self.batch_size)
        if self.sort_by is not None and rng is not None:
            batches = rng.permutation(batches)
        return batches, rest


def _fill(joiner: Joiner, chunks: Iterator[Rows], most: int) -> int:
    """How many chunks there were to add."""
    count = 0
    for chunk in islice(chunks, most):
        joiner.add(chunk)
        count += 1
    return count
