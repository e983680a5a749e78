"""Writes small dataset folders as `thawline windows` would, from plain Python rows."""

from __future__ import annotations

import datetime
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.manifest import SCHEMA_VERSION, Dataset, Manifest, Window

HOUR = 3_600_000_000
DAY = 24 * HOUR
EPOCH_DAY = datetime.date(2026, 1, 1)
START = int(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
"""2026-01-01 in microseconds: the fine-tune window is days 1 and 2 from here, the test day 3."""

TIMESTAMP = pa.timestamp("us", tz="UTC")


def request_schema(actions: list[str], context: list[str], oracle: bool) -> pa.Schema:
    fields = [
        ("request_id", pa.int64()),
        ("user_id", pa.int64()),
        ("timestamp", TIMESTAMP),
        ("held_out", pa.bool_()),
        ("history_row", pa.list_(pa.int64())),
        ("history_action", pa.list_(pa.int8())),
        ("history_age", pa.list_(pa.float32())),
        ("candidate_row", pa.list_(pa.int64())),
        *((f"label_{name}", pa.list_(pa.int8())) for name in actions),
    ]
    if oracle:
        fields += [(f"oracle_{name}", pa.list_(pa.float32())) for name in actions]
    return pa.schema(fields + [(f"ctx_{name}", pa.int32()) for name in context])


def random_requests(
    count: int,
    *,
    num_items: int,
    impressions: bool,
    actions: list[str],
    context: list[str],
    oracle: bool = False,
    longest: int = 20,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Requests spread over days 1 to 3, a fifth of them held out, some without a history."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(0, longest + 1))
        candidates = int(rng.integers(1, 7)) if impressions else 1
        row: dict[str, Any] = {
            "request_id": 1000 + index,
            "user_id": int(rng.integers(0, 50)),
            "timestamp": START + DAY + 3 * DAY * index // count,
            "held_out": bool(rng.random() < 0.2),
            "history_row": rng.integers(1, num_items + 2, length).tolist(),
            "history_action": rng.integers(1, 2 ** len(actions), length).tolist(),
            "history_age": np.sort(rng.random(length).astype(np.float32) * 100 + 0.1)[::-1],
            "candidate_row": rng.integers(2, num_items + 2, candidates).tolist(),
        }
        for action in actions:
            labels = rng.integers(0, 2, candidates) if impressions else np.ones(1, int)
            row[f"label_{action}"] = labels.tolist()
            if oracle:
                row[f"oracle_{action}"] = rng.random(candidates).astype(np.float32)
        for name in context:
            row[f"ctx_{name}"] = int(rng.integers(0, 4))
        rows.append(row)
    return rows


def write_dataset(
    root: Path,
    *,
    requests: list[dict[str, Any]] = (),  # type: ignore[assignment]
    sequences: list[dict[str, Any]] = (),  # type: ignore[assignment]
    first_seen: list[int] | None = None,
    num_items: int = 30,
    pretrain_count: list[int] | None = None,
    support: list[int] | None = None,
    popularity: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
    bucket_minutes: int = 60,
    impressions: bool = True,
    actions: list[str] | None = None,
    context: list[str] | None = None,
    oracle: bool = False,
    rows_per_file: int = 40,
    rows_per_group: int = 8,
) -> Dataset:
    """Writes a dataset folder.

    `first_seen` and the bucket starts of `popularity` (bucket, row, count) are microseconds.
    """
    actions = actions or ["click"]
    context = context or []
    first_seen = [START] * num_items if first_seen is None else first_seen
    num_items = len(first_seen)
    by_day: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in requests:
        day = EPOCH_DAY + datetime.timedelta(days=(row["timestamp"] - START) // DAY)
        by_day[str(day)].append(row)
    schema = request_schema(actions, context, oracle)
    for day, rows in by_day.items():
        _write_parts(root / "requests" / f"day={day}", rows, schema, rows_per_file, rows_per_group)
    sequence_schema = pa.schema(
        [("user_id", pa.int64()), ("held_out", pa.bool_()), ("item_row", pa.list_(pa.int64()))]
    )
    root.mkdir(parents=True, exist_ok=True)
    if sequences:
        _write_parts(root / "sequences", sequences, sequence_schema, rows_per_file, rows_per_group)
    zeros = [0] * num_items
    catalog = {
        "item_id": pa.array(range(num_items), pa.int64()),
        "row": pa.array(range(2, num_items + 2), pa.int64()),
        "first_seen": pa.array(first_seen, TIMESTAMP),
        "pretrain_count": pa.array(pretrain_count or zeros, pa.int64()),
        "support": pa.array(support or zeros, pa.int64()),
        "tier": pa.array(zeros, pa.int8()),
    }
    pq.write_table(pa.table(catalog), root / "catalog.parquet")
    buckets = {
        "bucket": pa.array([entry[0] for entry in popularity], TIMESTAMP),
        "row": pa.array([entry[1] for entry in popularity], pa.int64()),
        "count": pa.array([entry[2] for entry in popularity], pa.int64()),
    }
    pq.write_table(pa.table(buckets), root / "popularity.parquet")

    def day(offset: int) -> datetime.date:
        return EPOCH_DAY + datetime.timedelta(days=offset)

    def counted(first: int, last: int, held_out: bool) -> int:
        return sum(
            first <= (row["timestamp"] - START) // DAY <= last and row["held_out"] == held_out
            for row in requests
        )

    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        data_version="test",
        impressions=impressions,
        actions=actions,
        context={name: ["a", "b", "c"] for name in context},
        history_length=50,
        bucket_minutes=bucket_minutes,
        pretrain=Window(start=day(0), end=day(0)),
        finetune=Window(start=day(1), end=day(2)),
        test=Window(start=day(3), end=day(3)),
        num_items=num_items,
        requests={
            "train": counted(1, 2, False),
            "in_window": counted(1, 2, True),
            "next": counted(3, 3, False),
        },
        requests_by_day={name: len(rows) for name, rows in by_day.items()},
        sequences={
            "train": sum(not row["held_out"] for row in sequences),
            "held_out": sum(row["held_out"] for row in sequences),
        },
        rejected={},
        has_oracle=oracle,
    )
    (root / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    return Dataset.open(root)


def _write_parts(
    folder: Path,
    rows: list[dict[str, Any]],
    schema: pa.Schema,
    rows_per_file: int,
    rows_per_group: int,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(rows), rows_per_file)):
        table = pa.Table.from_pylist(rows[start : start + rows_per_file], schema)
        pq.write_table(table, folder / f"part-{number:05d}.parquet", row_group_size=rows_per_group)
