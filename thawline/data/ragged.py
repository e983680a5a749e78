"""Table rows with list columns as numpy arrays: gather, join, pad. No Python loop over rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

WIDTH_MULTIPLE = 8
"""Histories and sequences are padded to a multiple of this, so that few shapes occur."""

STARTS, LENGTHS = "/starts", "/lengths"
"""A joiner's names of the arrays that all columns of a list share; no column is called that."""


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths in flat arrays; several arrays share starts and lengths."""

    starts: np.ndarray
    """int64 [n]: where list `i` starts in `values`."""
    lengths: np.ndarray
    """int64 [n]."""
    values: dict[str, np.ndarray]
    """Name to flat array; it may hold elements of lists that were dropped."""

    @classmethod
    def from_lists(cls, columns: Mapping[str, pa.ListArray], dtypes: Mapping[str, type]) -> Ragged:
        """Takes list columns of one table, without a copy where the element type fits.

        Args:
            columns: Name to list array [n]; lists of a line are equally long in all columns.
            dtypes: Name to the element type wanted.

        Raises:
            ValueError: Columns whose lists differ in length, or lists that hold nulls.
        """
        shared, offsets = "", np.zeros(1, np.int64)
        values: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            absolute = column.offsets.to_numpy().astype(np.int64)
            relative = absolute - absolute[0]
            if not shared:
                shared, offsets = name, relative
            elif not np.array_equal(offsets, relative):
                raise ValueError(f"the lists of {name} and {shared} differ in length")
            flat = column.values.slice(absolute[0], relative[-1])
            if flat.null_count:
                raise ValueError(f"the lists of {name} hold nulls")
            values[name] = flat.to_numpy().astype(dtypes[name], copy=False)
        return cls(offsets[:-1], np.diff(offsets), values)

    def take(self, rows: np.ndarray) -> Ragged:
        """The lists at `rows` [m], in that order; elements are copied where many are dropped."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        total = int(lengths.sum())
        if 2 * total > len(next(iter(self.values.values()))):
            return Ragged(starts, lengths, self.values)
        offsets = np.cumsum(lengths) - lengths
        index = np.repeat(starts - offsets, lengths) + np.arange(total)
        return Ragged(offsets, lengths, {name: v.take(index) for name, v in self.values.items()})

    def padded(
        self,
        rows: np.ndarray,
        dtypes: Mapping[str, type] | None = None,
        *,
        multiple: int = 1,
        least: int = 0,
    ) -> dict[str, np.ndarray]:
        """The lists at `rows` [B] from index 0 on, padded with 0 to one width.

        Args:
            rows: Which lists.
            dtypes: Name to the element type wanted, where it is not the stored one.
            multiple: The width is a multiple of this ...
            least: ... and at least this.

        Returns:
            Name to [B, width].
        """
        starts, lengths = self.starts.take(rows), self.lengths.take(rows)
        width = max(int(lengths.max(initial=0)), least)
        width += -width % multiple
        total = int(lengths.sum())
        wanted = {name: flat.dtype for name, flat in self.values.items()} | dict(dtypes or {})
        if total == len(rows) * width:
            index = starts[:, None] + np.arange(width)
            return {
                name: flat.take(index).astype(wanted[name], copy=False)
                for name, flat in self.values.items()
            }
        ends = np.cumsum(lengths)
        source = np.repeat(starts - ends + lengths, lengths)
        source += np.arange(total)
        target = np.repeat(np.arange(0, len(rows) * width, width) - ends + lengths, lengths)
        target += np.arange(total)
        padded = {}
        for name, flat in self.values.items():
            array = np.zeros(len(rows) * width, wanted[name])
            # Cast before it is put there: numpy is slow to do both at once.
            array[target] = flat.take(source).astype(wanted[name], copy=False)
            padded[name] = array.reshape(len(rows), width)
        return padded

    def mask(self, rows: np.ndarray, width: int) -> np.ndarray:
        """What of the lists at `rows` [B], padded to a width, is not padding: bool [B, width]."""
        return np.arange(width) < self.lengths.take(rows)[:, None]


@dataclass(frozen=True)
class Rows:
    """Rows of a table: plain columns and groups of list columns."""

    flat: dict[str, np.ndarray]
    """Name to [n, ...]."""
    lists: dict[str, Ragged]
    """Name to n lists; at least one entry."""

    def __len__(self) -> int:
        return len(next(iter(self.lists.values())).starts)

    def take(self, rows: np.ndarray) -> Rows:
        """The rows at `rows` [m], in that order."""
        return Rows(
            {name: array.take(rows, axis=0) for name, array in self.flat.items()},
            {name: lists.take(rows) for name, lists in self.lists.items()},
        )


class Joiner:
    """Joins tables bit by bit, in memory that is used again.

    Large fresh arrays cost page faults, which can take several times as long as the copy.
    """

    def __init__(self, parts: int) -> None:
        """Expects about `parts` tables of one size."""
        self._parts = parts
        self._arrays: dict[tuple[str, str], np.ndarray] = {}
        self._sizes: dict[tuple[str, str], int] = {}

    def clear(self) -> None:
        """Starts anew. What `rows` returned before is overwritten from now on."""
        self._sizes.clear()

    def add(self, part: Rows) -> None:
        """Copies the rows of a table behind those before; all tables have the same columns."""
        for name, array in part.flat.items():
            self._append(("", name), array)
        for group, lists in part.lists.items():
            shift = 0
            for name, array in lists.values.items():
                shift = self._append((group, name), array)
            self._append((group, STARTS), lists.starts + shift)
            self._append((group, LENGTHS), lists.lengths)

    def rows(self) -> Rows:
        """All rows added since `clear`, as views of the memory."""
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for (group, name), size in self._sizes.items():
            arrays.setdefault(group, {})[name] = self._arrays[group, name][:size]
        flat = arrays.pop("", {})
        return Rows(
            flat,
            {
                group: Ragged(values.pop(STARTS), values.pop(LENGTHS), values)
                for group, values in arrays.items()
            },
        )

    def _append(self, key: tuple[str, str], array: np.ndarray) -> int:
        """Where the appended elements start."""
        size = self._sizes.get(key, 0)
        stored = self._arrays.get(key)
        if stored is None or len(stored) < size + len(array):
            capacity = max(3 * (size + len(array)) // 2, len(array) * self._parts * 9 // 8)
            grown = np.empty((capacity, *array.shape[1:]), array.dtype)
            if stored is not None:
                grown[:size] = stored[:size]
            self._arrays[key] = stored = grown
        stored[size : size + len(array)] = array
        self._sizes[key] = size + len(array)
        return size
