"""The content vectors of a dataset's items."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.manifest import FIRST_ROW, ContentFacts, Dataset
from thawline.errors import DataError

_REBUILD = "build the dataset again with `thawline windows`"


def content_facts(dataset: Dataset) -> ContentFacts:
    """What the manifest says of the vectors.

    Raises:
        DataError: The dataset has none.
    """
    facts = dataset.manifest.content
    if facts is None:
        raise DataError(
            f"{dataset.root} was built without content vectors",
            "set items.path and items.content (or simulate.content_dim) and build it again",
        )
    return facts


def read_content(dataset: Dataset) -> np.ndarray:
    """Reads the vectors, by catalog row.

    Returns:
        float32 [num_rows, k]: zeros for padding, unknown items, buckets and items without a vector.

    Raises:
        DataError: The dataset has no vectors, or the file is damaged.
    """
    facts = content_facts(dataset)
    content = np.zeros((dataset.catalog.num_rows, facts.dim), np.float32)
    path = dataset.root / "items.parquet"
    place = FIRST_ROW
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["content"]):
                values = batch.column("content").flatten().to_numpy()
                content[place : place + len(batch)] = values.reshape(len(batch), facts.dim)
                place += len(batch)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}", _REBUILD) from error
    if place != len(content):
        raise DataError(
            f"{path} has {place - FIRST_ROW} lines, the catalog {len(content) - FIRST_ROW}",
            _REBUILD,
        )
    return content
