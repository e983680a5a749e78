"""Logs and datasets with something wrong in them: what is said, what is kept, what still works."""

import datetime
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets import write_dataset

from thawline.config import Config, Negatives
from thawline.data.batches import RequestReader
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.data.windows import build_dataset
from thawline.errors import DataError

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


def message_of(tmp_path, config):
    with pytest.raises(DataError) as error, tempfile.TemporaryDirectory(dir=tmp_path) as root:
        build_dataset(config, Path(root))
    return str(error.value)


def requests_of(dataset):
    files = sorted((dataset.root / "requests").glob("day=*/part-*.parquet"))
    return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]


def rejected_of(dataset):
    files = sorted((dataset.root / "rejected").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


# Rows that are put aside, and too many of them.


def test_times_in_mixed_units_are_put_aside_or_refused_with_a_hint(tmp_path):
    rows = [(user, item, us // 1_000) for user, item, us in clicks()]
    rows[5] = (*rows[5][:2], rows[5][2] // 1_000)
    path = write(tmp_path / "log.parquet", rows, timestamp="ms")
    config = config_for(path, timestamp_unit="ms")
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.rejected == {"impossible timestamp": 1}
    assert [row["timestamp"] for row in rejected_of(dataset)] == [str(rows[5][2])]
    for index in range(0, 60, 2):
        rows[index] = (*rows[index][:2], clicks()[index][2] // 1_000_000)
    write(path, rows, timestamp="ms")
    message = message_of(tmp_path, config)
    assert "31 of 240 rows cannot be used: 31 impossible timestamp" in message
    assert str(rows[0][2]) in message
    assert "if some times are in another unit than the rest, write them in one" in message


def test_rows_of_the_future_are_put_aside_unless_the_config_allows_them(tmp_path):
    future = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=40)
    rows = [*clicks(), (3, 3, int(future.timestamp() * 1e6))]
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    assert dataset.manifest.rejected == {"future timestamp": 1}
    allowed = config_for(path, latest="2099-12-31")
    assert built(allowed, tmp_path / "allowed").manifest.rejected == {}
    early = config_for(path, latest="2026-03-06T00:00:00", windows={"max_rejected": 0.5})
    assert built(
        early.model_copy(
            update={"windows": early.windows.model_copy(update={"end": datetime.date(2026, 3, 5)})}
        ),
        tmp_path / "early",
    ).manifest.rejected == {"future timestamp": 41}


def test_words_that_no_action_names_are_put_aside_and_named_ones_left_out(tmp_path):
    rows = clicks()
    words = ["click"] * len(rows)
    words[7], words[8], words[9] = "clikc", "scroll", None
    path = write(tmp_path / "log.parquet", rows, event=words)
    events = {"actions": {"click": {"column": "event", "equals": ["click", "tap"]}}}
    wide = {"max_rejected": 0.1}
    dataset = built(config_for(path, windows=wide, **events), tmp_path / "all")
    assert dataset.manifest.rejected == {"unknown action": 2}
    assert sorted(row["action"] for row in rejected_of(dataset)) == ["clikc", "scroll"]
    events["ignored_actions"] = ["scroll"]
    dataset = built(config_for(path, **events), tmp_path / "ignored")
    assert dataset.manifest.rejected == {"unknown action": 1}
    assert dataset.manifest.requests["train"] == 3 * 40
    words[:40] = ["clikc"] * 40
    write(path, rows, event=words)
    message = message_of(tmp_path, config_for(path, **events))
    assert "unknown action" in message
    assert "'clikc'" in message
    assert "name these words in an action's equals or in events.ignored_actions" in message
    write(path, rows, event=["view"] * len(rows))
    message = message_of(tmp_path, config_for(path, **events))
    assert "column 'event' (events.actions.click.column) is never 'click' or 'tap'" in message
    assert "it holds 'view'" in message


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_bytes_that_are_no_text_are_put_aside_and_the_rest_is_read(tmp_path, kind):
    rows = [(f"ü{user}", f"i{item}", us) for user, item, us in clicks()]
    good = write(tmp_path / "log" / "good.parquet", rows[:100])
    encoded = [user.encode() for user, _, _ in rows[100:]]
    encoded[3] = "ü9".encode("latin-1")
    if kind == "parquet":
        names = pa.array(encoded, pa.binary()).view(pa.string())
        table = pq.read_table(write(tmp_path / "log" / "bad.parquet", rows[100:]))
        pq.write_table(table.set_column(0, "user_id", names), tmp_path / "log" / "bad.parquet")
    else:
        good.unlink()
        encoded = [user.encode() for user, _, _ in rows[:100]] + encoded
        lines = [
            b"%s,%s,%d\n" % (user, item.encode(), us)
            for user, (_, item, us) in zip(encoded, rows, strict=True)
        ]
        header = b"user_id,item_id,timestamp\n"
        (tmp_path / "log" / "bad.csv").write_bytes(header + b"".join(lines))
    unit = {"timestamp_unit": "us"} if kind == "csv" else {}
    config = config_for(tmp_path / "log", **unit)
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.rejected == {"bad encoding": 1}
    assert [row["user_id"] for row in rejected_of(dataset)] == ["\ufffd9"]
    assert "ü3" in {request["user_id"] for request in requests_of(dataset)}
    strict = config_for(tmp_path / "log", windows={"max_rejected": 0.0}, **unit)
    message = message_of(tmp_path, strict)
    assert "1 of 240 rows cannot be used: 1 bad encoding" in message
    assert "write the log as UTF-8" in message


def test_two_files_that_claim_the_same_day_are_refused_with_a_hint(tmp_path):
    log = tmp_path / "log"
    rows = clicks()
    for day in range(6):
        of_day = [row for row in rows if (row[2] - START) // DAY == day]
        write(log / f"day={day}" / "a.parquet", of_day)
    sound = built(config_for(log), tmp_path / "sound")
    write(log / "again" / "b.parquet", [row for row in rows if (row[2] - START) // DAY == 4])
    message = message_of(tmp_path, config_for(log))
    assert "40 of 280 rows cannot be used: 40 duplicate" in message
    assert "see whether two files of events.path hold the same days" in message
    allowed = built(config_for(log, windows={"max_rejected": 0.2}), tmp_path / "allowed")
    assert requests_of(allowed) == requests_of(sound)


def test_rejected_rows_are_written_with_their_own_text_and_reason(tmp_path):
    rows = [*clicks(), *clicks()[:1]]
    rows[10] = (None, 5, rows[10][2])
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    assert dataset.manifest.rejected == {"duplicate": 1, "null user_id": 1}
    kept = sorted(rejected_of(dataset), key=lambda row: row["reason"])
    assert [(row["user_id"], row["item_id"], row["reason"]) for row in kept] == [
        ("0", str(clicks()[0][1]), "duplicate"),
        (None, "5", "null user_id"),
    ]


# Columns and files.


def test_a_column_that_changes_its_type_between_files_is_named(tmp_path):
    rows = clicks()
    write(tmp_path / "log" / "a.parquet", rows[:100])
    texts = [(f"{user}", item, us) for user, item, us in rows[100:]]
    write(tmp_path / "log" / "b.parquet", texts)
    message = message_of(tmp_path, config_for(tmp_path / "log"))
    assert "b.parquet: column 'user_id' (events.columns.user_id) is string, but int64" in message
    assert "a.parquet" in message


@pytest.mark.parametrize(
    ("events", "key"),
    [
        ({"columns": {"item_id": "tags"}}, "events.columns.item_id"),
        ({"context": {"tags": "tags"}}, "events.context.tags"),
        ({"actions": {"click": {"column": "tags"}}}, "events.actions.click.column"),
    ],
)
def test_a_list_column_with_nulls_is_refused_by_name(tmp_path, events, key):
    rows = clicks()
    tags = [[1, None], None, []] * (len(rows) // 3)
    path = write(tmp_path / "log.parquet", rows, tags=tags)
    message = message_of(tmp_path, config_for(path, **events))
    assert f"column 'tags' ({key}) is of type array" in message


@pytest.mark.parametrize("column", ["history_row", "candidate_row", "label_click"])
def test_a_null_in_a_list_of_a_dataset_names_the_file(tmp_path, column):
    request = {
        "request_id": 1,
        "user_id": 1,
        "timestamp": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "held_out": False,
        "history_row": [2, 2],
        "history_action": [1, 1],
        "history_age": [2.0, 1.0],
        "candidate_row": [2, 3],
        "label_click": [1, 0],
    }
    good = request | {"timestamp": int(request["timestamp"].timestamp() * 1e6)}
    dataset = write_dataset(tmp_path, requests=[good], num_items=3)
    (file,) = dataset.request_files("train")
    schema = pq.read_schema(file)
    pq.write_table(pa.Table.from_pylist([request | {column: [2, None]}], schema), file)
    reader = RequestReader(dataset, "train", batch_size=1, sampler=None)
    with pytest.raises(DataError, match=r"part-00000\.parquet, row group 0, cannot be read"):
        list(reader.epoch(0))


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_part_file_of_the_log_is_named_among_good_ones(tmp_path, damage):
    rows = [(user * 7919 % 10_007, item, us) for user, item, us in clicks(users=400)]
    for name, part in (("a", rows[:2_000]), ("b", rows[2_000:4_000]), ("c", rows[4_000:])):
        write(tmp_path / "log" / f"{name}.parquet", part)
    file = tmp_path / "log" / "b.parquet"
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    else:
        content[4:600] = bytes(596)
    file.write_bytes(content)
    message = message_of(tmp_path, config_for(tmp_path / "log"))
    assert "b.parquet cannot be read" in message
    assert "a.parquet" not in message


def test_a_damaged_part_file_of_a_dataset_is_named(tmp_path):
    path = write(tmp_path / "log.parquet", clicks())
    dataset = built(config_for(path), tmp_path / "dataset")
    file = dataset.request_files("next")[0]
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"day=2026-03-06/part-00000\.parquet cannot be read"):
        RequestReader(dataset, "next", batch_size=8, sampler=None)


def test_a_manifest_of_another_schema_version_is_refused_with_both_versions(tmp_path):
    path = write(tmp_path / "log.parquet", clicks())
    dataset = built(config_for(path), tmp_path / "dataset")
    manifest = dataset.root / "manifest.json"
    tree = json.loads(manifest.read_text(encoding="utf-8"))
    ours = tree["schema_version"]
    manifest.write_text(json.dumps(tree | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(DataError) as error:
        Dataset.open(dataset.root)
    assert f"manifest.json has schema version 99; this Thawline reads {ours}" in str(error.value)
    assert "build the dataset again" in error.value.remedy


# Users, items and days that are unusual, and work.


def test_a_user_with_one_event_has_a_request_without_history_and_no_sequence(tmp_path):
    rows = [*clicks(), (900, 1, START + DAY), (901, 1, START + 3 * DAY)]
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    found = [request for request in requests_of(dataset) if request["user_id"] >= 900]
    assert [(r["user_id"], r["history_row"]) for r in found] == [(901, [])]
    sequences = [r for file in dataset.sequence_files() for r in pq.read_table(file).to_pylist()]
    assert max(row["user_id"] for row in sequences) == 19


def test_an_item_of_the_test_alone_has_a_cold_row_that_is_not_drawn_before(tmp_path):
    rows = [*clicks(), *((user, 77, START + 5 * DAY + 9 * HOUR) for user in range(5))]
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    items = dataset.catalog.item_id.to_pylist()
    row = items.index(77) + 2
    assert (dataset.catalog.support[row - 2], dataset.catalog.tier[row - 2]) == (0, 3)
    for popularity in ("window", "as_of", "decayed"):
        sampler = NegativeSampler(dataset, Negatives(popularity=popularity, alpha=0.0), 0)
        times = np.full(2_000, START + 5 * DAY + 9 * HOUR)
        drawn = sampler.draw(np.arange(2_000), times, np.zeros((2_000, 1), int), 4, 0)
        assert drawn.any()
        assert row not in drawn


@pytest.mark.slow
def test_a_million_events_of_one_user_take_their_place_beside_the_others(tmp_path):
    count = 1_000_000
    rng = np.random.default_rng(0)
    small = clicks()
    times = np.concatenate(
        [np.sort(rng.choice(6 * DAY, count, replace=False)) + START, [us for *_, us in small]]
    )
    table = pa.table(
        {
            "user_id": np.concatenate([np.full(count, 500), [user for user, *_ in small]]),
            "item_id": np.concatenate([rng.integers(0, 5_000, count), [i for _, i, _ in small]]),
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    config = config_for(tmp_path / "log.parquet", windows={"memory_limit": "1GB"})
    begun = time.process_time()
    dataset = built(config, tmp_path / "dataset")
    assert time.process_time() - begun < 120
    assert sum(dataset.manifest.requests_by_day.values()) == pytest.approx(4 / 6 * count, rel=0.01)
    found = pq.read_table(dataset.request_files("next")[-1], partitioning=None)
    found = found.filter(pc.equal(found["user_id"], 500))
    last = found.slice(len(found) - 1).to_pylist()[0]
    items = dataset.catalog.item_id.to_numpy()
    place = int(np.searchsorted(times[:count], int(last["timestamp"].timestamp() * 1e6)))
    before = table["item_id"].to_numpy()[place - 4 : place].tolist()
    assert [int(items[row - 2]) for row in last["history_row"]] == before


def test_a_day_without_events_inside_a_window_is_counted_as_empty_and_read_over(tmp_path):
    rows = [row for row in clicks() if (row[2] - START) // DAY != 3]
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    assert dataset.manifest.requests_by_day == {
        "2026-03-03": 40,
        "2026-03-04": 0,
        "2026-03-05": 40,
        "2026-03-06": 40,
    }
    reader = RequestReader(dataset, "train", batch_size=32, sampler=None)
    assert sum(len(batch) for batch in reader.epoch(0)) == 80


def test_a_clock_that_goes_back_leaves_no_request_in_its_own_history(tmp_path):
    """Positions go up while times go down, and the file is not in order of time."""
    rows, requests, positions = [], [], []
    for number, (user, item, us) in enumerate(reversed(clicks())):
        for position in range(3):
            rows.append((user, (item + position) % 7, us - position * 1_000_000))
            requests.append(number)
            positions.append(position)
    path = write(tmp_path / "log.parquet", rows, request=requests, place=positions)
    columns = {"request_id": "request", "position": "place"}
    dataset = built(config_for(path, columns=columns), tmp_path / "dataset")
    items = dataset.catalog.item_id.to_pylist()
    sound = clicks()[::-1]
    for request in requests_of(dataset):
        user, item, us = sound[request["request_id"]]
        start = us - 2_000_000
        assert request["timestamp"].timestamp() == start / 1e6
        shown = [items[row - 2] for row in request["candidate_row"]]
        assert shown == [(item + position) % 7 for position in range(3)]
        assert all(age > 0 for age in request["history_age"])
        earlier = sum(3 for other, _, at in sound if other == user and at < us)
        assert len(request["history_row"]) == min(earlier, 4)


ODD = [
    *("\u00e9", "e\u0301", "\U0001f469\u200d\U0001f467", "\u0643\u062a", "a b", " a", "a", "A"),
    *("\uff41", '"q"', "a,b", "x\ty", "\u200b", "007", "\U0001d518"),
]
"""A letter composed and not, a family of one glyph, Arabic, blanks, quotes, nothing to see."""


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_ids_of_odd_unicode_stay_what_they_are_and_apart(tmp_path, kind):
    rows = [(ODD[user], ODD[item], us) for user, item, us in clicks(users=len(ODD), items=15)]
    if kind == "parquet":
        path, unit = write(tmp_path / "log.parquet", rows), {}
    else:
        path, unit = tmp_path / "log.csv", {"timestamp_unit": "us"}
        quoted = [[f'"{text}"' for text in (u.replace('"', '""'), i.replace('"', '""'))]
                  for u, i, _ in rows]  # fmt: skip
        lines = [f"{u},{i},{us}" for (u, i), (_, _, us) in zip(quoted, rows, strict=True)]
        path.write_text("user_id,item_id,timestamp\n" + "\n".join(lines) + "\n", encoding="utf-8")
    dataset = built(config_for(path, **unit), tmp_path / "dataset")
    assert sorted(dataset.catalog.item_id.to_pylist()) == sorted(ODD)
    assert {request["user_id"] for request in requests_of(dataset)} == set(ODD)
    assert dataset.manifest.rejected == {}
    items = dataset.catalog.item_id.to_pylist()
    at = {(user, us): item for user, item, us in rows}
    for request in requests_of(dataset):
        us = round(request["timestamp"].timestamp() * 1e6)
        assert [items[row - 2] for row in request["candidate_row"]] == [at[request["user_id"], us]]


def test_ids_like_the_padding_and_the_unknown_row_are_items_and_users_like_any(tmp_path):
    rows = clicks(users=3, items=3)
    assert {item for _, item, _ in rows} == {user for user, _, _ in rows} == {0, 1, 2}
    path = write(tmp_path / "log.parquet", rows)
    dataset = built(config_for(path), tmp_path / "dataset")
    assert sorted(dataset.catalog.item_id.to_pylist()) == [0, 1, 2]
    found = requests_of(dataset)
    assert {request["user_id"] for request in found} == {0, 1, 2}
    assert {row for request in found for row in request["candidate_row"]} == {2, 3, 4}
    assert min(row for request in found for row in request["history_row"]) == 2
