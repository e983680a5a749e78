"""Row groups of part files: which rows a reader sees, and in which order an epoch gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.background import Cancelled
from thawline.data.ragged import Rows
from thawline.errors import DataError


class _Group(NamedTuple):
    path: Path
    number: int
    first: int
    """Wanted rows in the groups before this one."""
    wanted: int
    """Wanted rows in this one."""


class RowGroups:
    """The wanted rows of some part files, readable a row group at a time."""

    def __init__(
        self,
        files: Sequence[Path],
        *,
        held_out: bool,
        columns: Sequence[str],
        decode: Callable[[pa.Table], Rows],
        limit: int | None = None,
    ) -> None:
        """Reads the files' footers and `held_out` columns.

        Args:
            files: Part files, in order.
            held_out: Rows with this value of the column `held_out` are wanted.
            columns: Columns that `decode` needs.
            decode: Table of wanted and unwanted rows to `Rows`; ValueError means a damaged file.
            limit: Wanted rows are thinned to this many, evenly spread over all files.

        Raises:
            DataError: A file that is not Parquet or lacks a column.
        """
        self._held_out = held_out
        self._columns = list(columns)
        self._decode = decode
        groups: list[_Group] = []
        first = 0
        for path in files:
            for number, wanted in enumerate(self._count(path)):
                groups.append(_Group(path, number, first, wanted))
                first += wanted
        self.num_found = first
        """Wanted rows before `limit`."""
        self.num_rows = first if limit is None else min(limit, first)
        """Rows of an epoch."""
        self._groups = [group for group in groups if self._kept(group)]

    def __len__(self) -> int:
        """Row groups with at least one wanted row."""
        return len(self._groups)

    def read(self, position: int) -> Rows:
        """Wanted rows of one row group, in file order.

        Raises:
            DataError: A damaged file; the message names it.
        """
        group = self._groups[position]
        try:
            with pq.ParquetFile(group.path) as file:
                table = file.read_row_group(
                    group.number, columns=["held_out", *self._columns], use_threads=False
                )
            wanted = np.flatnonzero(_is_held_out(table) == self._held_out)
            if len(wanted) != group.wanted:
                raise ValueError("the file changed while it was read")
            rows = self._decode(table)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{group.path}, row group {group.number}, cannot be read: {error}",
                "build the dataset again with `thawline windows`",
            ) from error
        if self.num_rows < self.num_found:
            ranks = group.first + np.arange(group.wanted)
            wanted = wanted[ranks * self.num_rows % self.num_found < self.num_rows]
        return rows if len(wanted) == len(rows) else rows.take(wanted)

    def _count(self, path: Path) -> list[int]:
        """Wanted rows of each row group of a file."""
        try:
            with pq.ParquetFile(path) as file:
                missing = {"held_out", *self._columns} - set(file.schema_arrow.names)
                if missing:
                    raise DataError(
                        f"{path} has no column {', '.join(sorted(missing))}",
                        "build the dataset again with `thawline windows`",
                    )
                sizes = [
                    file.metadata.row_group(number).num_rows
                    for number in range(file.metadata.num_row_groups)
                ]
                wanted = _is_held_out(file.read(columns=["held_out"], use_threads=False))
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read as Parquet: {error}",
                "build the dataset again with `thawline windows`",
            ) from error
        total = np.concatenate([[0], np.cumsum(wanted == self._held_out)])
        return np.diff(total[np.cumsum([0, *sizes])]).tolist()

    def _kept(self, group: _Group) -> int:
        """Rows of a group that are left by `limit`: ranks r with r * limit % found < limit."""
        if not self.num_found:
            return 0
        end = group.first + group.wanted
        return -(-end * self.num_rows // self.num_found) + (
            -group.first * self.num_rows // self.num_found
        )


def cut_batches(
    groups: RowGroups,
    *,
    batch_size: int,
    rng: np.random.Generator | None,
    buffer_groups: int,
    sort_by: str | None,
    cancelled: Cancelled,
) -> Iterator[tuple[Rows, np.ndarray]]:
    """One epoch: every row of `groups` once, cut into batches.

    Row groups come in a random order; `buffer_groups` of them at a time form a buffer, whose rows
    are permuted and cut. What does not fill a batch goes into the next buffer, so that only the
    last batch is short. The next buffer is read bit by bit between this one's batches, so that no
    batch waits for a whole buffer: memory holds two buffers, and a third while they are joined.

    Args:
        groups: The rows.
        batch_size: Rows a batch.
        rng: Orders groups and rows. None: file order.
        buffer_groups: Row groups a buffer.
        sort_by: Name of lists (`Rows.lists`): rows of a buffer are ordered by their length before
            the cut, and the batches are then permuted.
        cancelled: Asked between row groups.

    Yields:
        A buffer and the positions int64 [batch_size] in it that make up a batch.
    """
    order = np.arange(len(groups)) if rng is None else rng.permutation(len(groups))

    def read() -> Iterator[Rows]:
        for position in order:
            if cancelled():
                return
            yield groups.read(int(position))

    chunks = read()
    buffer = list(islice(chunks, buffer_groups))
    while buffer:
        rows = Rows.concat(buffer)
        batches, rest = _cut(rows, batch_size, rng, sort_by)
        buffer = []
        for number, batch in enumerate(batches, 1):
            due = buffer_groups * number // len(batches)
            buffer += islice(chunks, due - len(buffer))
            yield rows, batch
        buffer += islice(chunks, buffer_groups - len(buffer))
        if buffer:
            buffer.insert(0, rows.take(rest))
        elif len(rest) and not cancelled():
            yield rows, rest


def _cut(
    rows: Rows, batch_size: int, rng: np.random.Generator | None, sort_by: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of full batches [n, batch_size] and of the rest [< batch_size]."""
    order = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
    full, rest = np.split(order, [len(rows) - len(rows) % batch_size])
    if sort_by is not None:
        lengths = rows.lists[sort_by].lengths[full]
        full = full[np.argsort(lengths, kind="stable")]
    batches = full.reshape(-1, batch_size)
    if sort_by is not None and rng is not None:
        batches = rng.permutation(batches)
    return batches, rest


def _is_held_out(table: pa.Table) -> np.ndarray:
    return table.column("held_out").to_numpy()
