"""Small logs of clicks, to which something is then done."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset

HOUR = 3_600_000_000
DAY = 24 * HOUR
START = int(datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
WINDOWS = {
    "end": "2026-03-06",
    "test_days": 1,
    "finetune_days": 3,
    "pretrain_days": 2,
    "history_length": 4,
    "holdout_users": 0.0,
    "tiers": {"head": 8, "torso": 3},
}


def clicks(users=20, days=6, items=7):
    """Each user clicks twice a day: (user, item, microseconds)."""
    return [
        (user, (user + day + turn) % items, START + day * DAY + turn * HOUR + user)
        for day in range(days)
        for user in range(users)
        for turn in (1, 2)
    ]


def write(path, rows, *, user=None, item=None, timestamp="us", **columns):
    users, items, times = (list(column) for column in zip(*rows, strict=True))
    if timestamp == "us":
        times = pa.array(times, pa.timestamp("us", tz="UTC"))
    table = {
        "user_id": pa.array(users, user),
        "item_id": pa.array(items, item),
        "timestamp": times,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table | columns), path)
    return path


def config_for(path, *, windows=None, **events):
    return Config.model_validate(
        {
            "events": {"path": str(path)} | events,
            "windows": WINDOWS | (windows or {}),
            "runtime": {"threads": 1},
        }
    )


def built(config, root):
    root.mkdir()
    build_dataset(config, root)
    return Dataset.open(root)


def requests_of(dataset):
    files = sorted((dataset.root / "requests").glob("day=*/part-*.parquet"))
    return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
