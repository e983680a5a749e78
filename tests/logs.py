"""A small log by days, for tests of datasets that follow one another."""

import datetime
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset

DAY = 86_400_000_000
START = int(datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
"""1 March 2026, in microseconds."""

SCHEMA = pa.schema(
    [
        ("user", pa.int64()),
        ("item", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("request", pa.int64()),
        ("position", pa.int64()),
        ("click", pa.bool_()),
        ("device", pa.string()),
    ]
)
WINDOWS = {
    "end": "2026-03-07",
    "test_days": 1,
    "finetune_days": 3,
    "pretrain_days": 3,
    "history_length": 5,
    "sequence_length": 4,
    "holdout_users": 0.2,
    "tiers": {"head": 8, "torso": 5},
    "rows_per_file": 20,
    "rows_per_group": 8,
}
"""1 to 3 March pretrain, 4 to 6 fine-tune, 7 test; the log goes on."""


def events_of(number, requests=40, items=30):
    """Events of the day `number` days after 1 March; a few items are new each day."""
    draw = random.Random(number)  # noqa: S311
    rows = []
    for index in range(requests):
        time = START + number * DAY + draw.randrange(DAY // 10**6 - 60) * 10**6
        shown = draw.sample(range(items + 3 * number), 3)
        rows += [
            {
                "user": draw.randrange(25),
                "item": item,
                "time": time + position,
                "request": 1000 * number + index,
                "position": position,
                "click": draw.random() < 0.6,
                "device": draw.choice(["tv", "web", None]),
            }
            for position, item in enumerate(shown)
        ]
        for row in rows[-3:]:
            row["user"] = rows[-1]["user"]
    return rows


def write(rows, path):
    """Writes events as a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def write_days(folder, numbers, **more):
    """Writes a file a day."""
    for number in numbers:
        write(events_of(number, **more), folder / f"{number:02d}.parquet")
    return folder


def config_for(path, *, impressions=True, context=True, **windows):
    """A config for such a log."""
    columns = {"user_id": "user", "item_id": "item", "timestamp": "time"}
    if impressions:
        columns |= {"request_id": "request", "position": "position"}
    return Config.model_validate(
        {
            "events": {
                "path": str(path),
                "columns": columns,
                "actions": {"click": {"column": "click"}},
                "context": {"device": "device"} if context else {},
            },
            "windows": WINDOWS | windows,
            "runtime": {"threads": 1},
        }
    )


def built(config, root, sources=()):
    """A dataset, and what its build said it did."""
    root.mkdir(parents=True, exist_ok=True)
    steps = []
    build_dataset(config, root, steps.append, sources=sources)
    return Dataset.open(root), steps


def days_built(steps):
    """The days of requests that a build wrote."""
    prefix = "writing the requests of "
    return [step.removeprefix(prefix) for step in steps if step.startswith(prefix)]


def contents(root):
    """Every file of a dataset but its manifest and its audit."""
    files = sorted(file for file in Path(root).rglob("*") if file.is_file())
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in files
        if file.name not in ("manifest.json", "audit.json")
    }
