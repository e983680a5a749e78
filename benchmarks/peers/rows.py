"""A map-style dataset of Parquet rows, as a first data loader is usually written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch
from torch.utils.data import Dataset


class RowDataset(Dataset[dict[str, torch.Tensor]]):
    """One request an index; lists are padded to one width, so that default collate can stack them.

    The table is held in memory, which spares it the reading of a row group for each row.
    """

    def __init__(self, files: list[Path], columns: list[str], width: int) -> None:
        """Reads the columns of all training requests."""
        table = ds.dataset([str(path) for path in files]).to_table(
            columns=columns, filter=~pc.field("held_out")
        )
        self.table = table.combine_chunks()
        self.width = width

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (row,) = self.table.slice(index, 1).to_pylist()
        return {name: self._tensor(name, value) for name, value in row.items()}

    def _tensor(self, name: str, value: Any) -> torch.Tensor:
        if isinstance(value, list):
            kind = np.float32 if name == "history_age" else np.int64
            if name.startswith("history"):
                padded = np.zeros(self.width, kind)
                padded[: len(value)] = value
                return torch.from_numpy(padded)
            return torch.tensor(value)
        if pa.types.is_timestamp(self.table.schema.field(name).type):
            return torch.tensor(int(value.timestamp() * 1e6))
        return torch.tensor(value)
