"""Files of scores, and pairing them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thawline.data.manifest import Catalog
from thawline.errors import DataError
from thawline.evaluation import score_file
from thawline.evaluation.pairing import pair
from thawline.evaluation.score_file import Scores, read_scores, write_scores
from thawline.evaluation.scored import Scored

ACTIONS = ["save", "click"]


def catalog(ids):
    none = np.zeros(len(ids), np.int64)
    tier = np.arange(len(ids)).astype(np.int8) % 4
    return Catalog(pa.array(ids), none, none, none, tier)


ITEMS = catalog(["a", "b", None, "d"])
"""Rows 2 to 5, of the tiers head to cold; row 4 is a bucket."""


def scored(requests=40, seed=0):
    """Requests of 0 to 4 candidates each, of four users."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 5, requests)
    shape = (int(sizes.sum()), 2)
    return Scored(
        actions=ACTIONS,
        request_id=1000 + generator.permutation(requests),
        timestamp=np.arange(requests) * 1_000_000,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        row=generator.integers(1, 6, shape[0]),
        labels=generator.integers(0, 2, shape).astype(np.int8),
        logits=generator.normal(size=shape).astype(np.float32),
        oracle=None,
        user_id=pa.array([f"u{i % 4}" for i in range(requests)]),
    )


@pytest.mark.parametrize("per_group", [7, 1 << 20])
def test_a_file_of_scores_reads_as_it_was_written(tmp_path, monkeypatch, per_group):
    monkeypatch.setattr(score_file, "CANDIDATES_PER_GROUP", per_group)
    found = scored()
    path = tmp_path / "scores" / "next.parquet"
    write_scores(path, found, ITEMS, model="ranker 3", data_version="d1")
    back = read_scores(path)
    assert (back.actions, back.model, back.data_version) == (ACTIONS, "ranker 3", "d1")
    for name in ("request_id", "timestamp", "offsets", "labels", "logits"):
        np.testing.assert_array_equal(getattr(back, name), getattr(found, name))
    assert back.user_id.equals(found.user_id)
    ids = [None, "a", "b", None, "d"]
    assert back.item_id.to_pylist() == [ids[row - 1] for row in found.row]
    # Unknown items are cold, the others have the catalog's tier.
    assert back.tier.tolist() == [[3, 0, 1, 2, 3][row - 1] for row in found.row]
    groups = pq.ParquetFile(path).num_row_groups
    assert groups == 1 if per_group > 1000 else groups > 5


def test_the_file_has_the_columns_that_it_says(tmp_path):
    write_scores(tmp_path / "next.parquet", scored(), ITEMS, model="", data_version="")
    file = pq.ParquetFile(tmp_path / "next.parquet")
    assert file.schema_arrow.names == [
        "request_id", "user_id", "timestamp", "item_id", "tier",
        "label_save", "label_click", "logit_save", "logit_click",
    ]  # fmt: skip
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert str(file.schema_arrow.field("timestamp").type) == "timestamp[us, tz=UTC]"


def test_weights_are_a_column_of_the_file_and_reach_what_is_paired(tmp_path):
    found = scored()
    weight = np.arange(1.0, 41.0) / 7
    write_scores(
        tmp_path / "a.parquet", replace(found, weight=weight), ITEMS, model="", data_version=""
    )
    write_scores(tmp_path / "b.parquet", found, ITEMS, model="", data_version="")
    weighted, plain = read_scores(tmp_path / "a.parquet"), read_scores(tmp_path / "b.parquet")
    np.testing.assert_array_equal(weighted.weight, weight)
    assert plain.weight is None
    assert pair(plain, plain).sides.scored.weight is None
    for one, other in ((weighted, weighted), (weighted, plain), (plain, weighted)):
        both = pair(one, other)
        np.testing.assert_array_equal(both.sides.scored.weight, weight)
        assert both.left_out == []

    changed = weight.copy()
    changed[[3, 30]] *= 2
    both = pair(weighted, replace(weighted, weight=changed))
    np.testing.assert_array_equal(both.sides.scored.weight, np.delete(weight, [3, 30]))
    ids = found.request_id[[3, 30]]
    assert both.left_out == [f"2 requests have other weights (request_id {ids[0]}, {ids[1]})"]


def test_a_hold_out_without_requests_is_an_empty_file(tmp_path):
    none = replace(scored(0), user_id=pa.array([], pa.string()))
    write_scores(tmp_path / "next.parquet", none, ITEMS, model="m", data_version="d")
    assert len(read_scores(tmp_path / "next.parquet").request_id) == 0


def test_scores_without_users_are_refused(tmp_path):
    with pytest.raises(DataError, match="do not say who asked"):
        write_scores(
            tmp_path / "x.parquet",
            replace(scored(), user_id=None),
            ITEMS,
            model="",
            data_version="",
        )


def test_files_of_something_else_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"gone\.parquet cannot be read"):
        read_scores(tmp_path / "gone.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(DataError, match=r"text\.parquet cannot be read as Parquet"):
        read_scores(tmp_path / "text.parquet")
    pq.write_table(pa.table({"logit_a": [[1.0]]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no file of scores: it lacks request_id, user_id, timest"):
        read_scores(tmp_path / "x.parquet")
    write_scores(tmp_path / "y.parquet", scored(), ITEMS, model="", data_version="")
    table = pq.read_table(tmp_path / "y.parquet")
    uneven = table.set_column(4, "tier", pa.array([[1]] * len(table), pa.list_(pa.int8())))
    pq.write_table(uneven, tmp_path / "y.parquet")
    with pytest.raises(DataError, match="lists of tier and item_id differ in length"):
        read_scores(tmp_path / "y.parquet")


def scores(requests, *, users=None):
    """Scores from `{request_id: [(item, label, logit), ...]}` or such pairs, one action."""
    pairs = list(requests.items()) if isinstance(requests, dict) else requests
    flat = [each for _, candidates in pairs for each in candidates]
    sizes = [len(candidates) for _, candidates in pairs]
    return Scores(
        actions=["save"],
        request_id=np.array([request_id for request_id, _ in pairs], np.int64),
        user_id=pa.array(users or [7] * len(pairs), pa.int64()),
        timestamp=np.zeros(len(pairs), np.int64),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        item_id=pa.array([item for item, _, _ in flat], pa.string()),
        tier=np.zeros(len(flat), np.int8),
        labels=np.array([[label] for _, label, _ in flat], np.int8),
        logits=np.array([[logit] for _, _, logit in flat], np.float32),
    )


def rows(pairing):
    """(request, user, label, first logit, second logit) of each pair of scores."""
    sides = pairing.sides
    scored = sides.scored
    return [
        (int(request), int(scored.user[request]), int(label), float(first), float(second))
        for request, label, first, second in zip(
            scored.request_index,
            scored.labels[:, 0],
            sides.other[:, 0],
            scored.logits[:, 0],
            strict=True,
        )
    ]


def test_scores_pair_by_request_and_item_in_any_order():
    first = scores({1: [("a", 1, 0.1), ("b", 0, 0.2)], 2: [("a", 0, 0.5)]}, users=[8, 9])
    second = scores({2: [("a", 0, 5.0)], 1: [("b", 0, 2.0), ("a", 1, 1.0)]}, users=[9, 8])
    pairing = pair(first, second)
    assert pairing.left_out == []
    assert [(r, u, label, second) for r, u, label, _, second in rows(pairing)] == [
        (0, 0, 1, 1.0),
        (0, 0, 0, 2.0),
        (1, 1, 0, 5.0),
    ]


def test_the_same_order_is_kept_as_it_is():
    first = scores({1: [("b", 1, 1.0), ("a", 0, 2.0), (None, 0, 3.0), (None, 1, 4.0)]})
    assert [row[3:] for row in rows(pair(first, first))] == [(x, x) for x in (1, 2, 3, 4)]


def test_what_cannot_be_paired_is_counted_and_named():
    first = scores(
        {
            1: [("a", 1, 0.0)],
            2: [("a", 1, 0.0)],
            3: [("a", 1, 0.0), ("b", 1, 0.0)],
            4: [("a", 1, 0.0)],
            5: [("a", 1, 0.0), ("b", 0, 0.0)],
        }
    )
    second = scores(
        {
            9: [("a", 1, 0.0)],
            2: [("c", 1, 0.0)],
            3: [("a", 1, 0.0)],
            4: [("a", 0, 0.0)],
            5: [("b", 0, 7.0), ("a", 1, 6.0)],
        }
    )
    pairing = pair(first, second)
    assert pairing.left_out == [
        "1 requests are on the first side only (request_id 1)",
        "1 requests are on the second side only (request_id 9)",
        "2 requests have other candidates (request_id 2, 3)",
        "1 requests have other labels (request_id 4)",
    ]
    assert [row[4] for row in rows(pairing)] == [6.0, 7.0]


def test_an_item_that_a_request_holds_twice_is_told_apart_by_its_labels():
    first = scores({1: [("a", 1, 1.0), ("b", 0, 2.0), ("a", 0, 3.0)]})
    second = scores({1: [("a", 0, 3.0), ("a", 1, 1.0), ("b", 0, 2.0)]})
    pairing = pair(first, second)
    assert pairing.left_out == []
    assert sorted(row[3:] for row in rows(pairing)) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_requests_that_share_an_id_are_paired_in_order():
    twice = [(1, [("a", 1, 1.0)]), (2, [("a", 1, 2.0)]), (1, [("a", 0, 3.0)])]
    shuffled = [twice[1], twice[0], twice[2]]
    assert [row[3:] for row in rows(pair(scores(twice), scores(shuffled)))] == [
        (1.0, 1.0),
        (2.0, 2.0),
        (3.0, 3.0),
    ]


def test_scores_find_each_other_whatever_the_order_of_requests_and_candidates():
    generator = np.random.default_rng(1)
    first = {
        request: [
            (str(item), int(item) % 2, 10.0 * request + int(item))
            for item in generator.permutation(8)[: generator.integers(0, 8)]
        ]
        for request in range(30)
    }
    second = {
        int(request): [
            (item, label, logit + 1000)
            for item, label, logit in generator.permutation(np.array(first[request], object))
        ]
        for request in generator.permutation(30)
    }
    pairing = pair(scores(first), scores(second))
    assert pairing.left_out == []
    one, two = pairing.sides.other, pairing.sides.scored.logits
    assert (two - one == 1000).all()
    assert len(one) == sum(map(len, first.values()))


def test_sides_that_share_nothing_are_refused():
    first, second = scores({1: [("a", 1, 0.0)]}), scores({2: [("a", 1, 0.0)]})
    with pytest.raises(DataError, match=r"no request is on both sides .*first side only"):
        pair(first, second)
    with pytest.raises(DataError, match="one side scored save, the other click"):
        pair(first, replace(second, actions=["click"]))
    with pytest.raises(DataError, match="item ids are string on one side and int64 on the other"):
        pair(first, replace(first, item_id=pa.array([3])))
