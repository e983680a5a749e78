"""Table rows with list columns as numpy arrays: gather, join, pad. No Python loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

WIDTH_MULTIPLE = 8
"""Histories and sequences are padded to a multiple of this, so that few shapes occur."""


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

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """All lists of `parts`, in order."""
        sizes = [len(next(iter(part.values.values()))) for part in parts]
        shifts = np.cumsum([0, *sizes[:-1]])
        return Ragged(
            np.concatenate([p.starts + shift for p, shift in zip(parts, shifts, strict=True)]),
            np.concatenate([part.lengths for part in parts]),
            {name: np.concatenate([p.values[name] for p in parts]) for name in parts[0].values},
        )

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
        self, rows: np.ndarray, *, multiple: int = 1, least: int = 0
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The lists at `rows` [B] from index 0 on, padded with 0 to one width.

        Args:
            rows: Which lists.
            multiple: The width is a multiple of this ...
            least: ... and at least this.

        Returns:
            Name to [B, width], and the mask bool [B, width] of what is not padding.
        """
        starts, lengths = self.starts[rows], self.lengths[rows]
        width = max(int(lengths.max(initial=0)), least)
        width += -width % multiple
        steps = np.arange(width)
        mask = steps < lengths[:, None]
        index = starts[:, None] + steps
        padded = {}
        for name, flat in self.values.items():
            if not len(flat):
                padded[name] = np.zeros(mask.shape, flat.dtype)
                continue
            # Padding reads past its list, and is clipped where it would read past the array.
            padded[name] = np.where(mask, flat.take(index, mode="clip"), flat.dtype.type(0))
        return padded, mask


@dataclass(frozen=True)
class Rows:
    """Rows of a table: plain columns and groups of list columns."""

    flat: dict[str, np.ndarray]
    """Name to [n, ...]."""
    lists: dict[str, Ragged]
    """Name to n lists; at least one entry."""

    def __len__(self) -> int:
        return len(next(iter(self.lists.values())).starts)

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """All rows of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        return Rows(
            {name: np.concatenate([p.flat[name] for p in parts]) for name in parts[0].flat},
            {name: Ragged.concat([p.lists[name] for p in parts]) for name in parts[0].lists},
        )

    def take(self, rows: np.ndarray) -> Rows:
        """The rows at `rows` [m], in that order."""
        return Rows(
            {name: array[rows] for name, array in self.flat.items()},
            {name: lists.take(rows) for name, lists in self.lists.items()},
        )
