"""Ids of further tables: hashes in the files, rows in the batches, against plain loops."""

import hashlib
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from engine_helpers import assert_same, with_engine
from window_reference import FINETUNE, Reference, config_for, every_request, random_log, write_log

from thawline.config import Config, IdTableSettings, Runtime, Windows, parse_config
from thawline.data.batches import RequestReader
from thawline.data.engine import hash63, open_engine
from thawline.data.ids import (
    IdRows,
    IdVocabulary,
    hash_ids,
    read_item_ids,
    table_support,
    vocabulary_path,
)
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.data.windows import build_dataset, inputs_version
from thawline.errors import ConfigError, DataError

pytest_plugins = ["engine_fixtures"]

TABLES = {
    "user": {"column": "user_id", "rows": 1_000},
    "device": {"column": "device", "rows": 3, "hashed": False},
    "author": {"column": "writer", "of": "item", "rows": 50},
    "known_author": {"column": "writer", "of": "item", "rows": 4, "hashed": False},
}


def digest(value):
    """The 63 bits, by another way than the code's."""
    if value is None:
        return 0
    return int(hashlib.md5(str(value).encode()).hexdigest()[:16], 16) // 2  # noqa: S324


def writer_of(number):
    """Few writers have most items, some items have none, and some are not in the file."""
    return None if number % 9 == 0 else f"writer {min(number % 13, 5)}"


def items_of(rows):
    """The lines of an items file, in another order than the catalog's."""
    items = sorted({row["item"] for row in rows}, reverse=True)
    lines = [{"pin": item, "writer": writer_of(place)} for place, item in enumerate(items)]
    return [line for place, line in enumerate(lines) if place % 7] + [
        {"pin": type(items[0])(999_999), "writer": "nobody"}
    ]


def with_tables(config, tables=TABLES, **items):
    tree = config.model_dump(mode="json")
    return Config.model_validate(tree | {"tables": tables, "items": items})


def built(config, root, sources=()):
    root.mkdir(parents=True)
    steps = []
    build_dataset(config, root, steps.append, sources=sources)
    return Dataset.open(root), steps


def write_items(lines, path):
    pq.write_table(pa.Table.from_pylist(lines), path)
    return str(path)


@pytest.fixture(scope="module", params=["impressions-text", "clicks-int"])
def case(request, tmp_path_factory):
    """A log, its items, a dataset of both, and the log's requests by plain loops."""
    kind, ids = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    rows = random_log(ids)
    lines = items_of(rows)
    config = with_tables(
        config_for(write_log(rows, folder / "log.parquet"), kind == "impressions"),
        path=write_items(lines, folder / "items.parquet"),
        item_id="pin",
    )
    dataset, _ = built(config, folder / "dataset")
    return config, dataset, Reference(rows, kind == "impressions"), lines


def first_events(reference):
    """The event from which a request has its ids, by request id."""
    groups = defaultdict(list)
    for row in reference.rows:
        if reference.impressions or row["action"]:
            groups[row["number"]].append(row)
    return {
        number: min(
            group, key=lambda row: (row["time"], row["position"], reference.row_of[row["item"]])
        )
        for number, group in groups.items()
    }


def expected_supports(reference):
    """Training requests of the fine-tune window, and positives there, by id."""
    first, users, devices, writers = first_events(reference), Counter(), Counter(), Counter()
    for request in reference.requests():
        if FINETUNE[0] <= request["timestamp"] < FINETUNE[1] and not request["held_out"]:
            users[str(request["user_id"])] += 1
            devices[first[request["request_id"]]["device"]] += 1
    return users, devices, writers


def test_requests_hold_the_hashes_of_their_first_event(case):
    _, dataset, reference, _ = case
    first = first_events(reference)
    found = every_request(dataset)
    assert len(found) > 100
    for row in found:
        assert row["id_user_id"] == digest(row["user_id"])
        assert row["id_device"] == digest(first[row["request_id"]]["device"])
    assert 0 in {row["id_device"] for row in found}


def test_items_hold_the_hashes_of_their_line_of_the_file(case):
    _, dataset, _, lines = case
    writers = {line["pin"]: line["writer"] for line in lines}
    expected = [digest(writers.get(item)) for item in dataset.catalog.item_id.to_pylist()]
    assert read_item_ids(dataset, "writer").tolist() == [0, 0, *expected]
    assert 0 in expected


def test_vocabularies_count_what_training_has_seen_the_most_frequent_first(case):
    _, dataset, reference, lines = case
    users, devices, writers = expected_supports(reference)
    by_item = {line["pin"]: line["writer"] for line in lines}
    for line in reference.catalog:
        writers[by_item.get(line["item_id"])] += line["support"]
    expected = {("request", "user_id"): users, ("request", "device"): devices}
    expected[("item", "writer")] = writers
    for (of, column), counts in expected.items():
        counts = {name: count for name, count in counts.items() if name is not None and count}
        stored = pq.read_table(vocabulary_path(dataset.root, of, column)).to_pylist()
        wanted = [
            {"hash": digest(name), "support": count, "id": name} for name, count in counts.items()
        ]
        assert stored == sorted(wanted, key=lambda line: (-line["support"], line["hash"]))
        assert dataset.manifest.ids[of][column] == len(counts)


def plain_row(dataset, spec, hashed):
    """The row of a hash, by a dict."""
    if hashed == 0:
        return 0
    if spec.hashed:
        return 1 + hashed % (spec.rows - 1)
    known = IdVocabulary.read(dataset, spec.of, spec.column).hash.tolist()[: spec.rows - 1]
    return {value: place + 1 for place, value in enumerate(known)}.get(hashed, 0)


@pytest.mark.parametrize("split", ["train", "in_window", "next"])
def test_batches_hold_the_rows_of_every_table(case, split):
    config, dataset, _, _ = case
    tables = config.tables.others
    stored = {row["request_id"]: row for row in every_request(dataset)}
    of_items = read_item_ids(dataset, "writer")
    sampler = None
    if not dataset.manifest.impressions:
        sampler = NegativeSampler(dataset, config.negatives, 0)
    reader = RequestReader(
        dataset, split, batch_size=7, sampler=sampler, shuffle_groups=2, id_columns=tables
    )
    rows_seen = Counter()
    for batch in reader.epoch(0):
        assert list(batch.ids) == list(TABLES)
        for name in ("user", "device"):
            column = f"id_{tables[name].column}"
            expected = [
                plain_row(dataset, tables[name], stored[number][column])
                for number in batch.request_id.tolist()
            ]
            assert batch.ids[name].tolist() == expected
        for name in ("author", "known_author"):
            assert batch.ids[name].tolist() == [
                [plain_row(dataset, tables[name], int(of_items[row])) for row in line]
                for line in batch.candidate_row.tolist()
            ]
        assert batch.lookups().keys() == {"item", *TABLES}
        for name, rows in batch.lookups().items():
            assert torch.equal(rows, batch.rows if name == "item" else batch.ids[name].flatten())
        assert {rows.dtype for rows in batch.ids.values()} == {torch.int64}
        rows_seen.update(batch.ids["known_author"].flatten().tolist())
    assert set(rows_seen) == {0, 1, 2, 3}


def test_the_support_of_a_row_is_that_of_all_its_ids(case):
    config, dataset, _, _ = case
    for spec in config.tables.others.values():
        known = IdVocabulary.read(dataset, spec.of, spec.column)
        expected = [0] * spec.rows
        for value, support in zip(known.hash.tolist(), known.support.tolist(), strict=True):
            expected[plain_row(dataset, spec, value)] += support
        expected[0] = 0
        assert table_support(dataset, spec).tolist() == expected
        assert sum(expected) > 0


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_spark_stores_what_duckdb_stores(spark, case, tmp_path):
    config, dataset, _, _ = case
    other, _ = built(with_engine(config, "spark"), tmp_path / "spark")
    assert_same(dataset, other)


def test_python_hashes_ids_as_the_engine_does(tmp_path):
    texts = ["a", "", None, "ünï¢ode 🙂", "a", "12", "-3", "x" * 5_000]
    with open_engine(Windows(), Runtime(threads=1), tmp_path) as engine:
        engine.con.register("given", pa.table({"place": range(len(texts)), "text": texts}))
        given = engine.table("given")
        found = given.select("place", value=hash63(given.text)).order_by("place").to_pyarrow()
    pairs = zip(texts, found["value"].to_pylist(), strict=True)
    expected = [value if text else 0 for text, value in pairs]
    assert hash_ids(texts).tolist() == expected
    assert hash_ids(pa.chunked_array([texts[:3], texts[3:]])).tolist() == expected
    assert hash_ids([12, -3, None]).tolist() == [*hash_ids(["12", "-3"]), 0]
    assert hash_ids(pa.array([], pa.string())).tolist() == []


def test_rows_of_hashes_stay_within_the_table():
    hashes = np.array([0, 1, 6, 7, 2**63 - 1], np.int64)
    assert IdRows(8)(hashes).tolist() == [0, 2, 7, 1, 1 + (2**63 - 1) % 7]
    assert IdRows(2)(hashes).tolist() == [0, 1, 1, 1, 1]
    known = np.array([7, 1, 6], np.int64)
    assert IdRows(8, known)(hashes).tolist() == [0, 2, 3, 1, 0]
    assert IdRows(3, known)(hashes).tolist() == [0, 2, 0, 1, 0]
    assert IdRows(8, known[:0])(hashes).tolist() == [0] * 5


def test_without_further_tables_nothing_is_added(tmp_path):
    config = config_for(write_log(random_log("int"), tmp_path / "log.parquet"), True)
    dataset, _ = built(config, tmp_path / "dataset")
    assert not (dataset.root / "items.parquet").exists()
    assert not (dataset.root / "ids").exists()
    names = pq.read_schema(dataset.request_files("train")[0]).names
    assert [name for name in names if name.startswith("id_")] == []
    assert (dataset.manifest.ids, dataset.manifest.content) == ({}, None)
    with pytest.raises(DataError, match="built without the ids of 'user_id'"):
        RequestReader(
            dataset,
            "train",
            batch_size=4,
            sampler=None,
            id_columns={"user": IdTableSettings(column="user_id")},
        )


def test_a_day_is_taken_only_where_it_has_the_same_ids_of_requests(tmp_path):
    log = write_log(random_log("int"), tmp_path / "log.parquet")
    plain = config_for(log, True)
    users = with_tables(plain, {"user": {"column": "user_id"}})
    wider = with_tables(plain, {"reader": {"column": "user_id", "rows": 7, "dim": 3}})

    def days(steps):
        return sum(step.startswith("writing the requests of ") for step in steps)

    old, _ = built(plain, tmp_path / "plain")
    new, steps = built(users, tmp_path / "users", [old.root])
    assert days(steps) == 5
    again, steps = built(wider, tmp_path / "wider", [new.root])
    assert days(steps) == 0
    path = vocabulary_path(new.root, "request", "user_id")
    assert pq.read_table(vocabulary_path(again.root, "request", "user_id")).equals(
        pq.read_table(path)
    )
    assert again.manifest.data_version == new.manifest.data_version
    _, steps = built(plain, tmp_path / "back", [new.root])
    assert days(steps) == 5


def test_the_inputs_change_with_the_columns_and_the_items_and_nothing_else(tmp_path):
    log = write_log(random_log("int"), tmp_path / "log.parquet")
    lines = items_of(random_log("int"))
    first = write_items(lines, tmp_path / "items.parquet")
    copy = write_items(lines, tmp_path / "copy.parquet")
    shorter = write_items(lines[1:], tmp_path / "shorter.parquet")
    base = config_for(log, True)

    def version(path=first, **author):
        table = {"column": "writer", "of": "item"} | author
        return inputs_version(with_tables(base, {"author": table}, path=path, item_id="pin"))

    assert version() == version(path=copy) == version(rows=10, dim=4, optimizer="sgd", hashed=False)
    changed = {version(), version(column="pin"), version(path=shorter), version(of="request")}
    assert len(changed | {inputs_version(base)}) == 5


def test_items_may_be_a_csv_file(case, tmp_path):
    config, dataset, _, lines = case
    path = tmp_path / "items.csv"
    table = pa.Table.from_pylist(lines)
    pyarrow.csv.write_csv(table.set_column(0, "pin", table["pin"].cast(pa.string())), path)
    tables = {"author": TABLES["author"]}
    other, _ = built(with_tables(config, tables, path=str(path), item_id="pin"), tmp_path / "csv")
    assert np.array_equal(read_item_ids(other, "writer"), read_item_ids(dataset, "writer"))


def refused(config, tmp_path):
    with pytest.raises(DataError) as error:
        built(config, tmp_path / "refused")
    return str(error.value)


@pytest.fixture
def log_config(tmp_path):
    return config_for(write_log(random_log("int"), tmp_path / "log.parquet"), True)


def test_a_column_that_the_log_lacks_is_named_with_its_table(log_config, tmp_path):
    message = refused(with_tables(log_config, {"author": {"column": "writer"}}), tmp_path)
    assert "log.parquet has no column 'writer' (tables.author.column)" in message
    assert "tables.author.of" in message


def test_a_column_that_the_items_lack_is_named_with_its_table(log_config, tmp_path):
    path = write_items([{"pin": 1000, "writer": "x"}], tmp_path / "items.parquet")
    tables = {"author": {"column": "author", "of": "item"}}
    message = refused(with_tables(log_config, tables, path=path, item_id="pin"), tmp_path)
    assert "items.parquet has no column 'author' (tables.author.column)" in message
    assert "tables.author.of" in message


def test_a_column_of_lists_is_no_column_of_ids(log_config, tmp_path):
    path = write_items([{"pin": 1000, "writer": ["x", "y"]}], tmp_path / "items.parquet")
    tables = {"author": TABLES["author"]}
    message = refused(with_tables(log_config, tables, path=path, item_id="pin"), tmp_path)
    assert "column 'writer' (tables.author.column) is of type array<string>" in message


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "items.path: .* names no data file"),
        ([{"id": 1000, "writer": "x"}], "has no column 'pin' .items.item_id."),
        (
            [{"pin": 1000, "writer": "x"}, {"pin": 999, "writer": "x"}] * 2,
            "2 items on several lines, such as '1000'",
        ),
        ([{"pin": 1000, "writer": "x"}, {"pin": None, "writer": "y"}], "without an item id"),
        (
            [{"pin": 5, "writer": "x"}],
            "none of the [0-9]+ items of the log: ids are like '1000' in the log and '5'",
        ),
    ],
)
def test_a_file_of_items_that_cannot_be_used_is_refused(log_config, lines, said, tmp_path):
    path = str(tmp_path / "items.parquet")
    if lines is not None:
        write_items(lines, path)
    tables = {"author": TABLES["author"]}
    config = with_tables(log_config, tables, path=path, item_id="pin")
    with pytest.raises(DataError, match=said):
        built(config, tmp_path / "refused")


def test_a_table_of_items_needs_a_file_of_items():
    text = "events: {path: log.parquet}\ntables: {author: {column: writer, of: item}}"
    with pytest.raises(ConfigError, match=r"tables.author takes the ids of items from 'writer'"):
        parse_config(text)


def test_a_simulated_feed_brings_its_own_items():
    text = "simulate: {}\nitems: {path: items.parquet}"
    with pytest.raises(ConfigError, match="a feed has its own items"):
        parse_config(text)
