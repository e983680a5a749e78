"""The rows of ID tables as Parquet, for retrieval: what the network reads of each item.

```
item.parquet      item_id, vector: the adapter is applied; items without a row of their own are out
<table>.parquet   hash, vector: of a further table with a vocabulary (`hashed: false`)
```

`vector` is a fixed-size list of float32. `hash` is `data.ids.hash_ids` of an id.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from thawline.data.manifest import FIRST_ROW
from thawline.errors import DataError
from thawline.model.bundle import Bundle

ROWS_PER_GROUP = 1 << 16
"""Rows that are adapted and written at a time: 16 MiB of 64 floats each."""


def write_vectors(bundle: Bundle, folder: Path) -> list[Path]:
    """Writes every table of a model that has ids, one file each.

    Args:
        bundle: The model, on any device.
        folder: Exists.

    Returns:
        The files.
    """
    names = ["item", *bundle.ids.known]
    paths = [folder / f"{name}.parquet" for name in names]
    for name, path in zip(names, paths, strict=True):
        write_table(bundle, name, path)
    return paths


def write_table(bundle: Bundle, name: str, path: Path) -> None:
    """Writes one table of a model.

    Raises:
        DataError: The model has no such table, or the table has no ids.
    """
    if name == "item":
        ids = bundle.catalog.item_id
        # An id of its own is what a retrieval index answers with; a bucket has none.
        kept = np.flatnonzero(ids.is_valid().to_numpy(zero_copy_only=False))
        ids = ids.take(pa.array(kept)) if len(kept) < len(ids) else ids
        _write(path, "item_id", ids, bundle.weights["item"], FIRST_ROW + kept, _adapted(bundle))
    elif name in bundle.ids.known:
        hashes = bundle.ids.known[name]
        rows = np.arange(1, len(hashes) + 1)
        _write(path, "hash", pa.array(hashes, pa.int64()), bundle.weights[name], rows, None)
    else:
        known = ", ".join(["item", *bundle.ids.known])
        raise DataError(
            f"the model has no table {name!r} with ids", f"choose one of {known} (`hashed: false`)"
        )


def vector_bytes(bundle: Bundle) -> int:
    """About how large the files of `write_vectors` are."""
    size = bundle.catalog.item_id.nbytes + 4 * bundle.weights["item"].numel()
    for name, hashes in bundle.ids.known.items():
        size += len(hashes) * (8 + 4 * bundle.weights[name].shape[1])
    return size


def _adapted(bundle: Bundle) -> Callable[[Tensor], Tensor]:
    return bundle.ranker.adapter


def _write(
    path: Path,
    key: str,
    ids: pa.Array,
    weight: Tensor,
    rows: np.ndarray,
    adapt: Callable[[Tensor], Tensor] | None,
) -> None:
    dim = weight.shape[1]
    schema = pa.schema([(key, ids.type), ("vector", pa.list_(pa.float32(), dim))])
    # Floats of a trained table do not compress.
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, max(len(ids), 1), ROWS_PER_GROUP):
            some = torch.from_numpy(rows[start : start + ROWS_PER_GROUP]).to(weight.device)
            with torch.inference_mode():
                vectors = weight.index_select(0, some).float()
                vectors = vectors if adapt is None else adapt(vectors)
            flat = pa.array(vectors.cpu().numpy().ravel())
            columns = [
                ids.slice(start, ROWS_PER_GROUP),
                pa.FixedSizeListArray.from_arrays(flat, dim),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
