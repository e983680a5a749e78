"""Epochs over row groups: batches cut from a shuffled buffer of bounded size.

Which rows come when is decided in `shards` and `buffers`; here they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from thawline.data.background import Cancelled, run_ahead
from thawline.data.buffers import Buffer, plan_buffers
from thawline.data.examples import Examples
from thawline.data.ragged import Joiner, Rows
from thawline.data.row_groups import RowGroups
from thawline.data.shards import Piece, Shard
from thawline.errors import DataError

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
    source: str
    """Names the rows' dataset in a state."""
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
    """Batches made ahead by a thread, while another decodes the next row group; 0 makes them in the
    caller's."""
    shard: Shard
    """Which of the rows are read here."""
    examples: Examples = field(default_factory=Examples)
    """Which rows an epoch has; `groups` are cut into its `parts`."""

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        low, high = self.shard.span(self.groups.num_rows // self.examples.parts)
        return high - low

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.num_rows // self.batch_size)

    def batches(
        self, epoch: int, make: Callable[[Rows, np.ndarray], T], start: int = 0
    ) -> Iterator[T]:
        """One epoch, in an order fixed by `seed` and `epoch`.

        Args:
            epoch: From 0 on.
            make: Makes a batch from a buffer and the positions int64 [batch_size] in it.
            start: Batches to leave out; those that follow are the same as without it.

        Raises:
            DataError: A damaged file, once the reader comes to it.
        """

        def source(cancelled: Cancelled) -> Iterator[T]:
            with closing(self._cut_all(epoch, start, cancelled)) as cut:
                for rows, batch in cut:
                    yield make(rows, batch)

        return run_ahead(source, self.prefetch)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """What `position` needs to find batch `step` of an epoch again: a few JSON values."""
        return {"epoch": epoch, "step": step, "reader": self._identity()}

    def position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """The epoch and step of a state.

        Raises:
            DataError: A state of a reader whose batches differ from this one's.
        """
        theirs, ours = state["reader"], self._identity()
        changed = [
            f"{name} is {ours[name]}, was {theirs.get(name)}"
            for name in ours
            if ours[name] != theirs.get(name)
        ]
        if changed:
            raise DataError(
                f"the reader cannot continue at epoch {state['epoch']}, step {state['step']}, "
                f"since its batches are others now: {'; '.join(changed)}",
                "read the same dataset with the same settings, or start the epoch anew",
            )
        return state["epoch"], state["step"]

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self.source,
            "rows": self.groups.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shuffle_groups": self.buffer_groups,
            "group_by_length": self.sort_by is not None,
            "examples": [self.examples.kind, self.examples.parts],
            "shard": [self.shard.index, self.shard.count],
        }

    def _cut_all(
        self, epoch: int, start: int, cancelled: Cancelled
    ) -> Generator[tuple[Rows, np.ndarray]]:
        groups = self.groups.part(self.examples.part(epoch))
        pieces, buffers = self._plan(epoch, groups)
        buffer = next(buffers, None)
        while buffer is not None and start >= buffer.num_batches:
            start -= buffer.num_batches
            buffer = next(buffers, None)
        if buffer is None:
            return
        filling, spare = Joiner(self.buffer_groups), Joiner(self.buffer_groups)
        if len(buffer.carried):
            filling.add(_read_again(groups, pieces, buffer.carried))
        with closing(self._read_all(groups, pieces[buffer.first :], cancelled)) as chunks:
            _fill(filling, chunks, buffer.num_pieces)
            while buffer is not None and not cancelled():
                rows = filling.rows()
                batches = buffer.batches(self._lengths(rows))[start:]
                rest = rows.take(buffer.rest())
                filling, spare = spare, filling
                filling.clear()
                filling.add(rest)
                buffer, start = next(buffers, None), 0
                wanted = 0 if buffer is None else buffer.num_pieces
                filled = 0
                for number, batch in enumerate(batches, 1):
                    yield rows, batch
                    filled += _fill(filling, chunks, wanted * number // len(batches) - filled)
                _fill(filling, chunks, wanted - filled)

    def _plan(self, epoch: int, groups: RowGroups) -> tuple[list[Piece], Iterator[Buffer]]:
        # Every shard draws alike: they agree on the order of the groups, and batches sorted by
        # length take similar turns, so that no rank waits for another's long batch.
        rng = np.random.default_rng([self.seed, epoch]) if self.shuffle else None
        count = len(groups)
        order = np.arange(count) if rng is None else rng.permutation(count)
        pieces = self.shard.pieces(groups.sizes, order)
        return pieces, plan_buffers(
            pieces,
            rng,
            batch_size=self.batch_size,
            most_pieces=self.buffer_groups,
            sorts=self.sort_by is not None,
        )

    def _lengths(self, rows: Rows) -> np.ndarray | None:
        return None if self.sort_by is None else rows.lists[self.sort_by].lengths

    def _read_all(
        self, groups: RowGroups, pieces: list[Piece], cancelled: Cancelled
    ) -> Generator[Rows]:
        """Each piece's rows; a thread of its own decodes the next while this one is used."""

        def source(dropped: Cancelled) -> Iterator[Rows]:
            return (_read(groups, piece) for piece in pieces if not (dropped() or cancelled()))

        return run_ahead(source, min(self.prefetch, 1))


def _read(groups: RowGroups, piece: Piece) -> Rows:
    rows = groups.read(piece.group)
    whole = piece.high - piece.low == len(rows)
    return rows if whole else rows.take(np.arange(piece.low, piece.high))


def _read_again(groups: RowGroups, pieces: list[Piece], wanted: np.ndarray) -> Rows:
    """Rows by their numbers over all pieces, in the order asked for."""
    ends = np.cumsum([piece.high - piece.low for piece in pieces])
    home = np.searchsorted(ends, wanted, side="right")
    joiner = Joiner(1)
    for number in np.unique(home).tolist():
        piece = pieces[number]
        places = wanted[home == number] - (ends[number] - (piece.high - piece.low))
        joiner.add(_read(groups, piece).take(places))
    grouped = np.argsort(home, kind="stable")
    return joiner.rows().take(np.argsort(grouped))


def _fill(joiner: Joiner, chunks: Iterator[Rows], most: int) -> int:
    """How many chunks there were to add."""
    count = 0
    for chunk in islice(chunks, most):
        joiner.add(chunk)
        count += 1
    return count
