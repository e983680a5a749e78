"""The weight of a request: from a column of the log to the request's own."""

import math

import delayed_log
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_logs import built, clicks, config_for, requests_of, write

from thawline.config import Config
from thawline.data.days import events_tree
from thawline.data.windows import build_dataset
from thawline.errors import DataError

WEIGHTS = (0.1, 1 / 3, 2.0, 12_345_678.9)


def pages(**columns):
    """A log of requests of two impressions each, and the weight of each by its id."""
    rows = clicks()
    request = [place // 2 for place in range(len(rows))]
    # Both impressions of a user's day are in one request.
    return rows, {"request": request} | columns


def weight_of(request):
    return WEIGHTS[request % len(WEIGHTS)]


def of_requests(path, **events):
    return config_for(path, columns={"request_id": "request"}, weight="w", **events)


def test_each_request_has_the_weight_of_its_impressions(tmp_path):
    rows, columns = pages()
    columns["w"] = [weight_of(request) for request in columns["request"]]
    dataset = built(
        of_requests(write(tmp_path / "log.parquet", rows, **columns)), tmp_path / "dataset"
    )
    requests = requests_of(dataset)
    assert dataset.manifest.weighted
    assert len(requests) == 80
    assert {len(row["candidate_row"]) for row in requests} == {2}
    assert [row["weight"] for row in requests] == [weight_of(row["request_id"]) for row in requests]


def test_without_impressions_each_positive_has_its_own_weight(tmp_path):
    rows = clicks()
    weights = [WEIGHTS[place % 4] for place in range(len(rows))]
    path = write(tmp_path / "log.parquet", rows, w=weights)
    dataset = built(config_for(path, weight="w"), tmp_path / "dataset")
    expected = {(user, us): weight for (user, _, us), weight in zip(rows, weights, strict=True)}
    found = requests_of(dataset)
    assert len(found) == 160
    for row in found:
        us = row["timestamp"].timestamp() * 1e6
        assert row["weight"] == expected[row["user_id"], round(us)]


def test_weights_in_text_are_read(tmp_path):
    lines = [f"{user},{item},{us},2.5" for user, item, us in clicks()]
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp,w\n" + "\n".join(lines))
    dataset = built(config_for(path, timestamp_unit="us", weight="w"), tmp_path / "dataset")
    assert {row["weight"] for row in requests_of(dataset)} == {2.5}


def test_bad_weights_are_rejected_rows_counted_by_reason_and_kept_with_their_text(tmp_path):
    rows = clicks()
    weights = [1.0] * len(rows)
    weights[1], weights[5], weights[9] = 0.0, -2.0, math.nan
    weights[12], weights[20], weights[30] = math.inf, None, 1e12
    path = write(tmp_path / "log.parquet", rows, w=weights)
    config = config_for(path, weight="w", windows={"max_rejected": 0.05})
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.rejected == {"bad weight": 6}
    (file,) = (dataset.root / "rejected").glob("*.parquet")
    kept = [(row["user_id"], row["weight"]) for row in pq.read_table(file).to_pylist()]
    assert sorted(user for user, _ in kept) == sorted(
        str(rows[place][0]) for place in (1, 5, 9, 12, 20, 30)
    )
    assert sorted(text for _, text in kept if text is not None)[0] == "-2"
    with pytest.raises(DataError, match=r"6 bad weight.*\n[^$]*give events\.weight numbers from"):
        build_dataset(config_for(path, weight="w"), tmp_path / "strict")


def test_a_request_whose_impressions_disagree_is_rejected_whole(tmp_path):
    rows, columns = pages()
    columns["w"] = [1.0] * len(rows)
    columns["w"][21] = 2.0
    config = of_requests(
        write(tmp_path / "log.parquet", rows, **columns), windows={"max_rejected": 0.05}
    )
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.rejected == {"several weights in one request": 2}


def test_rows_of_actions_need_no_weight(tmp_path):
    path = delayed_log.write_log(delayed_log.random_log(3, named=True), tmp_path / "log.parquet")
    table = pq.read_table(path)
    shown = [event == "view" for event in table["event"].to_pylist()]
    numbers = [int(text[1:]) if text else 0 for text in table["request_id"].to_pylist()]
    weights = [weight_of(n) if view else None for n, view in zip(numbers, shown, strict=True)]
    pq.write_table(table.append_column("w", pa.array(weights, pa.float64())), path)
    config = delayed_log.config_for(path, named=True, hours=6.0)
    plain = built(config, tmp_path / "plain")
    config = config.model_copy(update={"events": config.events.model_copy(update={"weight": "w"})})
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.rejected == plain.manifest.rejected
    requests, bare = requests_of(dataset), requests_of(plain)
    # Whatever the weights, everything else is what it was.
    assert [{k: v for k, v in row.items() if k != "weight"} for row in requests] == bare
    assert {row["weight"] for row in requests} == set(WEIGHTS)


def test_a_column_that_holds_no_numbers_is_refused_by_name(tmp_path):
    rows = clicks()
    path = write(tmp_path / "log.parquet", rows, w=[[1.0]] * len(rows))
    with pytest.raises(DataError, match=r"column 'w' \(events\.weight\) is of type array"):
        build_dataset(config_for(path, weight="w"), tmp_path / "dataset")
    with pytest.raises(DataError, match=r"no column 'v' \(events\.weight\)"):
        build_dataset(config_for(path, weight="v"), tmp_path / "dataset")


def test_another_weight_makes_another_dataset_and_none_leaves_it_as_it_was(tmp_path):
    rows = clicks()
    made = {}
    for name, weight in (("one", 1.0), ("other", 1.0 + 2.0**-40)):
        path = write(tmp_path / f"{name}.parquet", rows, w=[weight] * len(rows))
        made[name] = built(config_for(path, weight="w"), tmp_path / name).manifest
        made[f"{name} without"] = built(config_for(path), tmp_path / f"{name} without").manifest
    assert made["one"].data_version != made["other"].data_version
    assert made["one"].days["2026-03-05"].own != made["other"].days["2026-03-05"].own
    bare, same = made["one without"], made["other without"]
    assert bare.data_version == same.data_version != made["one"].data_version
    assert not bare.weighted
    assert "weight" not in requests_of(built(config_for(path), tmp_path / "bare"))[0]
    # What a dataset is known by does not name a key that is not set.
    assert "weight" not in events_tree(Config.model_validate({"events": {"path": "log"}}))
