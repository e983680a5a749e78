"""Raw item ids to table rows, for scoring: sorted keys and a binary search, or a bucket."""

from __future__ import annotations

import hashlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from thawline.data.manifest import FIRST_ROW, UNKNOWN_ROW, RowFacts

HASHED_AT_ONCE = 100_000
"""Strings turned into Python objects at a time."""


class ItemIndex:
    """Finds the rows of item ids; 16 bytes an item beside the ids themselves."""

    def __init__(self, item_id: pa.Array, facts: RowFacts | None = None) -> None:
        """Sorts the ids' keys once.

        Args:
            item_id: int64 or string [N], in row order, as in `Catalog.item_id`.
            facts: Where the catalog's buckets are.
        """
        self._facts = facts or RowFacts()
        has_id = item_id.is_valid().to_numpy(zero_copy_only=False)
        self._item_id = item_id if has_id.all() else item_id.drop_null()
        keys = _keys(self._item_id)
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._row = (FIRST_ROW + np.flatnonzero(has_id))[order]
        # A key is the id itself, or the hash of a text, which others may share.
        self._place = None if pa.types.is_integer(item_id.type) else order
        self._most_alike = 1
        if self._place is not None and len(keys) > 1:
            self._most_alike = int(np.unique(self._keys, return_counts=True)[1].max())

    @property
    def type(self) -> pa.DataType:
        """The ids' type."""
        return self._item_id.type

    def rows(self, ids: pa.Array) -> np.ndarray:
        """The rows of ids of the catalog's type.

        Args:
            ids: [n], nulls allowed.

        Returns:
            int64 [n]: an id that the catalog does not hold gets its bucket, or `UNKNOWN_ROW` where
            there are no buckets; null gets `UNKNOWN_ROW`.
        """
        rows = np.full(len(ids), UNKNOWN_ROW, np.int64)
        if not len(ids):
            return rows
        keys = _keys(ids)
        first = np.searchsorted(self._keys, keys)
        for step in range(self._most_alike if len(self._keys) else 0):
            places = np.minimum(first + step, len(self._keys) - 1)
            found = self._keys[places] == keys
            if ids.null_count:
                found &= ids.is_valid().to_numpy(zero_copy_only=False)
            if self._place is not None:
                known = self._item_id.take(pa.array(self._place[places]))
                found &= pc.equal(known, ids).fill_null(False).to_numpy(zero_copy_only=False)
            rows[found] = self._row[places[found]]
        if self._facts.buckets:
            unknown = np.flatnonzero((rows == UNKNOWN_ROW) & ids.is_valid().to_numpy(False))
            for place in unknown.tolist():
                rows[place] = self._facts.first_bucket + bucket_of(
                    str(ids[place].as_py()), self._facts.buckets
                )
        return rows

    def without_row(self, rows: np.ndarray) -> np.ndarray:
        """Which of some rows int64 [n] are no item's own, but of padding, strangers or a bucket."""
        place = rows - self._facts.first_bucket
        return (rows < FIRST_ROW) | ((place >= 0) & (place < self._facts.buckets))


def bucket_of(item_id: str, buckets: int) -> int:
    """The bucket of an item without a row of its own, as the data stage's engine finds it."""
    digest = hashlib.md5(item_id.encode(), usedforsecurity=False).hexdigest()
    return (int(digest[:16], 16) >> 1) % buckets


def _keys(ids: pa.Array) -> np.ndarray:
    if pa.types.is_integer(ids.type):
        return ids.fill_null(0).to_numpy().astype(np.int64)
    parts = [
        pd.util.hash_array(
            ids.slice(start, HASHED_AT_ONCE).fill_null("").to_numpy(zero_copy_only=False),
            categorize=False,
        )
        for start in range(0, len(ids), HASHED_AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)
