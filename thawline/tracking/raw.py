"""Requests in raw ids, as columns: what the model under the served one takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DEFAULT_AGE_HOURS = 24.0


@dataclass(frozen=True)
class Lists:
    """A column of lists; no list counts as an empty one."""

    offsets: np.ndarray
    """int64 [n + 1]."""
    values: pa.Array
    """[offsets[-1]], nulls allowed."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, array: pa.ListArray) -> Lists:
        """The lists of an array."""
        offsets = array.offsets.to_numpy().astype(np.int64)
        if array.null_count:
            # What stands beneath a null is nobody's.
            lengths = pc.list_value_length(array).fill_null(0).to_numpy()
            return cls(offsets_of(lengths), array.flatten())
        return cls(offsets - offsets[0], array.values.slice(offsets[0], offsets[-1] - offsets[0]))


@dataclass(frozen=True)
class Requests:
    """Requests as columns of equal length."""

    history: Lists
    """Item ids of the catalog's type, oldest first."""
    candidates: Lists
    """Item ids."""
    actions: Lists | None = None
    """int64, beside `history`: bit `a` is `actions[a]`. None or null: the last action."""
    ages: Lists | None = None
    """float64 hours, beside `history`. None, null or not finite: `DEFAULT_AGE_HOURS`."""
    texts: Mapping[str, pa.StringArray] = field(default_factory=dict)
    """Context columns and ids of further tables; one that is absent is missing in each request."""

    def __len__(self) -> int:
        return len(self.history.offsets) - 1


@dataclass(frozen=True)
class Problem:
    """Why a request cannot be scored."""

    row: int
    column: str
    """The one at fault."""
    what: str
    remedy: str


def text_of(value: Any) -> str | None:
    """A value as DuckDB writes those of the training log: 13, though it be 13.0 in pandas."""
    if value is None or value != value:
        return None
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where lists of some lengths start and end: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
