"""Dataset folders against a slow, obvious reference, and the ways in which a log can be unfit."""

import contextlib
import datetime
import hashlib
import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from thawline.config import Config
from thawline.data.manifest import TIERS, Dataset
from thawline.data.windows import build_dataset, inputs_version
from thawline.errors import DataError
from thawline.stages import windows as stage

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


@pytest.fixture(
    scope="module", params=["impressions-int", "impressions-text", "clicks-int", "clicks-text"]
)
def case(request, tmp_path_factory):
    """A dataset and its reference."""
    kind, ids = request.param.split("-")
    rows = random_log(ids)
    root = tmp_path_factory.mktemp("windows")
    config = config_for(write_log(rows, root / "log.parquet"), kind == "impressions")
    return built(config, root / "dataset"), Reference(rows, kind == "impressions")


def test_the_catalog_equals_the_reference(case):
    dataset, reference = case
    assert read([dataset.root / "catalog.parquet"]) == reference.catalog
    assert {TIERS[item["tier"]] for item in reference.catalog} == set(TIERS)


def test_popularity_equals_the_reference(case):
    dataset, reference = case
    assert read([dataset.root / "popularity.parquet"]) == reference.popularity()


def test_sequences_equal_the_reference(case):
    dataset, reference = case
    expected = reference.sequences()
    assert read(dataset.sequence_files()) == expected
    held_out = sum(sequence["held_out"] for sequence in expected)
    assert held_out > 0
    assert dataset.manifest.sequences == {
        "train": len(expected) - held_out,
        "held_out": held_out,
    }


def test_requests_equal_the_reference(case):
    dataset, reference = case
    found, expected = every_request(dataset), reference.requests()
    ages = [[round(age, 3) for age in request.pop("history_age")] for request in found]
    assert ages == [[round(age, 3) for age in request.pop("history_age")] for request in expected]
    assert found == expected


def test_the_reference_log_is_hard_enough(case):
    _, reference = case
    requests = reference.requests()
    assert max(len(reference.positives[user]) for user in reference.positives) > 50
    assert any(len(request["history_row"]) == 0 for request in requests)
    assert any(0 < len(request["history_row"]) < 5 for request in requests)
    assert any(request["ctx_device"] == 0 for request in requests)
    times = Counter((request["user_id"], request["timestamp"]) for request in requests)
    assert max(times.values()) > 1
    if reference.impressions:
        assert any(not any(request["label_click"]) for request in requests)


def test_the_manifest_counts_what_the_files_hold(case):
    dataset, _ = case
    manifest = dataset.manifest
    by_split = {}
    for split in ("train", "in_window", "next"):
        rows = read(dataset.request_files(split))
        by_split[split] = sum(row["held_out"] == (split == "in_window") for row in rows)
    assert manifest.requests == by_split
    assert min(by_split.values()) > 0
    for day, count in manifest.requests_by_day.items():
        files = (dataset.root / "requests" / f"day={day}").glob("*.parquet")
        assert count == sum(pq.read_metadata(file).num_rows for file in files)
    assert manifest.num_items == len(dataset.catalog.item_id)
    assert [str(day) for day in (manifest.pretrain.start, manifest.pretrain.end)] == [
        "2026-03-01",
        "2026-03-03",
    ]
    assert [str(day) for day in (manifest.finetune.start, manifest.finetune.end)] == [
        "2026-03-04",
        "2026-03-06",
    ]
    assert [str(day) for day in (manifest.test.start, manifest.test.end)] == [
        "2026-03-07",
        "2026-03-08",
    ]


def test_files_and_row_groups_have_the_configured_number_of_rows(case):
    dataset, _ = case
    for folder in (dataset.root / "requests").iterdir():
        files = sorted(folder.iterdir())
        for index, file in enumerate(files):
            metadata = pq.read_metadata(file)
            groups = [
                metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
            ]
            if index < len(files) - 1:
                assert groups == [16, 16, 8]
            else:
                assert groups == [16, 16, 8][: len(groups) - 1] + groups[-1:]


def test_no_event_at_or_after_the_request_is_in_a_history(tiny_dataset):
    requests = every_request(tiny_dataset)
    assert min(min(request["history_age"], default=1) for request in requests) > 0
    source = pq.read_table(tiny_dataset.root / "source" / "events.parquet").to_pylist()
    clicks = defaultdict(set)
    rows = dict(zip(tiny_dataset.catalog.item_id.to_pylist(), range(2, 10_000), strict=False))
    for event in source:
        if event["click"]:
            clicks[event["user_id"], rows[event["item_id"]]].add(
                int(event["timestamp"].timestamp() * 1e6)
            )
    for request in requests:
        for row in request["history_row"]:
            assert min(clicks[request["user_id"], row]) < request["timestamp"]


def test_held_out_users_are_in_no_training_data(tiny_dataset):
    held_out = {row["user_id"] for row in every_request(tiny_dataset) if row["held_out"]}
    train = {row["user_id"] for row in every_request(tiny_dataset) if not row["held_out"]}
    sequences = read(tiny_dataset.sequence_files())
    assert held_out
    assert not held_out & train
    assert not held_out & {row["user_id"] for row in sequences if not row["held_out"]}
    assert not train & {row["user_id"] for row in sequences if row["held_out"]}


def test_simulated_requests_carry_their_true_probabilities(tiny_dataset):
    truth = {
        (row["request_id"], row["item_id"]): (row["p_save"], row["p_click"])
        for row in pq.read_table(tiny_dataset.root / "source" / "truth.parquet").to_pylist()
    }
    items = tiny_dataset.catalog.item_id.to_pylist()
    for request in every_request(tiny_dataset):
        pairs = zip(request["oracle_save"], request["oracle_click"], strict=True)
        for row, pair in zip(request["candidate_row"], pairs, strict=True):
            assert pair == truth[request["request_id"], items[row - 2]]


def test_the_same_input_gives_the_same_bytes_with_any_number_of_threads(tmp_path):
    path = write_log(random_log("text"), tmp_path / "log.parquet")
    config = config_for(path, impressions=True)
    first = built(config, tmp_path / "first").root
    shuffled = config.model_copy(
        update={"runtime": config.runtime.model_copy(update={"threads": 1})}
    )
    second = built(shuffled, tmp_path / "second").root
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(second) for file in second.rglob("*") if file.is_file())
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_the_inputs_version_follows_content_and_config_but_not_names(tmp_path):
    rows = random_log("int")

    def version(name, rows=rows, **windows):
        path = write_log(rows, tmp_path / f"{name}.parquet")
        return inputs_version(config_for(path, True, **windows))

    plain = version("plain")
    assert version("renamed") == plain
    assert version("more_memory", memory_limit="1GB") == plain
    assert version("shorter", history_length=4) != plain
    assert version("fewer", rows=rows[:-1]) != plain


def test_a_user_with_more_events_than_blocks_gets_the_last_ones(tmp_path):
    rows = [
        {"user": 1, "item": index % 97, "time": START + index * DAY // 1000}
        for index in range(8 * 1_000)
    ]
    path = write_log(rows, tmp_path / "log.parquet")
    events = {
        "path": str(path),
        "columns": {"user_id": "user", "item_id": "item", "timestamp": "time"},
    }
    config = Config.model_validate(
        {
            "events": events,
            "windows": WINDOWS
            | {"history_length": 50, "holdout_users": 0.0, "rows_per_group": 4_000},
        }
    )
    dataset = built(config, tmp_path / "dataset")
    row_of = {item: row for row, item in enumerate(dataset.catalog.item_id.to_pylist(), 2)}
    for request in every_request(dataset)[::200]:
        index = (request["timestamp"] - START) // (DAY // 1000)
        assert request["history_row"] == [row_of[i % 97] for i in range(index - 50, index)]


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ({"end": "2026-03-12"}, "the test window (2026-03-11 to 2026-03-12) has no requests"),
        ({"end": "2026-03-10"}, "the fine-tune window (2026-03-06 to 2026-03-08) has no requests"),
        (
            {"end": "2026-03-04", "finetune_days": 1},
            "the pretraining window (2026-02-27 to 2026-03-01) has no training user with two",
        ),
    ],
)
def test_an_empty_window_is_named_with_its_dates_and_the_range_of_the_log(tmp_path, windows, named):
    rows = [
        {
            "user": user,
            "item": user + day,
            "time": START + (day - 1) * DAY + user,
            "request": 100 * day + user,
            "position": 0,
            "click": True,
            "save": False,
            "device": "tv",
        }
        for day in (2, 3, 4, 9, 10)
        for user in range(20)
    ]
    config = config_for(write_log(rows, tmp_path / "log.parquet"), True, **windows)
    with pytest.raises(DataError) as error:
        build_dataset(config, tmp_path)
    assert named in str(error.value)
    assert "the log runs from 2026-03-02 to 2026-03-10" in str(error.value)
    assert "windows.end" in error.value.remedy


def test_a_context_column_of_many_values_is_refused_by_name(tmp_path):
    rows = [
        {
            "user": 1 + i % 50,
            "item": i % 9,
            "time": START + i * DAY // 1000,
            "click": True,
            "save": False,
            "device": f"{i}",
        }
        for i in range(8_000)
    ]
    config = config_for(write_log(rows, tmp_path / "log.parquet"), False)
    with pytest.raises(DataError, match=r"events\.context\.device has \d+ values"):
        build_dataset(config, tmp_path)


def test_truth_of_another_log_is_refused(tmp_path):
    path = write_log(random_log("int"), tmp_path / "log.parquet")
    truth = {"request_id": [6999], "item_id": [990], "p_click": [0.5], "p_save": [0.1]}
    pq.write_table(pa.table(truth), tmp_path / "truth.parquet")
    config = config_for(path, True)
    events = config.events.model_copy(update={"truth": str(tmp_path / "truth.parquet")})
    with pytest.raises(DataError, match=r"has no p_save for \d+ of the requests' candidates"):
        build_dataset(config.model_copy(update={"events": events}), tmp_path)


def test_a_damaged_truth_is_named(tmp_path):
    path = write_log(random_log("int"), tmp_path / "log.parquet")
    (tmp_path / "truth.parquet").write_bytes(b"PAR1 nothing PAR1")
    config = config_for(path, True)
    events = config.events.model_copy(update={"truth": str(tmp_path / "truth.parquet")})
    with pytest.raises(DataError, match=r"truth\.parquet cannot be read as Parquet"):
        build_dataset(config.model_copy(update={"events": events}), tmp_path)


# The stage.


class Recorder:
    """Stands for an MLflow run: keeps what it is told."""

    def __init__(self):
        self.params, self.metrics, self.artifacts = {}, {}, []

    def log_params(self, params):
        self.params |= params

    def log_metrics(self, metrics):
        self.metrics |= metrics

    def log_artifact(self, path):
        self.artifacts.append(path.read_text(encoding="utf-8"))


@pytest.fixture
def recorder(monkeypatch):
    record = Recorder()
    monkeypatch.setattr(stage, "stage_run", lambda *_: contextlib.nullcontext(record))
    return record


def test_the_stage_logs_its_counts_and_the_data_version(tmp_path, recorder, tiny_clicks_config):
    manifest = stage.run(tiny_clicks_config, tmp_path / "dataset")
    assert Dataset.open(tmp_path / "dataset").manifest == manifest
    assert recorder.params["data_version"] == manifest.data_version
    assert recorder.params["finetune_window"] == "2026-01-05 to 2026-01-07"
    assert recorder.metrics["items"] == manifest.num_items
    assert recorder.metrics["requests"] == manifest.requests
    assert recorder.metrics["audit"]["error"] == 0
    # The manifest and the audit.
    assert [json.loads(text)["data_version"] for text in recorder.artifacts] == [
        manifest.data_version
    ] * 2


def test_a_stage_that_fails_leaves_the_earlier_dataset_and_nothing_else(
    tmp_path, recorder, tiny_clicks_config
):
    out = tmp_path / "dataset"
    out.mkdir()
    (out / "manifest.json").write_text("earlier", encoding="utf-8")
    windows = tiny_clicks_config.windows.model_copy(update={"end": datetime.date(2030, 1, 1)})
    with pytest.raises(DataError, match="has no requests"):
        stage.run(tiny_clicks_config.model_copy(update={"windows": windows}), out)
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    assert (out / "manifest.json").read_text(encoding="utf-8") == "earlier"
    assert recorder.params == {}


# The real log.


@pytest.mark.slow
def test_the_news_log_becomes_a_dataset(tmp_path):
    path = Path(__file__).parent.parent / "../shared/data/news_clicks.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    config = Config.model_validate(
        {
            "events": {
                "path": str(path),
                "timestamp_unit": "ms",
                "columns": {"item_id": "click_article_id", "timestamp": "click_timestamp"},
                "context": {"device": "click_deviceGroup", "region": "click_region"},
                "sample_users": 0.2,
            },
            "windows": {
                "end": "2017-10-16",
                "finetune_days": 7,
                "pretrain_days": 13,
                "pretrain_overlap": True,
            },
        }
    )
    dataset = built(config, tmp_path / "dataset")
    table = pq.read_table(path, columns=["user_id", "click_timestamp"])
    users = [
        user
        for user in table["user_id"].unique().to_pylist()
        if int(hashlib.md5(f"sample:{user}".encode()).hexdigest()[:12], 16) / 16**12 < 0.2  # noqa: S324
    ]
    kept = table.filter(pc.is_in(table["user_id"], pa.array(users, pa.int32())))
    day = pc.divide(kept["click_timestamp"], DAY // 1_000).to_numpy()
    first = (datetime.date(2017, 10, 9) - datetime.date(1970, 1, 1)).days
    counts = dataset.manifest.requests_by_day
    assert list(counts.values()) == [int((day == first + offset).sum()) for offset in range(8)]
    assert dataset.manifest.rejected == {}
