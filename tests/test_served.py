import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow_helpers import INT_IDS, STRING_IDS, write_model

from thawline.data.batches import Batch
from thawline.errors import DataError
from thawline.tracking import ids, scorer
from thawline.tracking.served import ServedRanker

ACTIONS = ["save", "click"]


@pytest.fixture(params=[INT_IDS, STRING_IDS], ids=["int", "string"])
def model(request, tmp_path):
    write_model(tmp_path / "model", request.param)
    ranker = ServedRanker()
    ranker.load(tmp_path / "model")
    return ranker, request.param


@pytest.fixture
def int_model(tmp_path):
    write_model(tmp_path / "model", INT_IDS)
    ranker = ServedRanker()
    ranker.load(tmp_path / "model")
    return ranker


def expected(ranker, catalog, request):
    """The probabilities of one request, [candidates, actions], from a batch written by hand."""
    rows = {item: row + 2 for row, item in enumerate(catalog)}
    history = list(request["history"])[-6:]
    actions = list(request.get("history_action", [2] * len(history)))[-6:]
    ages = list(request.get("history_age", [24.0] * len(history)))[-6:]
    context = [
        vocabulary.index(request[name]) + 1 if request.get(name) in vocabulary else 0
        for name, vocabulary in {"surface": ["home", "13"], "device": ["phone"]}.items()
    ]
    padding = [0] * (8 - len(history))
    candidates = [rows.get(item, 1) for item in request["candidates"]]
    batch = Batch(
        request_id=torch.tensor([7]),
        timestamp=torch.tensor([99]),
        history_row=torch.tensor([[rows.get(item, 1) for item in history] + padding]),
        history_action=torch.tensor([actions + padding]),
        history_age=torch.tensor([list(ages) + padding], dtype=torch.float32),
        candidate_row=torch.tensor([candidates]),
        candidate_mask=torch.ones(1, len(candidates), dtype=torch.bool),
        candidate_log_q=torch.zeros(1, len(candidates)),
        labels=torch.zeros(1, len(candidates), 2),
        context=torch.tensor([context]),
        oracle=None,
    )
    return ranker.bundle.score(batch)[0].double().sigmoid().numpy()


def requests(catalog, count, seed=0):
    """Requests of every kind: no history, one longer than the model's, few and many candidates."""
    rng = np.random.default_rng(seed)
    unknown = type(catalog[0])(12345)
    made = []
    for index in range(count):
        length = [0, 1, 6, 7, 30][index % 5]
        picks = [unknown, *catalog]
        made.append(
            {
                "history": [picks[i] for i in rng.integers(len(picks), size=length)],
                "candidates": [picks[i] for i in rng.integers(len(picks), size=1 + 3 * index)],
                "history_action": rng.integers(1, 4, size=length).tolist(),
                "history_age": np.sort(rng.exponential(50, size=length))[::-1].tolist(),
                "surface": ["home", "13", "never seen"][index % 3],
                "device": "phone",
            }
        )
    return made


@pytest.mark.parametrize("count", [1, 2, 7])
def test_batches_of_any_size_score_as_each_request_alone(model, count):
    ranker, catalog = model
    made = requests(catalog, count)
    scores = ranker.predict(None, pd.DataFrame(made))
    assert list(scores.columns) == ACTIONS
    for row, request in enumerate(made):
        found = np.array([scores[action][row] for action in ACTIONS]).T
        np.testing.assert_allclose(found, expected(ranker, catalog, request), atol=1e-6)
    assert np.std(np.concatenate(scores["save"].to_list())) > 0.01 or count == 1


def test_ten_thousand_requests_score_as_few(int_model):
    few = pd.DataFrame(requests(INT_IDS, 8))
    rng = np.random.default_rng(1)
    picked = rng.integers(8, size=10_000)
    many = few.iloc[picked].reset_index(drop=True)
    wanted = int_model.predict(None, few)
    found = int_model.predict(None, many)
    for action in ACTIONS:
        np.testing.assert_allclose(
            np.concatenate(found[action].to_list()),
            np.concatenate([wanted[action][place] for place in picked]),
            atol=1e-6,
        )


def test_only_history_and_candidates_are_needed(model):
    ranker, catalog = model
    made = [{"history": catalog[:2], "candidates": catalog}]
    scores = ranker.predict(None, pd.DataFrame(made))
    np.testing.assert_allclose(
        scores["click"][0], expected(ranker, catalog, made[0])[:, 1], atol=1e-6
    )


def test_a_longer_history_than_the_models_counts_by_its_newest_items(int_model):
    long = {"history": INT_IDS[::-1] * 20 + INT_IDS, "candidates": INT_IDS}
    short = {"history": INT_IDS, "candidates": INT_IDS}
    scores = int_model.predict(None, pd.DataFrame([long, short]))
    assert scores["save"][0] == scores["save"][1]


def test_unknown_and_null_items_score_as_the_row_for_unknown_items(model):
    ranker, catalog = model
    unknown = type(catalog[0])(987654)
    made = [{"history": catalog[:1], "candidates": [unknown, None, catalog[0]]}]
    scores = ranker.predict(None, pd.DataFrame(made))["save"][0]
    assert scores[0] == scores[1] != scores[2]
    np.testing.assert_allclose(scores, expected(ranker, catalog, made[0])[:, 0], atol=1e-6)


def test_memory_is_bounded_by_cutting_many_candidates_and_many_requests(int_model, monkeypatch):
    made = pd.DataFrame(requests(INT_IDS, 12))
    whole = int_model.predict(None, made)
    monkeypatch.setattr(scorer, "CANDIDATES_AT_ONCE", 10)
    monkeypatch.setattr(scorer, "REQUESTS_AT_ONCE", 3)
    sizes = []
    score = type(int_model.bundle).score

    def watched(bundle, batch):
        sizes.append((len(batch), batch.candidate_row.numel()))
        return score(bundle, batch)

    monkeypatch.setattr(type(int_model.bundle), "score", watched)
    cut = int_model.predict(None, made)
    assert max(requests for requests, _ in sizes) <= 3
    assert max(slots for _, slots in sizes) <= 10
    for action in ACTIONS:
        np.testing.assert_allclose(
            np.concatenate(whole[action].to_list()),
            np.concatenate(cut[action].to_list()),
            atol=1e-6,
        )


def test_context_values_compare_as_text_and_missing_ones_are_missing(int_model):
    def score(values):
        made = pd.DataFrame({"history": [[5]] * len(values), "candidates": [[42]] * len(values)})
        return int_model.predict(None, made.assign(surface=values))["save"].to_list()

    assert score([13, 13]) == score(["13", "13"]) == score([13.0, 13.0])
    assert score([13.0, math.nan]) == score(["13", None]) == score(["13", "never seen"])
    assert score(["13", "home"])[1] != score(["13", None])[1]


def test_ages_that_are_not_known_count_as_a_day_and_negative_ones_as_now(int_model):
    def score(age):
        made = {"history": [[5, 8]], "candidates": [[42]], "history_age": [[age, 1.0]]}
        return int_model.predict(None, pd.DataFrame(made))["save"][0]

    assert score(math.nan) == score(None) == score(24.0)
    assert score(-3.0) == score(0.0) != score(24.0)


def test_requests_without_candidates_and_tables_without_requests_give_nothing(int_model):
    made = pd.DataFrame({"history": [[5], None], "candidates": [[], [42]]}, index=[30, 10])
    scores = int_model.predict(None, made)
    assert scores.index.tolist() == [30, 10]
    assert scores["save"][30] == []
    assert len(scores["save"][10]) == 1
    empty = int_model.predict(None, made.iloc[:0])
    assert (list(empty.columns), len(empty)) == (ACTIONS, 0)


def test_arrays_from_parquet_are_read_like_lists(int_model):
    made = pd.DataFrame(requests(INT_IDS, 5))
    from_parquet = pa.Table.from_pandas(made).to_pandas()
    assert isinstance(from_parquet["history"][0], np.ndarray)
    pd.testing.assert_frame_equal(
        int_model.predict(None, made), int_model.predict(None, from_parquet)
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"history": [["a"], [5]]}, "the column history cannot be read as lists of int64"),
        ({"candidates": [[5], 7]}, "the column candidates cannot be read as lists of int64"),
        ({"candidates": [[5], [2**70]]}, "the column candidates cannot be read"),
        ({"history_action": [[1], [1]]}, r"history_action \(1 long\) and history \(2\).*row 1"),
        ({"history_action": [[1], [1, 4]]}, "history_action holds 4 in row 1"),
        ({"history_action": [[-1], [1, 1]]}, "history_action holds -1 in row 0"),
        ({"history_age": [["old"], [1.0, 1.0]]}, "history_age cannot be read as lists of double"),
    ],
)
def test_a_wrong_value_is_refused_by_column(int_model, changed, message):
    made = {"history": [[5], [5, 8]], "candidates": [[42], [42]], **changed}
    with pytest.raises(DataError, match=message):
        int_model.predict(None, pd.DataFrame(made))


def test_a_missing_column_is_named(int_model):
    with pytest.raises(DataError, match="the column candidates is missing"):
        int_model.predict(None, pd.DataFrame({"history": [[5]]}))


def test_ids_are_found_even_where_all_their_keys_collide(monkeypatch):
    monkeypatch.setattr(ids, "_keys", lambda array: np.zeros(len(array), np.uint64))
    index = ids.ItemIndex(pa.array(["a", "b", "c"]))
    assert index.rows(pa.array(["c", None, "a", "z", "b"])).tolist() == [4, 1, 2, 1, 3]


def test_many_ids_are_found_in_any_order():
    rng = np.random.default_rng(0)
    numbers = rng.choice(10**12, size=5000, replace=False) - 10**11
    for catalog in (pa.array(numbers), pa.array([f"item-{n}" for n in numbers])):
        order = rng.permutation(5000)
        found = ids.ItemIndex(catalog).rows(catalog.take(pa.array(order)))
        assert found.tolist() == (order + 2).tolist()


def test_an_empty_catalog_knows_nothing():
    assert ids.ItemIndex(pa.array([], pa.int64())).rows(pa.array([1, 2])).tolist() == [1, 1]
