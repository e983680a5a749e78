"""Row groups of part files: which of their rows a reader sees, and how they are decoded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.examples import NO_PART, split_by_id
from thawline.data.ragged import Ragged, Rows
from thawline.errors import DataError

FOOTERS = 64
"""Files whose footers are kept in memory: parsing one takes a tenth of a row group's time."""

_REBUILD = "build the dataset again with `thawline windows`"


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
        expected: int,
        limit: int | None = None,
        parts: int = 1,
    ) -> None:
        """Reads the files' footers and `held_out` columns, and the ids if parts are to be cut.

        Args:
            files: Part files, in order.
            held_out: Rows with this value of the column `held_out` are wanted.
            columns: Columns that `decode` needs.
            decode: Table of wanted and unwanted rows to `Rows`; a ValueError means a damaged file.
            expected: Wanted rows according to the manifest.
            limit: Wanted rows are thinned to this many, evenly spread over all files.
            parts: Into how many equal parts of them `part` cuts, by a hash of `request_id`.

        Raises:
            DataError: A file that is not Parquet or lacks a column, files that together hold other
                than `expected` wanted rows, or fewer rows than parts.
        """
        self._held_out = held_out
        self._columns = list(columns)
        self._decode = decode
        self._footer = lru_cache(FOOTERS)(pq.read_metadata)
        ids: list[np.ndarray] | None = [] if parts > 1 else None
        groups: list[_Group] = []
        found = 0
        for path in files:
            for number, wanted in enumerate(self._count(path, ids)):
                groups.append(_Group(path, number, found, wanted))
                found += wanted
        if found != expected:
            where = f"{files[0]} to {files[-1]}" if files else "no part file"
            raise DataError(
                f"{where}: {found} rows with held_out = {held_out}, the manifest says {expected}",
                f"a part file is missing or foreign: {_REBUILD}",
            )
        self._found = found
        self._limited = self.num_rows = found if limit is None else min(limit, found)
        """Rows of an epoch."""
        kept = np.array([self._kept(group) for group in groups], np.int64)
        self._groups = [group for group, rows in zip(groups, kept, strict=True) if rows]
        self.sizes = kept[kept > 0]
        """int64 [groups]: rows that `read` gives of each."""
        self._part: int | None = None
        self._part_of = None if ids is None else self._split(np.concatenate(ids), parts)

    def __len__(self) -> int:
        """Row groups with at least one wanted row."""
        return len(self._groups)

    def part(self, number: int) -> RowGroups:
        """The rows of a part alone; all of them where they were not cut."""
        if self._part_of is None:
            return self
        view = copy.copy(self)
        own = np.concatenate([[0], np.cumsum(self._part_of == number)])
        first = np.array([group.first for group in self._groups], np.int64)
        wanted = np.array([group.wanted for group in self._groups], np.int64)
        sizes = own[first + wanted] - own[first]
        view._groups = [group for group, rows in zip(self._groups, sizes, strict=True) if rows]
        view.sizes = sizes[sizes > 0]
        view.num_rows = int(sizes.sum())
        view._part = number
        return view

    def read(self, position: int) -> Rows:
        """Wanted rows of one row group, in file order.

        Raises:
            DataError: A damaged file; the message names it.
        """
        group = self._groups[position]
        try:
            with pq.ParquetFile(group.path, metadata=self._footer(group.path)) as file:
                table = file.read_row_group(
                    group.number, columns=["held_out", *self._columns], use_threads=False
                )
            wanted = np.flatnonzero(_is_held_out(table) == self._held_out)
            if len(wanted) != group.wanted:
                raise ValueError("the file has changed since it was opened")
            rows = self._decode(table)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{group.path}, row group {group.number}, cannot be read: {error}", _REBUILD
            ) from error
        ranks = slice(group.first, group.first + group.wanted)
        if self._part is not None and self._part_of is not None:
            wanted = wanted[self._part_of[ranks] == self._part]
        elif self._limited < self._found:
            wanted = wanted[self._is_within_limit(np.arange(ranks.start, ranks.stop))]
        return rows if len(wanted) == len(rows) else rows.take(wanted)

    def _split(self, request_id: np.ndarray, parts: int) -> np.ndarray:
        """int16 [found]: the part of each wanted row; rows beyond `limit` are in none."""
        within = np.flatnonzero(self._is_within_limit(np.arange(len(request_id))))
        if len(within) < parts:
            raise DataError(
                f"{len(within)} training requests cannot be cut into {parts} parts",
                "set finetune.examples=all, or widen windows.finetune_days",
            )
        found = np.full(len(request_id), NO_PART, np.int16)
        found[within] = split_by_id(request_id[within], parts)
        return found

    def _is_within_limit(self, ranks: np.ndarray) -> np.ndarray:
        """Which of the wanted rows, int64 [n], `limit` leaves: bool [n]."""
        return ranks * self._limited % max(self._found, 1) < self._limited

    def _count(self, path: Path, ids: list[np.ndarray] | None) -> list[int]:
        """Wanted rows of each row group of a file; their ids go to `ids`."""
        try:
            with pq.ParquetFile(path) as file:
                missing = {"held_out", *self._columns} - set(file.schema_arrow.names)
                if missing:
                    raise DataError(f"{path} has no column {', '.join(sorted(missing))}", _REBUILD)
                sizes = [
                    file.metadata.row_group(number).num_rows
                    for number in range(file.metadata.num_row_groups)
                ]
                names = ["held_out", *(["request_id"] if ids is not None else [])]
                table = file.read(columns=names, use_threads=False)
                wanted = _is_held_out(table)
                if ids is not None:
                    ids.append(table.column("request_id").to_numpy()[wanted == self._held_out])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}", _REBUILD) from error
        total = np.cumsum([0, *(wanted == self._held_out)])
        return np.diff(total[np.cumsum([0, *sizes])]).tolist()

    def _kept(self, group: _Group) -> int:
        """Rows of a group that `limit` leaves: ranks r with r * limit % found < limit."""
        if not self._found:
            return 0
        before = (group.first - 1) * self._limited // self._found
        return (group.first + group.wanted - 1) * self._limited // self._found - before


def decode_lists(table: pa.Table, types: Mapping[str, type], num_rows: int) -> Ragged:
    """List columns of equal lengths; those named `*_row` are rows of the catalog.

    Args:
        table: From a part file.
        types: Column to element type. Rows are narrowed to int32 where the catalog allows it: a
            batch gathers them from all over a buffer, which is bound by memory.
        num_rows: Of a table over the catalog.

    Raises:
        ValueError: Columns whose lists differ in length, nulls, a row outside of the catalog.
    """
    lists = Ragged.from_lists({name: table.column(name).combine_chunks() for name in types}, types)
    narrow = np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64
    for name, values in lists.values.items():
        if not name.endswith("_row"):
            continue
        if len(values) and not 0 <= values.min() <= values.max() < num_rows:
            raise ValueError(f"{name} holds rows that the catalog of {num_rows} rows has not")
        lists.values[name] = values.astype(narrow, copy=False)
    return lists


def _is_held_out(table: pa.Table) -> np.ndarray:
    return table.column("held_out").to_numpy()
