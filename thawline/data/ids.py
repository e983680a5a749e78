"""Ids of further tables: their hashes, the rows that hashes have, and how much support a row has.

A dataset stores hashes, so that a table's width and rows can change without building it again.
What is stored where is said in `manifest`; `id_files` writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from thawline.data.manifest import FIRST_ROW, Dataset, read_table
from thawline.errors import DataError

MISSING = 0
"""Hash of an id that is not there."""
USER_ID = "user_id"
"""The column of the user, whatever its name in the log."""

Owner = Literal["request", "item"]
"""Whose id it is: one a request, or one a catalog item."""


class IdTableSpec(Protocol):
    """Which ids have which rows: `IdTableSettings` of the config is one."""

    @property
    def column(self) -> str:
        """Where the ids are."""

    @property
    def of(self) -> Owner:
        """Whose they are."""

    @property
    def rows(self) -> int:
        """Of the table, row 0 included."""

    @property
    def hashed(self) -> bool:
        """Whether a row is a hash of the id, or its place in the vocabulary."""


def columns_of(tables: Mapping[str, IdTableSpec], of: Owner) -> dict[str, str]:
    """The distinct columns that tables take such ids from, by the config key of the first one."""
    found: dict[str, str] = {}
    for name in sorted(tables):
        if tables[name].of == of and tables[name].column not in found.values():
            found[f"tables.{name}.column"] = tables[name].column
    return found


def log_columns(tables: Mapping[str, IdTableSpec]) -> dict[str, str]:
    """The columns that only tables need of a log, by config key: not the user's own."""
    found = columns_of(tables, "request")
    return {key: column for key, column in found.items() if column != USER_ID}


def stored_as(column: str) -> str:
    """The column of a dataset's files that holds the hashes of a column."""
    return f"id_{column}"


def vocabulary_path(root: Path, of: Owner, column: str) -> Path:
    """Where a dataset folder has the vocabulary of a column."""
    return root / "ids" / f"{of}_{quote(column, safe='')}.parquet"


def hash_ids(ids: pa.Array | pa.ChunkedArray | Sequence[object]) -> np.ndarray:
    """Hashes ids as the windows stage does: the first 63 bits of the MD5 of their text.

    Args:
        ids: Integers or texts, as in the log; None and empty texts are missing.

    Returns:
        int64 [n]: `MISSING` for a missing id. Each distinct id is hashed once.
    """
    array = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    coded = array.cast(pa.string()).dictionary_encode()
    hashes = [_hash(text) for text in coded.dictionary.to_pylist()]
    codes = coded.indices.fill_null(len(hashes)).to_numpy(zero_copy_only=False)
    return np.array([*hashes, MISSING], np.int64)[codes]


def _hash(text: str) -> int:
    if not text:
        return MISSING
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class IdVocabulary:
    """The ids of a column that training has seen, the most frequent first."""

    hash: np.ndarray
    """int64 [V], ordered by falling support, then by hash."""
    support: np.ndarray
    """int64 [V]: training requests of the fine-tune window with that id; of an item's ids,
    positives of training users there."""

    @classmethod
    def read(cls, dataset: Dataset, of: Owner, column: str) -> IdVocabulary:
        """Reads a vocabulary of a dataset.

        Raises:
            DataError: The dataset was built without the column, or the file is damaged.
        """
        _require(dataset, of, column)
        table = read_table(vocabulary_path(dataset.root, of, column), ["hash", "support"])
        return cls(table.column("hash").to_numpy(), table.column("support").to_numpy())


class IdRows:
    """The rows of one table for hashes of ids."""

    def __init__(self, rows: int, known: np.ndarray | None = None) -> None:
        """Prepares the look-up.

        Args:
            rows: Of the table, row 0 included; at least 2.
            known: int64 [V]: the hashes of a vocabulary in order; those beyond `rows - 1` have no
                row. None: a row is the hash modulo `rows - 1`.
        """
        self._rows = rows
        self._known = self._row = None
        if known is not None:
            kept = known[: rows - 1]
            order = np.argsort(kept)
            self._known, self._row = kept[order], order + 1

    @classmethod
    def of(cls, dataset: Dataset, spec: IdTableSpec) -> IdRows:
        """The rows of a table over the ids of a dataset.

        Raises:
            DataError: The dataset was built without the column.
        """
        if spec.hashed:
            return cls(spec.rows)
        return cls(spec.rows, IdVocabulary.read(dataset, spec.of, spec.column).hash)

    def __call__(self, hashes: np.ndarray) -> np.ndarray:
        """Rows int64 [...] of hashes int64 [...]: 0 for what is missing or has no row."""
        if self._known is None or self._row is None:
            return np.where(hashes == MISSING, 0, 1 + hashes % (self._rows - 1))
        if not len(self._known):
            return np.zeros(hashes.shape, np.int64)
        place = np.searchsorted(self._known, hashes)
        place = np.minimum(place, len(self._known) - 1)
        return np.where(self._known[place] == hashes, self._row[place], 0)


def table_support(dataset: Dataset, spec: IdTableSpec) -> np.ndarray:
    """What each row of a table has seen in the fine-tune window.

    Returns:
        int64 [rows]: sums of `IdVocabulary.support`; 0 at row 0.

    Raises:
        DataError: The dataset was built without the column.
    """
    known = IdVocabulary.read(dataset, spec.of, spec.column)
    rows = IdRows.of(dataset, spec)(known.hash)
    support = np.zeros(spec.rows, np.int64)
    np.add.at(support, rows, known.support)
    support[0] = 0
    return support


def read_item_ids(dataset: Dataset, column: str) -> np.ndarray:
    """The hashes of an item column, by catalog row.

    Returns:
        int64 [num_rows]: `MISSING` for padding, unknown items, buckets and items without an id.

    Raises:
        DataError: The dataset was built without the column, or the file is damaged.
    """
    _require(dataset, "item", column)
    path = dataset.root / "items.parquet"
    stored = read_table(path, [stored_as(column)]).column(0).to_numpy()
    if len(stored) + FIRST_ROW != dataset.catalog.num_rows:
        raise DataError(
            f"{path} has {len(stored)} lines, the catalog {dataset.catalog.num_rows - FIRST_ROW}",
            "build the dataset again with `thawline windows`",
        )
    return np.concatenate([np.full(FIRST_ROW, MISSING, np.int64), stored])


def require_ids(dataset: Dataset, tables: Mapping[str, IdTableSpec]) -> None:
    """Checks that a dataset has the ids of all tables.

    Raises:
        DataError: It was built without one of their columns.
    """
    for spec in tables.values():
        _require(dataset, spec.of, spec.column)


def _require(dataset: Dataset, of: Owner, column: str) -> None:
    if column not in dataset.manifest.ids.get(of, {}):
        raise DataError(
            f"{dataset.root} was built without the ids of {column!r} (of: {of})",
            "build it with this config: `thawline windows`",
        )
