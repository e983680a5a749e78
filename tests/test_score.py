"""Scoring in bulk, and what the served model counts."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow_helpers import INT_IDS, make_config, write_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from thawline.cli import app
from thawline.errors import DataError
from thawline.stages import score
from thawline.tracking import scorer
from thawline.tracking.served import ServedRanker

STRANGER = 12345
TYPES = {
    "history": pa.list_(pa.int64()),
    "candidates": pa.list_(pa.int64()),
    "history_action": pa.list_(pa.int8()),
    "history_age": pa.list_(pa.float32()),
    "surface": pa.string(),
    "device": pa.string(),
    "user": pa.int64(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, INT_IDS)
    return folder


@pytest.fixture(scope="module")
def served(model):
    ranker = ServedRanker()
    ranker.load(model)
    return ranker


def requests(count, seed=0):
    """Histories of 0 to 9 items and 0 to 5 candidates, strangers among them."""
    rng = np.random.default_rng(seed)
    picks = [STRANGER, *INT_IDS]
    rows = []
    for index in range(count):
        length = index % 10
        rows.append(
            {
                "history": [picks[i] for i in rng.integers(7, size=length)],
                "candidates": [picks[i] for i in rng.integers(7, size=index % 6)],
                "history_action": rng.integers(1, 4, size=length).tolist(),
                "history_age": [float(age) for age in rng.integers(1, 99, size=length)],
                "surface": ["home", "13", "never seen", None][index % 4],
                "device": "phone",
                "user": 900 + index,
            }
        )
    return pa.table({name: pa.array([row[name] for row in rows], k) for name, k in TYPES.items()})


def scored(config, model, table, folder, **kept):
    pq.write_table(table, folder / "requests.parquet", **kept)
    summary = score.run(config, str(model), folder / "requests.parquet", folder / "scores.parquet")
    return summary, pq.read_table(folder / "scores.parquet")


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path / "work")


def assert_served(served, table, found):
    """Scores in the file are those of the served model, request by request."""
    wanted = served.predict(None, table.to_pandas())
    assert found.num_rows == table.num_rows
    for action in ("save", "click"):
        ours = found.column(f"score_{action}").to_pylist()
        assert [len(own) for own in ours] == [len(own) for own in wanted[action]]
        np.testing.assert_allclose(
            np.concatenate(ours), np.concatenate(wanted[action].to_list()), atol=1e-6
        )


def test_a_file_is_scored_as_the_served_model_scores_it_in_order(config, model, served, tmp_path):
    table = requests(500)
    summary, found = scored(config, model, table, tmp_path, row_group_size=37)
    assert_served(served, table, found)
    assert found.column_names == [
        *("candidates", "surface", "device", "user", "score_save", "score_click"),
        *("unknown_history", "unknown_candidates"),
    ]
    assert found.column("user").to_pylist() == list(range(900, 1400))
    # The model reads the last 6 items of a history.
    strangers = [row.count(STRANGER) for row in table.column("candidates").to_pylist()]
    assert found.column("unknown_candidates").to_pylist() == strangers
    strangers = [row[-6:].count(STRANGER) for row in table.column("history").to_pylist()]
    assert found.column("unknown_history").to_pylist() == strangers
    assert summary.counts["requests"] == 500
    assert summary.counts["candidates"] == 2 * 83 * (5 + 4 + 3 + 2 + 1) / 2 + 0 + 1
    assert summary.counts["unknown_history"] == sum(strangers)
    assert summary.counts["unknown_surface"] == 125
    assert not summary.rejected
    assert json.loads(found.schema.metadata[b"thawline"]) == {
        "model": str(model),
        "data_version": "data-1",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "requests.parquet",
        "scores.parquet",
    ]


def test_a_folder_of_files_is_scored_as_one_whatever_fits_at_once(
    config, model, served, tmp_path, monkeypatch
):
    table = requests(200)
    (tmp_path / "parts").mkdir()
    for number, start in enumerate((0, 70, 140)):
        pq.write_table(table.slice(start, 70), tmp_path / "parts" / f"part-{number}.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "parts" / "part-3.parquet")
    sizes = []
    whole = scorer.Scorer.score

    def watched(self, given):
        sizes.append((len(given), len(given.history.values) + len(given.candidates.values)))
        return whole(self, given)

    monkeypatch.setattr(scorer.Scorer, "score", watched)
    monkeypatch.setattr(score, "ROWS_AT_ONCE", 40)
    monkeypatch.setattr(score, "ITEMS_AT_ONCE", 100)
    score.run(config, str(model), tmp_path / "parts", tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet")
    assert max(rows for rows, _ in sizes) <= 40
    assert 80 < max(items for _, items in sizes) <= 100
    monkeypatch.undo()
    assert_served(served, table, found)


def test_requests_that_cannot_be_scored_lie_beside_with_their_reasons(
    config, model, served, tmp_path
):
    good = requests(60).to_pylist()
    bad = {
        7: {"history": ["5"], "history_action": [1, 2], "history_age": [1.0]},
        20: {"candidates": ["abc", "42"]},
        33: {"history": ["42"], "history_action": [8], "history_age": [1.0]},
        34: {"candidates": None},
        59: {"history": ["42"], "history_action": [1], "history_age": [1.0, 2.0]},
    }
    rows = [row | bad.get(place, {}) for place, row in enumerate(good)]
    types = TYPES | {"history": pa.list_(pa.string()), "candidates": pa.list_(pa.string())}
    for row in rows:
        for name in ("history", "candidates"):
            row[name] = row[name] and [str(item) for item in row[name]]
    table = pa.table({name: pa.array([r[name] for r in rows], k) for name, k in types.items()})
    summary, found = scored(config, model, table, tmp_path)
    kept = [place for place in range(60) if place not in bad]
    assert_served(served, requests(60).take(kept), found)
    assert found.column("user").to_pylist() == [900 + place for place in kept]
    rejected = pq.read_table(tmp_path / "scores.rejected.parquet").to_pylist()
    assert {row["row"]: row["reason"] for row in rejected} == {
        7: "the lists of history_action (2 long) and history (1) differ",
        20: "the column candidates holds no list of int64",
        33: "the column history_action holds 8",
        34: "the column candidates is null",
        59: "the lists of history_age (2 long) and history (1) differ",
    }
    assert [row["user"] for row in rejected] == [900 + place for place in sorted(bad)]
    assert rejected[1]["candidates"] == ["abc", "42"]
    assert dict(summary.rejected) == {"history_action": 2, "candidates": 2, "history_age": 1}
    assert summary.first["candidates"] == "row 20: the column candidates holds no list of int64"
    scored(config, model, requests(3), tmp_path)
    assert not (tmp_path / "scores.rejected.parquet").exists()


def test_columns_of_other_types_mean_the_same(config, model, served, tmp_path):
    table = requests(30)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(INT_IDS * 30, pa.int64()), len(INT_IDS))
    changed = pa.table(
        {
            "history": table.column("history").cast(pa.large_list(pa.int64())),
            "candidates": fixed,
            "surface": pa.array([13.0, None] * 15),
            "device": table.column("device").cast(pa.dictionary(pa.int8(), pa.string())),
        }
    )
    _, found = scored(config, model, changed, tmp_path)
    plain = pa.table(
        {
            "history": table.column("history"),
            "candidates": pa.array([INT_IDS] * 30),
            "surface": pa.array(["13", None] * 15),
            "device": table.column("device"),
        }
    )
    assert_served(served, plain, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop(["candidates"]), "has no column candidates"),
        (lambda table: table.append_column("score_save", table["user"]), "a column score_save"),
        (lambda table: table.set_column(0, "history", table["user"]), "history is of type int64"),
        (lambda t: t.set_column(4, "surface", t["history"]), "surface is of type list"),
        (
            lambda table: table.set_column(1, "candidates", pa.nulls(12, TYPES["candidates"])),
            "not one of the 12 requests .* row 0: the column candidates is null",
        ),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused_and_older_scores_stay(
    config, model, tmp_path, change, message
):
    scored(config, model, requests(2), tmp_path)
    before = (tmp_path / "scores.parquet").read_bytes()
    with pytest.raises(DataError, match=message):
        scored(config, model, change(requests(12)), tmp_path)
    assert (tmp_path / "scores.parquet").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_no_parquet_and_files_of_several_schemas_are_named(config, model, tmp_path):
    out = tmp_path / "scores.parquet"
    with pytest.raises(DataError, match=r"nowhere\.parquet cannot be read as Parquet"):
        score.run(config, str(model), tmp_path / "nowhere.parquet", out)
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match=r"in holds no \*\.parquet"):
        score.run(config, str(model), tmp_path / "in", out)
    pq.write_table(requests(2), tmp_path / "in" / "a.parquet")
    pq.write_table(requests(2).drop(["user"]), tmp_path / "in" / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has other columns than .*a\.parquet"):
        score.run(config, str(model), tmp_path / "in", out)
    assert not out.exists()


def test_a_model_whose_weights_are_nan_scores_nothing(config, tmp_path):
    write_model(tmp_path / "model", INT_IDS)
    file = tmp_path / "model" / "ranker.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(file).items()}, file)
    with pytest.raises(DataError, match=r"scores of rows 0 to 11 hold NaN"):
        scored(config, tmp_path / "model", requests(12), tmp_path)
    assert not (tmp_path / "scores.parquet").exists()


def test_the_command_says_what_it_scored_and_what_it_left_out(model, tmp_path):
    table = requests(12)
    rows = table.to_pylist()
    rows[5]["history_action"] = [9] * 5
    pq.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "requests.parquet")
    arguments = ["--model", str(model), "--input", str(tmp_path / "requests.parquet")]
    asked = CliRunner().invoke(
        app, ["score", *arguments, "--output", str(tmp_path / "scores.parquet")]
    )
    assert asked.exit_code == 0, asked.output
    # 12 requests of 0 to 5 candidates twice over, without the sixth's 5.
    assert "scored: 11 requests, 25 candidates" in asked.output
    assert "rejected: 1 by history_action, such as row 5: the column history_action holds 9" in (
        asked.output
    )
    assert "unknown_surface: 3" in asked.output


# What the served model counts


def test_counts_stand_beside_the_scores_where_they_are_asked_for(served):
    made = pd.DataFrame(
        {"history": [[5, STRANGER, 8], []], "candidates": [[STRANGER, None, 42], [8]]}
    )
    plain = served.predict(None, made)
    counted = served.predict(None, made, {"counts": True})
    assert list(plain.columns) == ["save", "click"]
    assert counted["unknown_history"].tolist() == [1, 0]
    assert counted["unknown_candidates"].tolist() == [2, 0]
    pd.testing.assert_frame_equal(counted[["save", "click"]], plain)


def test_counts_add_up_over_calls_and_reach_the_log(model, monkeypatch, caplog):
    ranker = ServedRanker()
    ranker.load(model)
    made = pd.DataFrame(
        {
            "history": [[5] * 9 + [STRANGER]],
            "candidates": [[STRANGER, 42]],
            "surface": ["never seen"],
        }
    )
    ranker.predict(None, made)
    assert not caplog.records
    monkeypatch.setattr("thawline.tracking.served.SECONDS_BETWEEN_LINES", 0.0)
    ranker.predict(None, made)
    assert dict(ranker.counts) == {
        "requests": 2,
        "history": 12,
        "unknown_history": 2,
        "candidates": 4,
        "unknown_candidates": 2,
        "unknown_surface": 2,
    }
    assert "2 unknown_candidates" in caplog.text
