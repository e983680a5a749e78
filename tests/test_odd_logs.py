"""Logs that are sound but unusual, and datasets that somebody has damaged."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from datasets import write_dataset
from engine_helpers import assert_same, with_engine
from small_logs import DAY, HOUR, START, built, clicks, config_for, requests_of, write

from thawline.config import Negatives
from thawline.data.batches import RequestReader
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.errors import DataError

pytest_plugins = ["engine_fixtures"]


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
@pytest.mark.timeout(900)
def test_a_million_events_of_one_user_take_their_place_beside_the_others(engine, tmp_path):
    # Spark without compiled queries, as in these tests, takes minutes for a million.
    count = {"duckdb": 1_000_000, "spark": 50_000}[engine]
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
    dataset = built(with_engine(config, engine), tmp_path / "dataset")
    after_pretraining = int((times >= START + 2 * DAY).sum())
    assert sum(dataset.manifest.requests_by_day.values()) == after_pretraining
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_engines_build_the_same_of_all_that_is_odd_at_once(spark, tmp_path):
    """A clock that goes back, an empty day, a day in two files, and ids of odd Unicode."""
    rows, requests = [], []
    last = START + 5 * DAY + 9 * HOUR
    given = [*clicks(users=8, items=15), (900, 1, START + DAY), (901, 2, START + 4 * DAY + HOUR)]
    for number, (user, item, us) in enumerate(reversed(given)):
        if (us - START) // DAY != 3:
            for position in range(2):
                name = ODD[(item + position) % 15]
                rows.append((user, name, us // 1_000 - position * 1_000, position))
                requests.append(number)
    rows += [(user, "new", last // 1_000, 0) for user in range(5)]
    rows.append((1, "a", START // 1_000_000, 0))
    requests += range(1_000, 1_006)
    of_day = [place for place, row in enumerate(rows) if (row[2] * 1_000 - START) // DAY == 4]
    for name, places in (("all", range(len(rows))), ("again", of_day)):
        write(
            tmp_path / "log" / f"{name}.parquet",
            [rows[place][:3] for place in places],
            timestamp="ms",
            request=[requests[place] for place in places],
            place=[rows[place][3] for place in places],
        )
    config = config_for(
        tmp_path / "log",
        timestamp_unit="ms",
        columns={"request_id": "request", "position": "place"},
        windows={"finetune_days": 2, "max_rejected": 0.5},
    )
    dataset = built(with_engine(config, "duckdb"), tmp_path / "duckdb")
    assert_same(dataset, built(with_engine(config, "spark"), tmp_path / "spark"))
    assert dataset.manifest.rejected == {"duplicate": 34, "impossible timestamp": 1}
    assert dataset.manifest.requests_by_day["2026-03-04"] == 0
    items = dataset.catalog.item_id.to_pylist()
    assert set(items) == {*ODD, "new"}
    assert dataset.catalog.support[items.index("new")] == 0
    found = requests_of(dataset)
    assert {0, 1, 901} < {request["user_id"] for request in found}
    assert [r["history_row"] for r in found if r["user_id"] == 901] == [[]]


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


# Damaged datasets.


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
