"""Files of scores: `scores/<hold-out>.parquet`, a row a request, so that others can compare models.

```
request_id int64 · user_id (as in the log) · timestamp · item_id list · tier list<int8>
label_<action> list<int8> · logit_<action> list<float> · weight double, where requests have one
```

An item that the catalog does not know, or that shares a bucket, has no id here. `model` and
`data_version` are in the file's metadata. How two files are paired is said in `pairing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.manifest import FIRST_ROW, TIERS, Catalog
from thawline.errors import DataError
from thawline.evaluation.scored import Scored

TIMESTAMP = pa.timestamp("us", tz="UTC")
CANDIDATES_PER_GROUP = 1 << 20
"""A row group holds the requests of about so many candidates, which bounds the memory."""
MODEL_KEY, DATA_KEY = b"model", b"data_version"
LABEL, LOGIT, WEIGHT = "label_", "logit_", "weight"
REMEDY = "write the file again with `thawline evaluate`"


@dataclass(frozen=True)
class Scores:
    """R requests with K candidates in all; request `r` owns `offsets[r]:offsets[r + 1]`."""

    actions: list[str]
    """Names of the A heads, the primary one first."""
    request_id: np.ndarray
    """int64 [R]."""
    user_id: pa.Array
    """[R]: int64 or string, as in the log."""
    timestamp: np.ndarray
    """int64 [R]: microseconds since 1970 UTC."""
    offsets: np.ndarray
    """int64 [R + 1]."""
    item_id: pa.Array
    """[K]: int64 or string, as in the log; null without an id of its own."""
    tier: np.ndarray
    """int8 [K]: index into `TIERS`."""
    labels: np.ndarray
    """int8 [K, A]."""
    logits: np.ndarray
    """float32 [K, A]."""
    model: str = ""
    """What was scored, in words."""
    data_version: str = ""
    """Of the dataset that holds the requests."""
    weight: np.ndarray | None = None
    """float64 [R]: of the requests; None: all alike."""

    @classmethod
    def of(
        cls, scored: Scored, catalog: Catalog, *, model: str = "", data_version: str = ""
    ) -> Scores:
        """What a file of these requests would hold.

        Raises:
            DataError: Requests without their users.
        """
        return cls(
            actions=scored.actions,
            request_id=scored.request_id,
            user_id=_users(scored),
            timestamp=scored.timestamp,
            offsets=scored.offsets,
            item_id=item_ids(catalog, scored.row),
            tier=tiers(catalog, scored.row),
            labels=scored.labels,
            logits=scored.logits,
            model=model,
            data_version=data_version,
            weight=scored.weight,
        )


def tiers(catalog: Catalog, row: np.ndarray) -> np.ndarray:
    """int8 [K]: the tier of each row, cold for items that the catalog does not know."""
    unknown = np.full(FIRST_ROW, TIERS.index("cold"), np.int8)
    return np.concatenate([unknown, np.asarray(catalog.tier, np.int8)])[row]


def item_ids(catalog: Catalog, row: np.ndarray) -> pa.Array:
    """[K]: the item of each row; null for unknown items and buckets."""
    return catalog.item_id.take(
        pa.array(np.where(row < FIRST_ROW, 0, row - FIRST_ROW), mask=row < FIRST_ROW)
    )


def write_scores(
    path: Path, scored: Scored, catalog: Catalog, *, model: str, data_version: str
) -> None:
    """Writes a file of scores, a row group at a time.

    Args:
        path: Its folder is made.
        scored: With the users (`Scored.user_id`).
        catalog: Of the dataset, which gives the items' ids and tiers.
        model: What was scored, in words.
        data_version: Of the dataset.

    Raises:
        DataError: Requests without their users.
    """
    users = _users(scored)
    lists = {
        "item_id": catalog.item_id.type,
        "tier": pa.int8(),
        **{f"{LABEL}{action}": pa.int8() for action in scored.actions},
        **{f"{LOGIT}{action}": pa.float32() for action in scored.actions},
    }
    schema = pa.schema(
        [
            ("request_id", pa.int64()),
            ("user_id", users.type),
            ("timestamp", TIMESTAMP),
            *((name, pa.list_(kind)) for name, kind in lists.items()),
            *([] if scored.weight is None else [(WEIGHT, pa.float64())]),
        ],
        metadata={MODEL_KEY: model.encode(), DATA_KEY: data_version.encode()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for start, stop in _groups(scored.offsets):
            first, last = scored.offsets[start], scored.offsets[stop]
            row = scored.row[first:last]
            values = [
                item_ids(catalog, row),
                pa.array(tiers(catalog, row)),
                *(pa.array(scored.labels[first:last, a]) for a in range(len(scored.actions))),
                *(pa.array(scored.logits[first:last, a]) for a in range(len(scored.actions))),
            ]
            offsets = pa.array((scored.offsets[start : stop + 1] - first).astype(np.int32))
            columns = [
                pa.array(scored.request_id[start:stop]),
                users.slice(start, stop - start),
                pa.array(scored.timestamp[start:stop]).cast(pa.int64()).cast(TIMESTAMP),
                *(pa.ListArray.from_arrays(offsets, each) for each in values),
                *([] if scored.weight is None else [pa.array(scored.weight[start:stop])]),
            ]
            file.write_table(pa.table(columns, schema=schema), row_group_size=stop - start)


def read_scores(path: Path) -> Scores:
    """Reads a file of scores, a row group at a time.

    Raises:
        DataError: A missing or damaged file, or one of something else; the message names it.
    """
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            actions = [name.removeprefix(LOGIT) for name in schema.names if name.startswith(LOGIT)]
            heads = [f"{kind}{action}" for kind in (LABEL, LOGIT) for action in actions]
            lists = ["item_id", "tier", *heads]
            wanted = ["request_id", "user_id", "timestamp", *lists]
            lacking = [name for name in wanted if name not in schema.names]
            if not actions or lacking:
                lost = ", ".join(lacking or ["logit_<action>"])
                raise DataError(f"{path} is no file of scores: it lacks {lost}", REMEDY)
            kept = [
                _decoded(file.read_row_group(group), lists, path)
                for group in range(file.num_row_groups)
            ]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}", REMEDY) from error
    metadata = schema.metadata or {}
    num_actions = len(actions)

    def joined(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(group[name] for group in kept)])

    def stacked(names: list[str], dtype: type) -> np.ndarray:
        return np.stack([joined(name, dtype) for name in names], axis=1)

    def arrays(name: str, kind: pa.DataType) -> pa.Array:
        return pa.concat_arrays([pa.array([], kind), *(group[name] for group in kept)])

    return Scores(
        actions=actions,
        request_id=joined("request_id", np.int64),
        user_id=arrays("user_id", schema.field("user_id").type),
        timestamp=joined("timestamp", np.int64),
        offsets=np.concatenate([[0], np.cumsum(joined("lengths", np.int64))]).astype(np.int64),
        item_id=arrays("item_id", schema.field("item_id").type.value_type),
        tier=joined("tier", np.int8),
        labels=stacked(lists[2 : 2 + num_actions], np.int8),
        logits=stacked(lists[2 + num_actions :], np.float32),
        model=metadata.get(MODEL_KEY, b"").decode(),
        data_version=metadata.get(DATA_KEY, b"").decode(),
        weight=joined(WEIGHT, np.float64) if WEIGHT in schema.names else None,
    )


def _decoded(table: pa.Table, lists: list[str], path: Path) -> dict[str, np.ndarray]:
    """The columns of a row group: one value a request, or lists laid end to end."""
    found: dict[str, np.ndarray] = {
        "request_id": table.column("request_id").to_numpy(),
        "timestamp": table.column("timestamp").cast(TIMESTAMP).cast(pa.int64()).to_numpy(),
        "user_id": table.column("user_id").combine_chunks(),
    }
    if WEIGHT in table.column_names:
        found[WEIGHT] = table.column(WEIGHT).to_numpy()
    for name in lists:
        column = table.column(name).combine_chunks()
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
        if column.null_count or not np.array_equal(found.setdefault("lengths", lengths), lengths):
            raise DataError(f"{path}: the lists of {name} and item_id differ in length", REMEDY)
        flat = column.flatten()
        if name != "item_id" and flat.null_count:
            raise DataError(f"{path}: the column {name} holds nulls", REMEDY)
        found[name] = flat if name == "item_id" else flat.to_numpy()
    return found


def _users(scored: Scored) -> pa.Array:
    if scored.user_id is None:
        raise DataError(
            "scored requests do not say who asked, which comparisons go by",
            "score them with `users=True`",
        )
    return scored.user_id


def _groups(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Spans of requests with about `CANDIDATES_PER_GROUP` candidates each, at least a request."""
    start, requests = 0, len(offsets) - 1
    while start < requests:
        stop = (
            int(np.searchsorted(offsets, offsets[start] + CANDIDATES_PER_GROUP, side="right")) - 1
        )
        stop = min(max(stop, start + 1), requests)
        yield start, stop
        start = stop
