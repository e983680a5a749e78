"""A log whose actions are rows of their own and come after their impressions."""

import datetime
import random

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Config

HOUR = 3_600_000_000
DAY = 24 * HOUR
START = int(datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
FINETUNE = (START + 2 * DAY, START + 4 * DAY)
TEST = (START + 4 * DAY, START + 5 * DAY)
WINDOWS = {
    "end": "2026-03-05",
    "test_days": 1,
    "finetune_days": 2,
    "pretrain_days": 2,
    "history_length": 6,
    "holdout_users": 0.2,
    "tiers": {"head": 8, "torso": 3},
}
ACTIONS = ("save", "click")
GAP = 1_800


def random_log(seed, *, named):
    """Views of pages of up to five items, clicks soon after, saves up to two days after."""
    draw = random.Random(seed)  # noqa: S311
    rows = []

    def add(kind, user, item, time, request=None, position=None):
        rows.append((kind, user, item, time, request if named else None, position))

    for page in range(260):
        user, request = draw.randrange(14), f"r{page}"
        time = START + draw.randrange(5 * 48) * HOUR // 2 + draw.choice([0, 0, 7])
        for position in range(draw.randint(1, 5)):
            item = int(20 * draw.random() ** 2)
            shown = time + draw.choice([0, 0, 1, 600_000_000])
            add("view", user, item, shown, request, position)
            # A clock that goes back puts some clicks before their view.
            for kind, chance, latest in (("click", 0.4, HOUR), ("save", 0.4, 2 * DAY)):
                if draw.random() < chance:
                    later = shown + draw.choice([0, -1, draw.randrange(latest), draw.randrange(9)])
                    add(kind, user, item, later, draw.choice([None, request]))
        if draw.random() < 0.2:
            add("save", user, draw.randrange(25), time + draw.randrange(DAY))
    rows = list(dict.fromkeys(rows))
    draw.shuffle(rows)
    return rows


def write_log(rows, path):
    names = ("event", "user_id", "item_id", "timestamp", "request_id", "position")
    columns = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    columns["timestamp"] = pa.array(columns["timestamp"], pa.timestamp("us", tz="UTC"))
    columns["request_id"] = pa.array(columns["request_id"], pa.string())
    columns["position"] = pa.array(columns["position"], pa.int64())
    pq.write_table(pa.table(columns), path)
    return path


def config_for(path, *, named, hours=6.0, **events):
    columns = {"position": "position"} | ({"request_id": "request_id"} if named else {})
    return Config.model_validate(
        {
            "events": {
                "path": str(path),
                "columns": columns,
                "impression": {"column": "event", "equals": "view"},
                "actions": {name: {"column": "event", "equals": name} for name in ACTIONS},
                "attribution_hours": hours,
                "request_gap_seconds": None if named else GAP,
            }
            | events,
            # Clicks of one moment on one item are duplicates; the test's log has many.
            "windows": WINDOWS | {"max_rejected": 0.5},
            "runtime": {"threads": 1},
        }
    )
