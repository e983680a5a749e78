"""What a model folder holds of the ids of its further tables, so that it scores without a dataset.

```
ids/<name>.parquet      of a table with a vocabulary: the hash of each row's id, from row 1 on
item_ids.safetensors    of each table over ids of items: the row of each catalog row
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from thawline.config import IdTableSettings
from thawline.data.ids import IdRows, IdVocabulary, read_item_ids
from thawline.data.manifest import Dataset, read_table
from thawline.errors import DataError
from thawline.model.files import save_tensors

REMEDY = "use the files of one model folder together, or fine-tune again"


@dataclass(frozen=True)
class ModelIds:
    """The rows of ids in tables beside the item table."""

    known: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of each table with a vocabulary: int64 [V], the hashes of the ids of rows 1 to V."""
    of_items: Mapping[str, Tensor] = field(default_factory=dict)
    """Of each table over ids of items: int64 [num_rows], its row for each row of the catalog."""

    @classmethod
    def of(cls, dataset: Dataset, tables: Mapping[str, IdTableSettings]) -> ModelIds:
        """The ids of a model that is trained on a dataset.

        Raises:
            DataError: The dataset was built without the ids of a table.
        """
        return cls(
            {
                name: IdVocabulary.read(dataset, spec.of, spec.column).hash[: spec.rows - 1]
                for name, spec in tables.items()
                if not spec.hashed
            },
            {
                name: torch.from_numpy(
                    IdRows.of(dataset, spec)(read_item_ids(dataset, spec.column))
                )
                for name, spec in tables.items()
                if spec.of == "item"
            },
        )

    @classmethod
    def read(cls, folder: Path, tables: Mapping[str, IdTableSettings], num_rows: int) -> ModelIds:
        """Reads them from a model folder over a catalog of `num_rows` rows.

        Raises:
            DataError: A missing, damaged or unfitting file; the message names it.
        """
        return cls(
            {
                name: read_known(folder, name, spec.rows)
                for name, spec in tables.items()
                if not spec.hashed
            },
            _read_of_items(folder / "item_ids.safetensors", tables, num_rows),
        )

    def write(self, folder: Path) -> None:
        """Writes them to a model folder; without such tables there is nothing to write."""
        for name, hashes in self.known.items():
            path = _known_path(folder, name)
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"hash": pa.array(hashes, pa.int64())}), path)
        if self.of_items:
            rows = {name: rows.contiguous().cpu() for name, rows in self.of_items.items()}
            save_tensors(rows, folder / "item_ids.safetensors")

    def rows(self, name: str, spec: IdTableSettings, hashes: np.ndarray) -> np.ndarray:
        """The rows int64 [...] of hashes of ids int64 [...] in one table: 0 for unknown ones."""
        return IdRows(spec.rows, self.known.get(name))(hashes)


def read_known(folder: Path, name: str, rows: int) -> np.ndarray:
    """Reads the vocabulary of a table of `rows` rows from a model folder.

    Returns:
        int64 [V]: the hashes of the ids of rows 1 to V.

    Raises:
        DataError: A missing, damaged or unfitting file; the message names it.
    """
    path = _known_path(folder, name)
    hashes: np.ndarray = read_table(path, ["hash"]).column("hash").to_numpy()
    if len(hashes) >= rows or hashes.dtype != np.int64:
        raise DataError(
            f"{path} holds {len(hashes)} values of {hashes.dtype}; int64 and at most {rows - 1} "
            f"were expected",
            REMEDY,
        )
    return hashes


def _known_path(folder: Path, name: str) -> Path:
    return folder / "ids" / f"{name}.parquet"


def _read_of_items(
    path: Path, tables: Mapping[str, IdTableSettings], num_rows: int
) -> dict[str, Tensor]:
    wanted = {name: spec.rows for name, spec in tables.items() if spec.of == "item"}
    if not wanted:
        return {}
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", REMEDY) from error
    for name, rows in wanted.items():
        own = found.get(name)
        if own is None or own.dtype != torch.int64 or own.shape != (num_rows,):
            raise DataError(f"{path} lacks the {num_rows} rows of the table `{name}`", REMEDY)
        if int(own.min()) < 0 or int(own.max()) >= rows:
            raise DataError(f"{path} names a row beyond the {rows} of the table `{name}`", REMEDY)
    return {name: found[name] for name in wanted}
