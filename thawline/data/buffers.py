"""The buffers of an epoch: which rows each of them shuffles and cuts into batches.

All of it is known from the sizes of the row groups, so that an epoch can be entered at any batch
without reading what comes before. No file is read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from thawline.data.shards import Piece

FIRST_SHARE = 8
"""The first buffer has one row group for this many of a whole one; each that follows doubles."""


@dataclass(frozen=True)
class Buffer:
    """Rows that are shuffled together: what the buffer before left, then those of some pieces."""

    first: int
    """Its pieces are those from this one ..."""
    last: int
    """... to the one before this."""
    carried: np.ndarray
    """int64: rows left by the buffer before, in order, numbered over all pieces."""
    order: np.ndarray
    """int64: positions in the buffer of all rows that come in full batches, then of the rest."""
    turns: np.ndarray | None
    """int64 [full batches]: the order in which batches that were sorted by length come."""
    batch_size: int
    is_last: bool

    @property
    def num_pieces(self) -> int:
        """Pieces to read for it."""
        return self.last - self.first

    @property
    def full(self) -> int:
        """Rows in full batches."""
        return len(self.order) - len(self.order) % self.batch_size

    @property
    def num_batches(self) -> int:
        """Batches cut from it; the last buffer's rest is a batch as well."""
        rows = len(self.order) if self.is_last else self.full
        return -(-rows // self.batch_size)

    def rest(self) -> np.ndarray:
        """int64 [less than `batch_size`]: positions of the rows left for the next buffer."""
        return self.order[len(self.order) if self.is_last else self.full :]

    def batches(self, lengths: np.ndarray | None) -> list[np.ndarray]:
        """Positions in the buffer of each batch's rows.

        Args:
            lengths: int64 [rows]: batches hold rows of similar length. None: they do not.
        """
        full = self.order[: self.full]
        if lengths is not None:
            full = full[np.argsort(lengths[full], kind="stable")]
        cut = full.reshape(-1, self.batch_size)
        batches = list(cut if self.turns is None else cut[self.turns])
        if self.is_last and self.full < len(self.order):
            batches.append(self.order[self.full :])
        return batches


def plan_buffers(
    pieces: list[Piece],
    rng: np.random.Generator | None,
    *,
    batch_size: int,
    most_pieces: int,
    sorts: bool,
) -> Iterator[Buffer]:
    """The buffers of an epoch, in order.

    The first ones are smaller, so that the first batch comes soon.

    Args:
        pieces: Rows of the epoch.
        rng: Shuffles; None keeps the order.
        batch_size: Rows a batch. What does not fill one goes into the next buffer.
        most_pieces: Pieces a buffer.
        sorts: Batches will be sorted by length: their turns are drawn too.
    """
    starts = np.cumsum([0, *(piece.high - piece.low for piece in pieces)])
    carried = np.zeros(0, np.int64)
    first, width = 0, -(-most_pieces // FIRST_SHARE)
    while first < len(pieces):
        last = min(first + width, len(pieces))
        rows = np.concatenate([carried, np.arange(starts[first], starts[last])])
        order = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
        full = len(rows) // batch_size
        turns = None if rng is None or not sorts else rng.permutation(full)
        buffer = Buffer(first, last, carried, order, turns, batch_size, last == len(pieces))
        yield buffer
        carried = rows[buffer.rest()]
        first, width = last, min(2 * width, most_pieces)
