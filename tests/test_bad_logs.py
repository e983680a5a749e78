"""Logs with something wrong in them, on either engine: what is said, and what is put aside."""

import datetime
import gzip
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_helpers import with_engine
from small_logs import DAY, START, built, clicks, config_for, requests_of, write

from thawline.data.engine import open_engine
from thawline.data.events import read_events
from thawline.errors import DataError

pytest_plugins = ["engine_fixtures"]


@dataclass
class Read:
    """What an engine makes of a log."""

    events: list[dict]
    rejected: list[dict]
    counts: dict[str, int]


@pytest.fixture
def read(engine, tmp_path):
    """Reads the log of a config."""

    def read(config):
        config = with_engine(config, engine)
        with open_engine(config.windows, config.runtime, tmp_path / "scratch") as opened:
            log = read_events(opened, config.events, config.windows)
            ordered = log.events.order_by(["timestamp", "user_id", "item_id"])
            events = ordered.to_pyarrow().to_pylist()
            return Read(events, log.rejected.to_pyarrow().to_pylist(), log.counts)

    return read


@pytest.fixture
def message_of(read):
    """What is said of the log of a config."""

    def message_of(config):
        with pytest.raises(DataError) as error:
            read(config)
        return str(error.value)

    return message_of


# Rows that are put aside, and too many of them.


def test_times_in_mixed_units_are_put_aside_or_refused_with_a_hint(read, message_of, tmp_path):
    rows = [(user, item, us // 1_000) for user, item, us in clicks()]
    rows[5] = (*rows[5][:2], rows[5][2] // 1_000)
    path = write(tmp_path / "log.parquet", rows, timestamp="ms")
    config = config_for(path, timestamp_unit="ms")
    log = read(config)
    assert log.counts == {"impossible timestamp": 1}
    assert [row["timestamp"] for row in log.rejected] == [str(rows[5][2])]
    assert len(log.events) == len(rows) - 1
    for index in range(0, 60, 2):
        rows[index] = (*rows[index][:2], clicks()[index][2] // 1_000_000)
    write(path, rows, timestamp="ms")
    message = message_of(config)
    assert "31 of 240 rows cannot be used: 31 impossible timestamp" in message
    assert str(rows[0][2]) in message
    assert "if some times are in another unit than the rest, write them in one" in message


def test_rows_of_the_future_are_put_aside_unless_the_config_allows_them(read, tmp_path):
    future = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=40)
    rows = [*clicks(), (3, 3, int(future.timestamp() * 1e6))]
    path = write(tmp_path / "log.parquet", rows)
    assert read(config_for(path)).counts == {"future timestamp": 1}
    assert read(config_for(path, latest="2099-12-31")).counts == {}
    early = config_for(path, latest="2026-03-06T00:00:00", windows={"max_rejected": 0.5})
    assert read(early).counts == {"future timestamp": 41}


def test_words_that_no_action_names_are_put_aside_and_named_ones_left_out(
    read, message_of, tmp_path
):
    rows = clicks()
    words = ["click"] * len(rows)
    words[7], words[8], words[9] = "clikc", "scroll", None
    path = write(tmp_path / "log.parquet", rows, event=words)
    events = {"actions": {"click": {"column": "event", "equals": ["click", "tap"]}}}
    log = read(config_for(path, windows={"max_rejected": 0.1}, **events))
    assert log.counts == {"unknown action": 2}
    assert sorted(row["action"] for row in log.rejected) == ["clikc", "scroll"]
    events["ignored_actions"] = ["scroll"]
    log = read(config_for(path, **events))
    assert log.counts == {"unknown action": 1}
    assert [event["click"] for event in log.events].count(False) == 1
    words[:40] = ["clikc"] * 40
    write(path, rows, event=words)
    message = message_of(config_for(path, **events))
    assert "unknown action" in message
    assert "'clikc'" in message
    assert "name these words in an action's equals or in events.ignored_actions" in message
    write(path, rows, event=["view"] * len(rows))
    message = message_of(config_for(path, **events))
    assert "column 'event' (events.actions.click.column) is never 'click' or 'tap'" in message
    assert "it holds 'view'" in message


def broken_text(kind, folder):
    """A log in which one user's name and one device are bytes of another encoding."""
    rows = [(f"ü{user}", f"i{item}", us) for user, item, us in clicks()]
    users, devices = [user.encode() for user, *_ in rows], [b"tv"] * len(rows)
    users[103], devices[150] = "ü9".encode("latin-1"), "é".encode("latin-1")
    if kind == "parquet":
        write(folder / "good.parquet", rows[:100], device=["tv"] * 100)
        path = write(folder / "bad.parquet", rows[100:])
        table = pq.read_table(path)
        names = pa.array(users[100:], pa.binary()).view(pa.string())
        table = table.set_column(0, "user_id", names)
        table = table.append_column("device", pa.array(devices[100:], pa.binary()).view("string"))
        pq.write_table(table, path)
    else:
        folder.mkdir()
        lines = [
            b"%s,%s,%d,%s\n" % (user, item.encode(), us, device)
            for user, (_, item, us), device in zip(users, rows, devices, strict=True)
        ]
        (folder / "bad.csv").write_bytes(b"user_id,item_id,timestamp,device\n" + b"".join(lines))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_bytes_that_are_no_text_are_put_aside_and_the_rest_is_read(
    read, message_of, tmp_path, kind
):
    log = broken_text(kind, tmp_path / "log")
    settings = {"context": {"device": "device"}}
    settings |= {"timestamp_unit": "us"} if kind == "csv" else {}
    found = read(config_for(log, **settings))
    assert found.counts == {"bad encoding": 2}
    assert sorted(row["user_id"] for row in found.rejected)[1] == "\ufffd9"
    assert len(found.events) == 238
    assert "ü3" in {event["user_id"] for event in found.events}
    message = message_of(config_for(log, windows={"max_rejected": 0.0}, **settings))
    assert "2 of 240 rows cannot be used: 2 bad encoding" in message
    assert "write the log as UTF-8" in message


def test_lines_of_another_number_of_fields_are_put_aside_or_refused_with_samples(
    read, message_of, tmp_path
):
    lines = [f"{user},{item},{us}" for user, item, us in clicks()]
    lines[10], lines[20], lines[30] = "4,5", "6,7,8,9,10,11", "12"
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp\n\n" + "\n".join(lines[:-1]) + "\n13,14")
    settings = {"timestamp_unit": "us", "windows": {"max_rejected": 0.02}}
    log = read(config_for(path, **settings))
    assert log.counts == {"wrong number of fields": 4}
    assert sorted(row["line"] for row in log.rejected) == ["12", "13,14", "4,5", "6,7,8,9,10,11"]
    assert {row["user_id"] for row in log.rejected} == {None}
    whole = [row for place, row in enumerate(clicks()) if place not in (10, 20, 30, 239)]
    assert sorted((e["user_id"], e["item_id"], e["timestamp"]) for e in log.events) == sorted(whole)
    message = message_of(config_for(path, timestamp_unit="us"))
    assert "4 of 240 rows cannot be used: 4 wrong number of fields" in message
    assert "'line': '4,5'" in message
    assert "quote fields that hold the separator, and see events.separator" in message


def test_two_files_that_claim_the_same_day_are_refused_with_a_hint(read, message_of, tmp_path):
    log = tmp_path / "log"
    rows = clicks()
    for day in range(6):
        of_day = [row for row in rows if (row[2] - START) // DAY == day]
        write(log / f"day={day}" / "a.parquet", of_day)
    sound = read(config_for(log)).events
    write(log / "again" / "b.parquet", [row for row in rows if (row[2] - START) // DAY == 4])
    message = message_of(config_for(log))
    assert "40 of 280 rows cannot be used: 40 duplicate" in message
    assert "see whether two files of events.path hold the same days" in message
    assert read(config_for(log, windows={"max_rejected": 0.2})).events == sound


def test_rejected_rows_are_written_with_their_own_text_and_reason(tmp_path):
    lines = [f"{user},{item},{us}" for user, item, us in [*clicks(), *clicks()[:1]]]
    lines[10], lines[20] = f",5,{clicks()[10][2]}", "7,8"
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(lines))
    config = config_for(path, timestamp_unit="us", windows={"max_rejected": 0.02})
    dataset = built(config, tmp_path / "dataset")
    counts = {"duplicate": 1, "null user_id": 1, "wrong number of fields": 1}
    assert dataset.manifest.rejected == counts
    (file,) = (dataset.root / "rejected").glob("*.parquet")
    kept = sorted(pq.read_table(file).to_pylist(), key=lambda row: row["reason"])
    assert [(row["user_id"], row["item_id"], row["line"], row["reason"]) for row in kept] == [
        ("0", str(clicks()[0][1]), None, "duplicate"),
        (None, "5", None, "null user_id"),
        (None, None, "7,8", "wrong number of fields"),
    ]
    assert len(requests_of(dataset)) == dataset.manifest.requests["train"] + 40


# Columns and files.


def test_a_column_that_changes_its_type_between_files_is_named(message_of, tmp_path):
    rows = clicks()
    write(tmp_path / "log" / "a.parquet", rows[:100])
    texts = [(f"{user}", item, us) for user, item, us in rows[100:]]
    write(tmp_path / "log" / "b.parquet", texts)
    message = message_of(config_for(tmp_path / "log"))
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
def test_a_list_column_with_nulls_is_refused_by_name(message_of, tmp_path, events, key):
    rows = clicks()
    tags = [[1, None], None, []] * (len(rows) // 3)
    path = write(tmp_path / "log.parquet", rows, tags=tags)
    message = message_of(config_for(path, **events))
    assert f"column 'tags' ({key}) is of type array" in message


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_part_file_of_the_log_is_named_among_good_ones(message_of, tmp_path, damage):
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
    message = message_of(config_for(tmp_path / "log"))
    assert "b.parquet cannot be read" in message
    assert "a.parquet" not in message


def test_a_csv_file_that_is_cut_short_is_named_among_good_ones(message_of, tmp_path):
    lines = [f"{user},{item},{us}\n" for user, item, us in clicks(users=400)]
    packed = gzip.compress(("user_id,item_id,timestamp\n" + "".join(lines)).encode())
    log = tmp_path / "log"
    log.mkdir()
    (log / "a.csv.gz").write_bytes(packed)
    (log / "b.csv.gz").write_bytes(packed[: len(packed) // 2])
    message = message_of(config_for(log, timestamp_unit="us"))
    assert "b.csv.gz" in message
    assert "cannot be read as csv" in message


def test_csv_files_may_have_their_columns_in_another_order(read, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    rows = clicks()
    first = "".join(f"{user},{item},{us}\n" for user, item, us in rows[:100])
    second = "".join(f"{us},x,{user},{item}\n" for user, item, us in rows[100:])
    (log / "a.csv").write_text("user_id,item_id,timestamp\n" + first)
    (log / "b.csv").write_text("timestamp,User_ID,user_id,item_id\n" + second)
    found = read(config_for(log, timestamp_unit="us"))
    assert found.counts == {}
    assert sorted((e["user_id"], e["item_id"], e["timestamp"]) for e in found.events) == sorted(
        rows
    )


def test_a_csv_file_without_a_column_is_named_among_good_ones(message_of, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    (log / "a.csv").write_text(f"user_id,item_id,timestamp\n1,2,{START}\n")
    for content in ("", "user_id,item_id\n1,2\n"):
        (log / "b.csv").write_text(content)
        message = message_of(config_for(log, timestamp_unit="us"))
        assert "b.csv has no column 'timestamp' (events.columns.timestamp)" in message or (
            content == "" and "b.csv has no column 'user_id'" in message
        )
