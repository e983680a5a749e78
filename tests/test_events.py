"""Logs as canonical events: presets, ids, times, rejected rows, and what a bad log is told."""

import datetime
import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thawline.config import Events, Runtime, Windows
from thawline.data.engine import open_engine
from thawline.data.events import read_events
from thawline.errors import ConfigError, DataError

MOMENT = datetime.datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=datetime.UTC)
SECONDS = int(MOMENT.timestamp())
MICROSECONDS = SECONDS * 1_000_000 + 250_000


def events_of(tmp_path, settings, **windows):
    """Rows of the accepted events, rows of the rejected ones, and their counts."""
    with open_engine(Windows(**windows), Runtime(threads=1), tmp_path / "scratch") as engine:
        log = read_events(engine, Events.model_validate(settings), Windows(**windows))
        accepted = log.events.order_by(["timestamp", "user_id", "item_id"]).to_pyarrow()
        return accepted.to_pylist(), log.rejected.to_pyarrow().to_pylist(), log.counts


def message_of(tmp_path, settings, kind=DataError, **windows):
    with pytest.raises(kind) as error:
        events_of(tmp_path, settings, **windows)
    return str(error.value)


def parquet(tmp_path, name="log.parquet", **columns):
    """A log; columns that are not given are valid."""
    count = len(next(iter(columns.values()))) if columns else 3
    table = {
        "user_id": list(range(count)),
        "item_id": [10 * index for index in range(count)],
        "timestamp": [SECONDS + index for index in range(count)],
    } | columns
    path = tmp_path / name
    pq.write_table(pa.table(table), path)
    return {"path": str(path), "timestamp_unit": "s"}


def text(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return str(path)


# Presets.


def test_recbole_inter_files_are_read(tmp_path):
    path = text(
        tmp_path,
        "ml.inter",
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "7\t31\t2.5\t1260759144.5\n"
        "12\t1029\t3.0\t1260759179\n",
    )
    rows, _, _ = events_of(tmp_path, {"preset": "recbole", "path": path})
    assert [(r["user_id"], r["item_id"], r["timestamp"], r["click"]) for r in rows] == [
        (7, 31, 1_260_759_144_500_000, True),
        (12, 1029, 1_260_759_179_000_000, True),
    ]


@pytest.mark.parametrize(
    ("preset", "name", "content"),
    [
        (
            "movielens-csv",
            "ratings.csv",
            "userId,movieId,rating,timestamp\n1,31,3.5,1260759144\n1,1029,4.0,1260759179\n",
        ),
        ("movielens-dat", "ratings.dat", "1::31::3::1260759144\n1::1029::4::1260759179\n"),
        ("movielens-100k", "u.data", "1\t31\t3\t1260759144\n1\t1029\t4\t1260759179\n"),
    ],
)
def test_movielens_files_are_read_and_four_stars_are_a_like(tmp_path, preset, name, content):
    path = text(tmp_path, name, content)
    rows, _, _ = events_of(tmp_path, {"preset": preset, "path": path})
    held_out = rows[0]["held_out"]
    assert rows == [
        {
            "user_id": 1,
            "item_id": 31,
            "timestamp": 1_260_759_144_000_000,
            "like": False,
            "watch": True,
            "held_out": held_out,
        },
        {
            "user_id": 1,
            "item_id": 1029,
            "timestamp": 1_260_759_179_000_000,
            "like": True,
            "watch": True,
            "held_out": held_out,
        },
    ]


# Files.


def test_a_folder_a_glob_and_a_list_hold_the_rows_of_all_files(tmp_path):
    folder = tmp_path / "log"
    (folder / "deep").mkdir(parents=True)
    parquet(folder, "a.parquet", user_id=[1])
    parquet(folder / "deep", "b.parquet", user_id=[2])
    (folder / "_SUCCESS").write_text("", encoding="utf-8")
    (folder / "notes.md").write_text("not data", encoding="utf-8")
    names = [str(folder / "a.parquet"), str(folder / "deep")]
    for path in (str(folder), str(folder / "**" / "*.parquet"), names):
        rows, _, _ = events_of(tmp_path, {"path": path, "timestamp_unit": "s"})
        assert [row["user_id"] for row in rows] == [1, 2]


def test_a_path_that_names_nothing_is_an_error_that_repeats_it(tmp_path):
    message = message_of(tmp_path, {"path": str(tmp_path / "nowhere" / "*.parquet")})
    assert "events.path" in message
    assert "nowhere/*.parquet names no data file" in message


def test_a_suffix_that_says_nothing_asks_for_the_format(tmp_path):
    path = text(tmp_path, "log.bin", "x")
    assert "set events.format to parquet or csv" in message_of(tmp_path, {"path": path})


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_truncated_parquet_file_is_named(tmp_path, kept):
    settings = parquet(tmp_path, user_id=list(range(1000)))
    content = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(content[: int(kept * len(content))])
    message = message_of(tmp_path, settings)
    assert "log.parquet cannot be read as Parquet" in message
    assert "write it again" in message


def test_a_parquet_file_with_damaged_pages_is_named_among_good_ones(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    numbers = np.random.default_rng(0).integers(0, 1 << 60, 5_000)
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        parquet(folder, name, user_id=numbers)
    content = bytearray((folder / "b.parquet").read_bytes())
    content[4:400] = bytes(396)
    (folder / "b.parquet").write_bytes(content)
    message = message_of(tmp_path, {"path": str(folder), "timestamp_unit": "s"})
    assert "b.parquet cannot be read" in message


def test_files_of_different_schemas_are_told_apart(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    parquet(folder, "a.parquet", user_id=[1])
    parquet(folder, "b.parquet", user_id=["x"])
    message = message_of(tmp_path, {"path": str(folder), "timestamp_unit": "s"})
    assert "b.parquet: column 'user_id' (events.columns.user_id) is string, but int64 in" in message


@pytest.mark.parametrize("quoted", ['4,"5,6', '4,"5"x,6'])
def test_a_csv_line_with_broken_quotes_is_named_with_its_file(tmp_path, quoted):
    path = text(tmp_path, "log.csv", f"user_id,item_id,timestamp\n1,2,{SECONDS}\n{quoted}\n")
    message = message_of(tmp_path, {"path": path, "timestamp_unit": "s"})
    assert "log.csv cannot be read as csv: line 3: Value with unterminated quote" in message


# Columns.


def test_a_missing_column_is_named_with_its_key_and_the_nearest_columns(tmp_path):
    settings = parquet(tmp_path, userid=[1, 2, 3]) | {"columns": {"item_id": "itemId"}}
    message = message_of(tmp_path, settings)
    assert "log.parquet has no column 'itemId' (events.columns.item_id)" in message
    assert "did you mean 'item_id'" in message
    message = message_of(
        tmp_path, settings | {"actions": {"buy": {"column": "bought"}}, "columns": {}}
    )
    assert "no column 'bought' (events.actions.buy.column)" in message
    message = message_of(tmp_path, settings | {"context": {"device": "dev"}, "columns": {}})
    assert "no column 'dev' (events.context.device)" in message


def test_a_csv_file_of_another_separator_lacks_its_columns(tmp_path):
    path = text(tmp_path, "log.csv", "user_id;item_id;timestamp\n1;2;3\n")
    message = message_of(tmp_path, {"path": path, "timestamp_unit": "s"})
    assert "has no column 'user_id'" in message
    assert "events.separator" in message


def test_ids_that_are_all_integers_become_integers_and_others_stay_text(tmp_path):
    header = "user_id,item_id,timestamp\n"
    whole = text(tmp_path, "whole.csv", f"{header}3,-20,{SECONDS}\n1,10,{SECONDS}\n")
    mixed = text(tmp_path, "mixed.csv", f"{header}3,007,{SECONDS}\n1,10,{SECONDS}\n")
    rows, _, _ = events_of(tmp_path, {"path": whole, "timestamp_unit": "s"})
    assert [(row["user_id"], row["item_id"]) for row in rows] == [(1, 10), (3, -20)]
    rows, _, _ = events_of(tmp_path, {"path": mixed, "timestamp_unit": "s"})
    assert [(row["user_id"], row["item_id"]) for row in rows] == [(1, "10"), (3, "007")]


def test_integers_that_a_dataframe_made_floats_are_integers_again(tmp_path):
    settings = parquet(tmp_path, user_id=[3.0, 1.0, 2.0])
    rows, _, _ = events_of(tmp_path, settings)
    assert [row["user_id"] for row in rows] == [3, 1, 2]
    message = message_of(tmp_path, parquet(tmp_path, item_id=[3.0, 1.5, 2.0]))
    assert "column 'item_id' (events.columns.item_id) holds 1 numbers with a fraction" in message


def test_an_id_column_of_another_kind_is_refused(tmp_path):
    message = message_of(tmp_path, parquet(tmp_path, user_id=[[1], [2], [3]]))
    assert "column 'user_id' (events.columns.user_id) is of type array" in message


def test_text_request_ids_are_hashed_and_integers_are_kept(tmp_path):
    columns = {"columns": {"request_id": "request"}}
    rows, _, _ = events_of(tmp_path, parquet(tmp_path, request=["a", "b", "c"]) | columns)
    first = int(hashlib.md5(b"a").hexdigest()[:16], 16) >> 1  # noqa: S324
    assert rows[0]["request_id"] == first
    rows, _, _ = events_of(tmp_path, parquet(tmp_path, request=[5, 6, 7]) | columns)
    assert [row["request_id"] for row in rows] == [5, 6, 7]


def test_a_nan_is_nothing_whatever_parquet_says_of_its_column(tmp_path):
    # Without a null beside it, DuckDB takes a NaN for a number within the column's bounds.
    nan = float("nan")
    times = [1_767_225_600.0, 1_767_225_601.5, nan, 1_767_225_603.0, 1_767_225_604.0]
    settings = parquet(
        tmp_path,
        user_id=[1.0, 2.0, 3.0, nan, 5.0],
        timestamp=times,
        seconds=[12.0, 3.0, 4.0, 5.0, nan],
    )
    settings["actions"] = {
        "stay": {"column": "seconds", "at_least": 10},
        "look": {"column": "seconds"},
    }
    rows, rejected, counts = events_of(tmp_path, settings, max_rejected=0.5)
    assert [(row["user_id"], row["stay"], row["look"]) for row in rows] == [
        (1, True, True),
        (2, False, True),
        (5, False, False),
    ]
    assert [row["timestamp"] for row in rows] == [round(times[place] * 1e6) for place in (0, 1, 4)]
    assert counts == {"null timestamp": 1, "null user_id": 1}
    assert sorted(row["item_id"] for row in rejected) == ["20", "30"]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.decimal128(20, 0)])
def test_ids_beyond_63_bits_are_text_and_others_of_their_type_are_numbers(tmp_path, kind):
    large = [2**64 - 1, 2**63, 7]
    items = [30, 20, 10]
    settings = parquet(tmp_path, user_id=pa.array(large, kind), item_id=pa.array(items, kind))
    rows, _, counts = events_of(tmp_path, settings)
    assert counts == {}
    assert [row["user_id"] for row in rows] == [str(user) for user in large]
    assert [row["item_id"] for row in rows] == items


def test_actions_are_flags_or_thresholds(tmp_path):
    settings = parquet(
        tmp_path,
        user_id=[1, 2, 3, 4],
        flag=[True, False, None, True],
        stars=[3.5, 4.0, float("nan"), None],
        seen=["true", "0", "2.5", None],
    )
    settings["actions"] = {
        "flag": {"column": "flag"},
        "like": {"column": "stars", "at_least": 4},
        "rated": {"column": "stars"},
        "seen": {"column": "seen"},
        "shown": {},
    }
    rows, _, _ = events_of(tmp_path, settings)
    names = ("flag", "like", "rated", "seen", "shown")
    assert [[row[name] for name in names] for row in rows] == [
        [True, False, True, True, True],
        [False, True, True, False, True],
        [False, False, False, True, True],
        [True, False, False, False, True],
    ]
    settings["actions"] = {"seen": {"column": "seen"}}
    pq.write_table(
        pq.read_table(settings["path"]).set_column(5, "seen", pa.array(["1", "0", "maybe", "1"])),
        settings["path"],
    )
    message = message_of(tmp_path, settings)
    assert "1 of 4 rows cannot be used: 1 unknown action" in message
    assert "'action': 'maybe'" in message
    settings["actions"] = {"other": {"column": "seen"}}
    pq.write_table(
        pq.read_table(settings["path"]).set_column(5, "seen", pa.array(["a", "b", "?", "x"])),
        settings["path"],
    )
    message = message_of(tmp_path, settings)
    assert "(events.actions.other.column) holds 'x', and no number and no true or false" in message


def test_an_action_may_not_be_called_like_a_column(tmp_path):
    settings = parquet(tmp_path) | {"actions": {"position": {}}}
    assert "events.actions.position" in message_of(tmp_path, settings, ConfigError)


# Times.


@pytest.mark.parametrize(
    ("unit", "value"),
    [
        ("s", SECONDS + 0.25),
        ("ms", SECONDS * 1_000 + 250),
        ("us", MICROSECONDS),
        ("ns", MICROSECONDS * 1_000 + 128),
    ],
)
def test_a_number_is_a_time_in_the_declared_unit(tmp_path, unit, value):
    settings = parquet(tmp_path, timestamp=[value]) | {"timestamp_unit": unit}
    rows, _, _ = events_of(tmp_path, settings)
    assert [row["timestamp"] for row in rows] == [MICROSECONDS]
    path = text(tmp_path, "log.csv", f"user_id,item_id,timestamp\n1,2,{value}\n")
    rows, _, _ = events_of(tmp_path, {"path": path, "timestamp_unit": unit})
    assert [row["timestamp"] for row in rows] == [MICROSECONDS]


@pytest.mark.parametrize(
    ("declared", "fitting"),
    [(one, other) for one in ("s", "ms", "us", "ns") for other in ("s", "ms", "us", "ns")],
)
def test_a_wrong_unit_is_refused_with_the_one_that_fits(tmp_path, declared, fitting):
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[fitting]
    settings = parquet(tmp_path, timestamp=[SECONDS * scale, (SECONDS + 9) * scale])
    settings["timestamp_unit"] = declared
    if declared == fitting:
        assert len(events_of(tmp_path, settings)[0]) == 2
        return
    message = message_of(tmp_path, settings)
    assert f"in the declared unit ({declared})" in message
    assert f"events.timestamp_unit: {fitting} would fit" in message


def test_numbers_without_a_declared_unit_are_refused(tmp_path):
    message = message_of(tmp_path, parquet(tmp_path) | {"timestamp_unit": "auto"})
    assert "column 'timestamp' (events.columns.timestamp) holds numbers" in message
    assert (
        "set events.timestamp_unit to s, ms, us or ns; events.timestamp_unit: s would fit"
        in message
    )


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("us", tz="UTC"),
        pa.timestamp("us"),
        pa.timestamp("ms", tz="Europe/Berlin"),
        pa.timestamp("ns", tz="UTC"),
        pa.timestamp("ns"),
    ],
)
def test_a_timestamp_column_is_taken_as_it_is(tmp_path, kind):
    zoned = MOMENT if kind.tz else MOMENT.replace(tzinfo=None)
    settings = parquet(tmp_path, timestamp=pa.array([zoned], kind)) | {"timestamp_unit": "auto"}
    rows, _, _ = events_of(tmp_path, settings)
    assert [row["timestamp"] for row in rows] == [MICROSECONDS]


def test_times_may_be_written_as_text_with_or_without_a_zone(tmp_path):
    path = text(
        tmp_path,
        "log.csv",
        "user_id,item_id,timestamp\n"
        "1,1,2026-03-01 12:30:15.25\n"
        "2,2,2026-03-01T12:30:15.25Z\n"
        "3,3,2026-03-01T14:30:15.25+02:00\n",
    )
    rows, _, _ = events_of(tmp_path, {"path": path})
    assert [row["timestamp"] for row in rows] == [MICROSECONDS] * 3


def test_timestamps_that_were_made_from_another_unit_are_refused(tmp_path):
    early = pa.array([SECONDS * 1_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    message = message_of(tmp_path, parquet(tmp_path, timestamp=early) | {"timestamp_unit": "auto"})
    assert "its median is 1970-01-21, outside 1990 to 2100" in message


def test_a_timestamp_column_of_another_kind_is_refused(tmp_path):
    message = message_of(tmp_path, parquet(tmp_path, timestamp=[True, False]))
    assert "column 'timestamp' (events.columns.timestamp) is of type boolean" in message


def test_text_that_is_no_time_is_refused(tmp_path):
    path = text(tmp_path, "log.csv", "user_id,item_id,timestamp\n1,2,yesterday\n")
    message = message_of(tmp_path, {"path": path, "timestamp_unit": "s"})
    assert "holds 'yesterday', which is not a time" in message


# Rejected rows.


def test_unusable_rows_are_counted_by_reason_and_kept_as_text(tmp_path):
    settings = parquet(
        tmp_path,
        user_id=[1, None, 2, 3, 4, 5, 5, 6, 6],
        item_id=["a", "b", None, "", "c", "d", "d", "e", "e"],
        timestamp=[SECONDS, SECONDS, SECONDS, SECONDS, None, SECONDS, SECONDS, 0, SECONDS],
    )
    rows, rejected, counts = events_of(tmp_path, settings, max_rejected=0.9)
    assert [(row["user_id"], row["item_id"]) for row in rows] == [(1, "a"), (5, "d"), (6, "e")]
    assert counts == {
        "duplicate": 1,
        "impossible timestamp": 1,
        "null item_id": 2,
        "null timestamp": 1,
        "null user_id": 1,
    }
    assert {"user_id": "6", "item_id": "e", "timestamp": "0", "reason": "impossible timestamp"} in (
        rejected
    )
    assert len(rejected) == 6


def test_the_copy_with_the_most_actions_stays(tmp_path):
    settings = parquet(
        tmp_path,
        user_id=[1, 1, 1],
        item_id=[2, 2, 2],
        timestamp=[SECONDS] * 3,
        save=[False, True, False],
        click=[False, True, True],
    )
    settings["actions"] = {"save": {"column": "save"}, "click": {"column": "click"}}
    rows, _, counts = events_of(tmp_path, settings, max_rejected=0.9)
    assert [(row["save"], row["click"]) for row in rows] == [(True, True)]
    assert counts == {"duplicate": 2}


def test_a_request_of_two_users_is_rejected_whole(tmp_path):
    settings = parquet(tmp_path, user_id=[1, 1, 2, 3], request=[9, 8, 8, 7])
    settings["columns"] = {"request_id": "request"}
    rows, _, counts = events_of(tmp_path, settings, max_rejected=0.9)
    assert [row["request_id"] for row in rows] == [9, 7]
    assert counts == {"several users in one request": 2}


def test_the_same_item_at_the_same_time_in_another_request_is_no_duplicate(tmp_path):
    settings = parquet(
        tmp_path, user_id=[1, 1], item_id=[2, 2], timestamp=[SECONDS] * 2, request=[5, 6]
    )
    rows, _, counts = events_of(tmp_path, settings | {"columns": {"request_id": "request"}})
    assert len(rows) == 2
    assert counts == {}


def test_too_many_rejected_rows_fail_with_counts_and_a_sample(tmp_path):
    settings = parquet(tmp_path, user_id=[1, 2, 3, None], item_id=[77, 78, 79, 80])
    message = message_of(tmp_path, settings, max_rejected=0.2)
    assert "1 of 4 rows cannot be used: 1 null user_id" in message
    assert "'item_id': '80'" in message
    assert "windows.max_rejected (now 0.2)" in message
    assert len(events_of(tmp_path, settings, max_rejected=0.25)[0]) == 3


def test_a_log_without_rows_is_refused(tmp_path):
    pq.write_table(
        pa.table({name: pa.array([], pa.int64()) for name in ("user_id", "item_id", "timestamp")}),
        tmp_path / "log.parquet",
    )
    settings = {"path": str(tmp_path / "log.parquet"), "timestamp_unit": "s"}
    assert "log.parquet holds no rows" in message_of(tmp_path, settings)


# Users.


def test_sampled_users_are_chosen_by_their_hash_whatever_the_type_of_the_id(tmp_path):
    users = list(range(400))
    expected = [
        user
        for user in users
        if int(hashlib.md5(f"sample:{user}".encode()).hexdigest()[:12], 16) / 16**12 < 0.25  # noqa: S324
    ]
    assert 70 < len(expected) < 130
    numbers = parquet(tmp_path, user_id=users) | {"sample_users": 0.25}
    assert [row["user_id"] for row in events_of(tmp_path, numbers)[0]] == expected
    names = parquet(tmp_path, user_id=[f"{user}" for user in users] + ["x"]) | {
        "sample_users": 0.25
    }
    found = [row["user_id"] for row in events_of(tmp_path, names)[0] if row["user_id"] != "x"]
    assert sorted(map(int, found)) == expected


def test_held_out_users_are_another_sample_than_the_sampled_ones(tmp_path):
    settings = parquet(tmp_path, user_id=list(range(2_000))) | {"sample_users": 0.2}
    rows, _, _ = events_of(tmp_path, settings, holdout_users=0.1)
    assert 300 < len(rows) < 500
    assert 0.05 < sum(row["held_out"] for row in rows) / len(rows) < 0.16


def test_a_memory_limit_that_is_no_size_is_refused(tmp_path):
    message = message_of(tmp_path, parquet(tmp_path), ConfigError, memory_limit="plenty")
    assert "windows.memory_limit: 'plenty' is not a size" in message
