"""Table rows with list columns as numpy arrays: gather, join, pad. No Python loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths, one after another in flat arrays; several arrays share offsets.

    Every array has one zero after the last list, which padding points at.
    """

    offsets: np.ndarray
    """int64 [n + 1]: list `i` lies at `offsets[i]` to `offsets[i + 1]`; starts at 0."""
    values: dict[str, np.ndarray]
    """Name to [offsets[-1] + 1]."""

    @classmethod
    def from_lists(cls, columns: Mapping[str, pa.ListArray], dtypes: Mapping[str, type]) -> Ragged:
        """Takes list columns of one table whose lists have equal lengths.

        Args:
            columns: Name to list array [n].
            dtypes: Name to the element type wanted.

        Raises:
            ValueError: Columns whose lists differ in length, null or non-numeric elements.
        """
        first, offsets = "", np.zeros(1, np.int64)
        values: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            absolute = column.offsets.to_numpy().astype(np.int64)
            relative = absolute - absolute[0]
            if not first:
                first, offsets = name, relative
            elif not np.array_equal(offsets, relative):
                raise ValueError(f"the lists of {name} and {first} differ in length")
            flat = column.values.slice(absolute[0], relative[-1]).to_numpy()
            values[name] = np.empty(len(flat) + 1, dtypes[name])
            values[name][:-1] = flat
            values[name][-1] = 0
        return cls(offsets, values)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """All lists of `parts`, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        values = {}
        for name in parts[0].values:
            arrays = [part.values[name][:-1] for part in parts]
            values[name] = np.concatenate([*arrays, parts[0].values[name][-1:]])
        return Ragged(_offsets(lengths), values)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        """The lists at `rows` [m], in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = _offsets(lengths)
        index = np.empty(offsets[-1] + 1, np.int64)
        index[:-1] = np.repeat(starts - offsets[:-1], lengths)
        index[:-1] += np.arange(offsets[-1])
        index[-1] = self.offsets[-1]
        return Ragged(offsets, {name: array.take(index) for name, array in self.values.items()})

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
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        width = max(int(lengths.max(initial=0)), least)
        width += -width % multiple
        steps = np.arange(width)
        mask = steps < lengths[:, None]
        index = np.where(mask, starts[:, None] + steps, self.offsets[-1])
        return {name: array.take(index) for name, array in self.values.items()}, mask


@dataclass(frozen=True)
class Rows:
    """Rows of a table: plain columns and groups of list columns."""

    flat: dict[str, np.ndarray]
    """Name to [n, ...]."""
    lists: dict[str, Ragged]
    """Name to n lists; at least one entry."""

    def __len__(self) -> int:
        return len(next(iter(self.lists.values())).offsets) - 1

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


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
