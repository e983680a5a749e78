"""Dataset folders against a slow, obvious reference."""

from collections import Counter, defaultdict

import pyarrow.parquet as pq
import pytest
from window_reference import (
    DAY,
    START,
    WINDOWS,
    Reference,
    built,
    config_for,
    every_request,
    random_log,
    read,
    write_log,
)

from thawline.config import Config
from thawline.data.manifest import TIERS
from thawline.data.windows import inputs_version


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
