"""A log of ten days that is hard to group, and its dataset by plain loops."""

import datetime
import hashlib
import random
from collections import Counter, defaultdict

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset

DAY = 86_400_000_000
START = int(datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
TIMESTAMP = pa.timestamp("us", tz="UTC")
WINDOWS = {
    "end": "2026-03-08",
    "test_days": 2,
    "finetune_days": 3,
    "pretrain_days": 3,
    "history_length": 5,
    "sequence_length": 4,
    "holdout_users": 0.3,
    "tiers": {"head": 8, "torso": 5},
    "rows_per_file": 40,
    "rows_per_group": 16,
}
# 1 to 3 March pretrain, 4 to 6 fine-tune, 7 and 8 test; a day lies before and after.
PRETRAIN = (START, START + 3 * DAY)
FINETUNE = (START + 3 * DAY, START + 6 * DAY)
TEST = (START + 6 * DAY, START + 8 * DAY)


def random_log(ids, seed=0):
    """Rows of 41 users and 50 items over ten days, many at the same time, in no order."""
    draw = random.Random(seed)  # noqa: S311
    rows = []
    for request in range(400):
        # Whole hours: users often have several requests at the same time.
        time = START - DAY + draw.randrange(10 * 24) * DAY // 24
        user = draw.choice([1] * 12 + [*range(2, 12)] * 3 + [*range(12, 42)])
        items = sorted({int(50 * draw.random() ** 2) for _ in range(draw.randint(1, 6))})
        draw.shuffle(items)
        for position, item in enumerate(items):
            click = draw.random() < 0.5
            rows.append(
                {
                    "user": user if ids == "int" else f"user-{user}",
                    "item": 1000 - item if ids == "int" else f"item-{item:02d}",
                    "time": time + draw.choice([0, 0, 1, DAY // 24]),
                    "request": 7000 - request if ids == "int" else f"r{request}",
                    "position": len(items) - position,
                    "click": click,
                    "save": click and draw.random() < 0.4,
                    "device": draw.choice(
                        ["tv", "web", "ios", None, "new" if time > TEST[0] else "tv"]
                    ),
                }
            )
    draw.shuffle(rows)
    return rows


def write_log(rows, path):
    table = pa.Table.from_pylist(rows)
    place = table.schema.get_field_index("time")
    pq.write_table(table.set_column(place, "time", table["time"].cast(TIMESTAMP)), path)
    return path


def built(config, root):
    root.mkdir()
    build_dataset(config, root)
    return Dataset.open(root)


def config_for(path, impressions, **windows):
    columns = {"user_id": "user", "item_id": "item", "timestamp": "time"}
    if impressions:
        columns |= {"request_id": "request", "position": "position"}
    return Config.model_validate(
        {
            "events": {
                "path": str(path),
                "columns": columns,
                "actions": {"save": {"column": "save"}, "click": {"column": "click"}},
                "context": {"device": "device"},
            },
            "windows": WINDOWS | windows,
            "runtime": {"threads": 2},
        }
    )


def digest63(text):
    return int(hashlib.md5(text.encode()).hexdigest()[:16], 16) // 2  # noqa: S324


def is_held_out(user):
    first = int(hashlib.md5(f"holdout:{user}".encode()).hexdigest()[:12], 16)  # noqa: S324
    return first / 16**12 < WINDOWS["holdout_users"]


class Reference:
    """The dataset of a log, one plain loop at a time."""

    def __init__(self, rows, impressions):
        if not impressions:
            # Of several copies the one with the most actions stays, then the first by context.
            def rank(row):
                return (row["save"], row["click"], row["device"] is not None)

            unique = {}
            for row in sorted(rows, key=lambda row: row["device"] or ""):
                key = (row["user"], row["item"], row["time"])
                if key not in unique or rank(row) > rank(unique[key]):
                    unique[key] = row
            rows = list(unique.values())
        rows = [dict(row) for row in rows if row["time"] < TEST[1]]
        for row in rows:
            row["action"] = row["save"] + 2 * row["click"]
            if not impressions:
                row["number"] = digest63(f"{row['user']}|{row['time']}|{row['item']}")
            elif isinstance(row["request"], str):
                row["number"] = digest63(row["request"])
            else:
                row["number"] = row["request"]
        self.rows, self.impressions = rows, impressions
        first_seen = {}
        for row in rows:
            first_seen[row["item"]] = min(first_seen.get(row["item"], TEST[1]), row["time"])
        items = sorted(first_seen, key=lambda item: (first_seen[item], item))
        self.row_of = {item: index + 2 for index, item in enumerate(items)}
        self.catalog = [self.item(item, first_seen[item]) for item in items]
        self.positives = defaultdict(list)
        for row in rows:
            if row["action"]:
                self.positives[row["user"]].append(row)
        for events in self.positives.values():
            events.sort(key=self.order)

    def order(self, row):
        ties = (row["number"], row["position"]) if self.impressions else ()
        return (row["time"], *ties, self.row_of[row["item"]])

    def item(self, item, first_seen):
        def positives(window):
            return sum(
                row["item"] == item
                and row["action"] > 0
                and window[0] <= row["time"] < window[1]
                and not is_held_out(row["user"])
                for row in self.rows
            )

        support = positives(FINETUNE)
        tier = 0 if support >= 8 else 1 if support >= 5 else 2 if support >= 1 else 3
        return {
            "item_id": item,
            "row": self.row_of[item],
            "first_seen": first_seen,
            "pretrain_count": positives(PRETRAIN),
            "support": support,
            "tier": tier,
        }

    def vocabulary(self):
        return sorted(
            {
                row["device"]
                for row in self.rows
                if FINETUNE[0] <= row["time"] < FINETUNE[1]
                and not is_held_out(row["user"])
                and row["device"] is not None
            }
        )

    def requests(self):
        groups = defaultdict(list)
        for row in self.rows:
            if self.impressions or row["action"]:
                groups[row["number"]].append(row)
        vocabulary, found = self.vocabulary(), []
        for number, group in groups.items():
            time = min(row["time"] for row in group)
            if not FINETUNE[0] <= time < TEST[1]:
                continue
            # What was shown after the end of the request's window is not in it.
            end = FINETUNE[1] if time < FINETUNE[1] else TEST[1]
            group = [row for row in group if row["time"] < end]
            group.sort(key=lambda row: (row["position"], row["time"], self.row_of[row["item"]]))
            first = min(group, key=lambda row: row["time"])
            before = [row for row in self.positives[first["user"]] if row["time"] < time][-5:]
            found.append(
                {
                    "request_id": number,
                    "user_id": first["user"],
                    "timestamp": time,
                    "held_out": is_held_out(first["user"]),
                    "history_row": [self.row_of[row["item"]] for row in before],
                    "history_action": [row["action"] for row in before],
                    "history_age": [(time - row["time"]) / 3.6e9 for row in before],
                    "candidate_row": [self.row_of[row["item"]] for row in group],
                    "label_save": [int(row["save"]) for row in group],
                    "label_click": [int(row["click"]) for row in group],
                    "ctx_device": (
                        vocabulary.index(first["device"]) + 1
                        if first["device"] in vocabulary
                        else 0
                    ),
                }
            )
        return sorted(found, key=lambda request: (request["timestamp"], request["request_id"]))

    def sequences(self):
        found = []
        for user in sorted(self.positives):
            items = [
                self.row_of[row["item"]]
                for row in self.positives[user]
                if PRETRAIN[0] <= row["time"] < PRETRAIN[1]
            ]
            while len(items) >= 2:
                found.append(
                    {"user_id": user, "held_out": is_held_out(user), "item_row": items[:4]}
                )
                items = items[3:]
        return found

    def popularity(self):
        hour = DAY // 24
        counts = Counter(
            (row["time"] // hour * hour, self.row_of[row["item"]])
            for rows in self.positives.values()
            for row in rows
        )
        return [
            {"bucket": bucket, "row": row, "count": count}
            for (bucket, row), count in sorted(counts.items())
        ]


def read(files):
    rows = []
    for file in files:
        table = pq.read_table(file, partitioning=None)
        for name in ("timestamp", "first_seen", "bucket"):
            if name in table.column_names:
                place = table.schema.get_field_index(name)
                assert table.schema.field(place).type == TIMESTAMP
                table = table.set_column(place, name, table[name].cast(pa.int64()))
        rows += table.to_pylist()
    return rows


def every_request(dataset):
    return read(sorted((dataset.root / "requests").glob("day=*/part-*.parquet")))
