"""The catalog that lives: rows that stay, buckets for rare items, evictions, and tables over it."""

import datetime
import hashlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import write_dataset
from logs import DAY, START, built, config_for, days_built, events_of, write, write_days

from thawline.config import Negatives
from thawline.data.days import Source
from thawline.data.manifest import FIRST_ROW, UNKNOWN_ROW, Catalog, Dataset, RowFacts
from thawline.data.negatives import NegativeSampler
from thawline.errors import ConfigError, DataError
from thawline.model.bundle import load_rows, save_table
from thawline.tables.carry import carry_rows
from thawline.tracking.ids import ItemIndex

PRETRAIN_AND_FINETUNE = (START, START + 6 * DAY)


def rows_of(catalog):
    """Item id to row."""
    return {
        item: row
        for row, item in enumerate(catalog.item_id.to_pylist(), FIRST_ROW)
        if item is not None
    }


def bucket_of(item, buckets):
    return (int(hashlib.md5(str(item).encode()).hexdigest()[:16], 16) // 2) % buckets  # noqa: S324


def is_held_out(user):
    digest = hashlib.md5(f"holdout:{user}".encode()).hexdigest()  # noqa: S324
    return int(digest[:12], 16) / 16**12 < 0.2


def trained_positives(numbers):
    """Positives of training users in the training windows, by item."""
    counts = {}
    for number in numbers:
        for row in events_of(number):
            if row["click"] and not is_held_out(row["user"]):
                counts[row["item"]] = counts.get(row["item"], 0) + 1
    return counts


# Rows stay.


def test_rows_stay_and_new_items_come_after_them(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    (log / "00.parquet").unlink()
    write_days(log, [7, 8])
    # An item that is new but older than all others would come first if it were numbered anew.
    write([events_of(1)[0] | {"item": 9_999, "time": START + 5, "request": 1}], log / "x.parquet")
    moved = config_for(log, end="2026-03-09", previous=str(first.root))
    second, _ = built(moved, tmp_path / "second")
    before, after = rows_of(first.catalog), rows_of(second.catalog)
    assert before.items() <= after.items()
    new = after.keys() - before.keys()
    assert 9_999 in new
    assert sorted(after[item] for item in new) == list(
        range(first.catalog.num_rows, second.catalog.num_rows)
    )
    order = sorted(new, key=lambda item: (second.catalog.first_seen[after[item] - 2], item))
    assert sorted(new, key=after.__getitem__) == order
    assert after[9_999] == first.catalog.num_rows
    assert second.manifest.rows == RowFacts()
    assert second.manifest.num_items == len(after)


def test_an_item_that_has_left_the_log_keeps_its_row_and_when_it_was_first_seen(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    write([events_of(0)[0] | {"item": 9_999, "click": True, "request": 77}], log / "x.parquet")
    first, _ = built(config_for(log), tmp_path / "first")
    (log / "x.parquet").unlink()
    second, _ = built(config_for(log, previous=str(first.root)), tmp_path / "second")
    place = rows_of(second.catalog)[9_999] - FIRST_ROW
    assert place == rows_of(first.catalog)[9_999] - FIRST_ROW
    assert second.catalog.first_seen[place] == first.catalog.first_seen[place]
    assert second.catalog.pretrain_count[place] == 0


def test_a_previous_catalog_with_ids_of_another_type_is_refused(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    for file in log.iterdir():
        table = pq.read_table(file)
        names = pa.array([f"item-{item}" for item in table["item"].to_pylist()])
        pq.write_table(table.set_column(1, "item", names), file)
    with pytest.raises(DataError, match="item ids are string in the log, but int64 in"):
        built(config_for(log, previous=str(first.root)), tmp_path / "second")


def test_a_sampler_over_an_extended_catalog_draws_what_existed(tmp_path):
    hour = DAY // 24
    dataset = write_dataset(
        tmp_path, first_seen=[START + 2 * hour, START, START + hour], support=[1, 1, 1]
    )
    sampler = NegativeSampler(dataset, Negatives(popularity="window", alpha=1.0), seed=0)
    times = START + np.array([1, hour + 1, 2 * hour + 1]).repeat(50)
    drawn = sampler.draw(np.arange(150), times, np.zeros((150, 0), np.int64), 4, 0)
    assert [set(part.flatten().tolist()) for part in np.split(drawn, 3)] == [
        {3},
        {3, 4},
        {2, 3, 4},
    ]


# Buckets.


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory):
    root = tmp_path_factory.mktemp("buckets")
    log = write_days(root / "log", range(7))
    config = config_for(log, catalog={"min_support": 5, "buckets": 4})
    return built(config, root / "dataset")[0]


def test_items_below_the_support_share_buckets_by_their_hash(bucketed):
    counts = trained_positives(range(6))
    everything = {row["item"] for number in range(7) for row in events_of(number)}
    own = {item for item in everything if counts.get(item, 0) >= 5}
    rest = everything - own
    assert len(rest) > 8
    catalog = bucketed.catalog
    assert catalog.item_id.to_pylist()[:4] == [None] * 4
    assert set(rows_of(catalog)) == own
    assert min(rows_of(catalog).values()) == FIRST_ROW + 4
    support = trained_positives(range(3, 6))
    by_bucket = [[item for item in rest if bucket_of(item, 4) == bucket] for bucket in range(4)]
    assert catalog.support[:4].tolist() == [
        sum(support.get(item, 0) for item in items) for items in by_bucket
    ]
    assert set(catalog.tier[:4].tolist()) == {2}
    first_seen = {}
    for number in range(7):
        for row in events_of(number):
            first_seen[row["item"]] = min(first_seen.get(row["item"], row["time"]), row["time"])
    assert catalog.first_seen[:4].tolist() == [
        min(first_seen[item] for item in items) for items in by_bucket
    ]
    alone = sum(len(items) == 1 for items in by_bucket)
    assert bucketed.manifest.rows == RowFacts(
        first_bucket=FIRST_ROW,
        buckets=4,
        bucketed=len(rest),
        collision_rate=1 - alone / len(rest),
    )
    assert catalog.rows == bucketed.manifest.rows
    assert bucketed.manifest.num_items == len(own)


def require_rows_of_now(dataset, numbers):
    """Every candidate stands under the row, or the bucket, that its item now has."""
    rows = rows_of(dataset.catalog)
    shown = {
        (row["request"], row["position"]): rows.get(row["item"], 2 + bucket_of(row["item"], 4))
        for number in numbers
        for row in events_of(number)
    }
    files = dataset.request_files("train") + dataset.request_files("next")
    count = 0
    for file in files:
        for request in pq.read_table(file, partitioning=None).to_pylist():
            count += 1
            assert request["candidate_row"] == [shown[request["request_id"], p] for p in range(3)]
    assert count == 40 * len(numbers)


def test_requests_hold_the_buckets_of_rare_items(bucketed):
    require_rows_of_now(bucketed, range(3, 7))


def test_an_unknown_item_is_scored_by_its_bucket(bucketed):
    index = ItemIndex(bucketed.catalog.item_id, bucketed.catalog.rows)
    rows = rows_of(bucketed.catalog)
    known = next(iter(rows))
    found = index.rows(pa.array([known, 123_456, None]))
    assert found.tolist() == [rows[known], 2 + bucket_of(123_456, 4), UNKNOWN_ROW]
    names = ItemIndex(pa.array([None, None, "a"]), RowFacts(first_bucket=2, buckets=2))
    assert names.rows(pa.array(["a", "é\u200d🙂"])).tolist() == [4, 2 + bucket_of("é\u200d🙂", 2)]


def test_the_rate_of_collisions_is_zero_where_nothing_shares_and_none_without_rare_items(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    windows = {"catalog": {"min_support": 5, "buckets": 1_000_003}}
    wide, _ = built(config_for(log, **windows), tmp_path / "wide")
    assert wide.manifest.rows.collision_rate == 0.0
    windows = {"catalog": {"min_support": 0, "buckets": 7}}
    plain, _ = built(config_for(log, **windows), tmp_path / "plain")
    assert plain.manifest.rows == RowFacts()


def test_an_item_that_has_become_known_gets_a_row_and_the_others_keep_theirs(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    catalog = {"min_support": 9, "buckets": 4}
    first, _ = built(config_for(log, catalog=catalog), tmp_path / "first")
    write_days(log, [7])
    moved = config_for(log, end="2026-03-08", catalog=catalog, previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    before, after = rows_of(first.catalog), rows_of(second.catalog)
    assert before.items() <= after.items()
    counts = trained_positives(range(1, 7))
    risen = {item for item, count in counts.items() if count >= 9} - before.keys()
    assert risen
    assert after.keys() - before.keys() == risen
    assert (second.manifest.rows.first_bucket, second.manifest.rows.buckets) == (2, 4)
    # Days on which a risen item may stand under its bucket's row are built anew.
    assert days_built(steps) == [str(day) for day in second.manifest.finetune.days()] + [
        "2026-03-08"
    ]
    require_rows_of_now(second, range(4, 8))


def test_days_before_the_first_event_of_a_risen_item_are_taken(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    old = replace(first.catalog, rows=RowFacts(first_bucket=2, buckets=4))
    source = Dataset(first.root, first.manifest)
    source.__dict__["catalog"] = old
    day = datetime.date(2026, 3, 5)
    start = (day - datetime.date(1970, 1, 1)).days * 86_400_000_000

    def with_new(*first_seen):
        return replace(
            old,
            item_id=pa.concat_arrays([old.item_id, pa.array(first_seen, old.item_id.type)]),
            first_seen=np.concatenate([old.first_seen, np.array(first_seen, np.int64)]),
        )

    days = [day - datetime.timedelta(days=1), day]
    assert [Source.of(source, with_new(start + 5, start + 9)).has(each) for each in days] == [
        True,
        False,
    ]
    assert all(Source.of(source, old).has(each) for each in days)
    assert all(Source.of(first, with_new(start + 5)).has(each) for each in days)


def test_buckets_come_after_the_rows_of_a_catalog_without_them(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    write_days(log, [7])
    catalog = {"min_support": 5, "buckets": 4}
    moved = config_for(log, end="2026-03-08", catalog=catalog, previous=str(first.root))
    second, _ = built(moved, tmp_path / "second")
    start = first.catalog.num_rows
    assert second.manifest.rows.first_bucket == start
    ids = second.catalog.item_id.to_pylist()
    assert ids[start - 2 : start + 2] == [None] * 4
    assert second.catalog.extends(first.catalog)
    other = config_for(log, end="2026-03-08", previous=str(second.root))
    other = other.model_copy(
        update={
            "windows": other.windows.model_copy(
                update={"catalog": other.windows.catalog.model_copy(update={"min_support": 5})}
            )
        }
    )
    with pytest.raises(ConfigError, match=r"buckets is 1024, but windows\.previous has 4"):
        built(other, tmp_path / "third")


# Evictions.


def evicting(tmp_path, **catalog):
    """A dataset, and the next one, in which items last seen on 1 March lose their rows."""
    log = write_days(tmp_path / "log", range(1, 7))
    old = [events_of(0)[0] | {"item": 7_000 + n, "request": 10 + n, "click": True} for n in (1, 2)]
    write(old, log / "00.parquet")
    windows = {"finetune_days": 3, "pretrain_days": 2}
    first, _ = built(config_for(log, **windows), tmp_path / "first")
    write_days(log, [7])
    moved = config_for(
        log,
        **windows,
        end="2026-03-08",
        previous=str(first.root),
        catalog=catalog | {"evict_after_days": 6},
    )
    return first, *built(moved, tmp_path / "second")


def test_an_eviction_starts_a_generation_and_says_which_rows_moved(tmp_path):
    first, second, steps = evicting(tmp_path)
    before, after = rows_of(first.catalog), rows_of(second.catalog)
    gone = {7_001, 7_002}
    assert before.keys() - after.keys() == gone
    assert second.manifest.rows.generation == 1
    assert second.manifest.rows.evicted == 2
    assert sorted(after.values()) == list(range(FIRST_ROW, second.catalog.num_rows))
    # What stays keeps its order.
    stays = sorted(before.keys() - gone, key=before.__getitem__)
    assert stays == sorted(stays, key=after.__getitem__)
    moved = pq.read_table(second.root / "moved.parquet").to_pylist()
    assert moved == [
        {"item_id": item, "old_row": row, "row": after.get(item)}
        for item, row in sorted(before.items(), key=lambda pair: pair[1])
        if after.get(item) != row
    ]
    # Rows have moved, so no day can be taken.
    assert len(days_built(steps)) == 4
    # Evicted items have no row, not in histories either.
    rows = pq.read_table(second.request_files("train"), partitioning=None).to_pylist()
    history = {row for request in rows for row in request["history_row"]}
    assert max(history) < second.catalog.num_rows
    popular = pq.read_table(second.root / "popularity.parquet")["row"].to_pylist()
    assert min(popular) >= FIRST_ROW


def test_evicted_items_fall_into_their_buckets(tmp_path):
    _, second, _ = evicting(tmp_path, min_support=1, buckets=3)
    assert second.manifest.rows.generation == 1
    assert second.manifest.rows.evicted == 2
    assert second.catalog.first_seen[bucket_of(7_001, 3)] <= events_of(0)[0]["time"]


def test_nothing_to_evict_leaves_the_generation_and_the_days(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    write_days(log, [7])
    settings = {"end": "2026-03-08", "catalog": {"evict_after_days": 7}}
    moved = config_for(log, **settings, previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    assert second.manifest.rows.generation == 0
    assert days_built(steps) == ["2026-03-08"]
    assert not (second.root / "moved.parquet").exists()


def test_an_eviction_inside_the_windows_is_refused(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    config = config_for(log, catalog={"evict_after_days": 6})
    with pytest.raises(ConfigError, match="evict_after_days is 6, but the windows are 7 days"):
        built(config, tmp_path / "dataset")


# Tables over a catalog.


def catalog_of(ids, first_bucket=FIRST_ROW, buckets=0):
    zeros = np.zeros(len(ids), np.int64)
    facts = RowFacts(first_bucket=first_bucket, buckets=buckets)
    return Catalog(pa.array(ids, pa.int64()), zeros, zeros, zeros, zeros.astype(np.int8), facts)


def test_a_table_is_carried_to_a_catalog_that_extends_its_own():
    weight = torch.arange(8.0).reshape(4, 2)
    old, new = catalog_of([10, 11]), catalog_of([10, 11, 12])
    carried = carry_rows(weight, old, new, seed=3)
    assert carried[:4].equal(weight)
    assert carried[4].abs().sum() > 0
    assert carry_rows(weight, old, new, seed=3).equal(carried)
    assert not carry_rows(weight, old, new, seed=4)[4].equal(carried[4])
    many = carry_rows(weight, old, catalog_of(range(10, 20_000)), seed=0)
    assert many[4:].std().item() == pytest.approx(2**-0.5, rel=0.02)


def test_a_table_is_carried_across_generations_by_ids():
    weight = torch.arange(14.0).reshape(7, 2)
    old = catalog_of([10, None, None, 11, 12], first_bucket=3, buckets=2)
    new = catalog_of([None, None, 12, 13, 10], first_bucket=2, buckets=2)
    carried = carry_rows(weight, old, new, seed=0)
    assert carried[[0, 1, 2, 3, 4, 6]].equal(weight[[0, 1, 3, 4, 6, 2]])
    fewer = carry_rows(weight, old, catalog_of([None, 12], buckets=1), seed=0)
    assert fewer[3].equal(weight[6])
    assert not fewer[2].equal(weight[3])


def test_a_table_of_other_items_is_refused():
    with pytest.raises(DataError, match="no item in common"):
        carry_rows(torch.zeros(4, 2), catalog_of([1, 2]), catalog_of([3, 4]), seed=0)
    with pytest.raises(DataError, match="a table of 5 rows does not belong to a catalog of 4"):
        carry_rows(torch.zeros(5, 2), catalog_of([1, 2]), catalog_of([1, 2]), seed=0)


@pytest.mark.parametrize("kind", ["table", "model"])
def test_the_table_of_the_previous_dataset_fits_the_next_one(tmp_path, kind):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    write_days(log, [7])
    moved = config_for(log, end="2026-03-08", previous=str(first.root))
    second, _ = built(moved, tmp_path / "second")
    assert second.catalog.num_rows > first.catalog.num_rows
    folder = tmp_path / kind
    (folder / "tables").mkdir(parents=True)
    weight = torch.randn(first.catalog.num_rows, 4)
    path = folder / "item.safetensors" if kind == "table" else folder / "tables/item.safetensors"
    save_table(path, weight)
    (folder / "catalog.parquet").write_bytes((first.root / "catalog.parquet").read_bytes())
    rows = load_rows(folder, second.catalog, 4, seed=0)
    assert len(rows) == second.catalog.num_rows
    assert rows[: len(weight)].equal(weight)
    assert load_rows(folder, first.catalog, 4, seed=0).equal(weight)


def test_a_catalog_from_before_generations_is_read_as_one_without_buckets(tmp_path):
    dataset = write_dataset(tmp_path, num_items=3)
    assert Dataset.open(dataset.root).catalog.rows == RowFacts()
