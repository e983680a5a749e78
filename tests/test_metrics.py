import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from thawline.data.manifest import TIERS
from thawline.errors import DataError, TrainingError
from thawline.evaluation import auc, calibration, metrics
from thawline.evaluation.scored import Scored, empty

# Halves from -4 to 4: exact in float32, and ties are common.
coarse = st.integers(-8, 8).map(lambda step: step / 2)
weights = st.floats(0.001, 1e4)
pairs = st.lists(st.tuples(coarse, st.integers(0, 1)), max_size=40)


def scored(
    candidates: list[list[tuple[int, float, int]]], oracle: list[float] | None = None
) -> Scored:
    """One action; a request is a list of (row, logit, label)."""
    flat = [item for request in candidates for item in request]
    sizes = [len(request) for request in candidates]
    return Scored(
        actions=["save"],
        request_id=np.arange(100, 100 + len(candidates)),
        timestamp=np.zeros(len(candidates), np.int64),
        offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        row=np.array([row for row, _, _ in flat], np.int64),
        labels=np.array([[label] for _, _, label in flat], np.int8).reshape(-1, 1),
        logits=np.array([[logit] for _, logit, _ in flat], np.float32).reshape(-1, 1),
        oracle=None if oracle is None else np.array(oracle, np.float32)[:, None],
    )


def split(items: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([score for score, _ in items], np.float32),
        np.array([label for _, label in items], np.int8),
    )


def auc_by_pairs(scores: np.ndarray, labels: np.ndarray) -> float | None:
    positives, negatives = scores[labels == 1], scores[labels == 0]
    if not len(positives) or not len(negatives):
        return None
    won = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
    return sum(won) / len(won)


@settings(deadline=None)
@given(pairs)
def test_auc_equals_counting_every_pair(items: list[tuple[float, int]]) -> None:
    scores, labels = split(items)
    expected = auc_by_pairs(scores, labels)
    found = auc.auc(scores, labels)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


@settings(deadline=None)
@given(pairs)
def test_auc_equals_scikit_learn(items: list[tuple[float, int]]) -> None:
    scores, labels = split([*items, (0.0, 0), (0.5, 1)])
    assert auc.auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(coarse, st.integers(0, 1), weights), max_size=40))
def test_a_weighted_auc_equals_scikit_learn(items: list[tuple[float, int, float]]) -> None:
    items = [*items, (0.0, 0, 0.25), (0.5, 1, 3.0)]
    scores, labels = split([(score, label) for score, label, _ in items])
    weight = np.array([own for _, _, own in items])
    expected = roc_auc_score(labels, scores, sample_weight=weight)
    assert auc.auc(scores, labels, weight) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.lists(st.tuples(coarse, st.integers(0, 1)), min_size=1, max_size=4), weights),
        min_size=1,
        max_size=12,
    )
)
def test_the_figures_of_weighted_requests_equal_scikit_learn(drawn: Any) -> None:
    requests = [[(2, logit, label) for logit, label in candidates] for candidates, _ in drawn]
    weight = np.array([own for _, own in drawn])
    some = replace(scored(requests), weight=weight)
    found = metrics.holdout_metrics(some, ONE_OF_EACH, hit_at=3)["pooled"]["save"]
    labels, each = some.labels[:, 0], np.repeat(weight, [len(one) for one in requests])
    probability = calibration.sigmoid(some.logits[:, 0])
    loss = sklearn_log_loss(labels, probability, labels=[0, 1], sample_weight=each)
    assert found["log_loss"] == pytest.approx(loss, abs=1e-9)
    if len(set(labels.tolist())) == 2:
        expected = roc_auc_score(labels, probability, sample_weight=each)
        assert found["auc"] == pytest.approx(expected, abs=1e-9)


def test_auc_of_one_class_is_undefined() -> None:
    assert auc.auc(np.array([1.0, 2.0]), np.array([1, 1])) is None
    assert auc.auc(np.array([1.0, 2.0]), np.array([0, 0])) is None
    assert auc.auc(np.array([]), np.array([])) is None


def test_auc_of_a_constant_scorer_is_one_half() -> None:
    assert auc.auc(np.zeros(5), np.array([1, 0, 0, 0, 0])) == 0.5


@settings(deadline=None)
@given(pairs.filter(bool))
def test_log_loss_equals_scikit_learn(items: list[tuple[float, int]]) -> None:
    logits, labels = split(items)
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = sklearn_log_loss(labels, probability, labels=[0, 1])
    assert calibration.log_loss(logits, labels) == pytest.approx(expected, abs=1e-9)


def test_log_loss_of_sure_predictions_neither_overflows_nor_rounds() -> None:
    assert calibration.log_loss(np.array([1000.0]), np.array([0])) == 1000.0
    assert calibration.log_loss(np.array([-1000.0]), np.array([1])) == 1000.0
    assert calibration.log_loss(np.array([40.0]), np.array([1])) == pytest.approx(math.exp(-40))


def test_log_loss_of_nothing_is_undefined() -> None:
    assert calibration.log_loss(np.array([]), np.array([])) is None


# Rows 2, 3, 4, 5 are head, torso, tail, cold; row 1 is an item that the catalog does not know.
ONE_OF_EACH = np.array([0, 1, 2, 3], np.int8)


def test_tiers_slice_the_candidates_by_their_item() -> None:
    # Head: positives 2.0 and -1.0 against the negative 0.0: one pair of two is won.
    # Torso: a tie. Tail: negatives only. Cold (row 5 and the unknown row 1): a lost pair.
    tree = metrics.holdout_metrics(
        scored(
            [
                [(2, 2.0, 1), (2, 0.0, 0), (3, 1.0, 1), (5, -2.0, 1)],
                [(2, -1.0, 1), (3, 1.0, 0), (4, 3.0, 0), (1, 0.0, 0)],
            ]
        ),
        ONE_OF_EACH,
        hit_at=1,
    )
    tiers = {name: tree["tiers"][name]["save"] for name in TIERS}
    assert [tiers[name]["auc"] for name in TIERS] == [0.5, 0.5, None, 0.0]
    assert [tiers[name]["candidates"] for name in TIERS] == [3, 2, 1, 2]
    assert [tiers[name]["positives"] for name in TIERS] == [2, 1, 0, 1]
    # Alone in its request's slice, a positive is first.
    assert [tiers[name]["hit@1"] for name in TIERS] == [1.0, 1.0, None, 1.0]
    # Mean of log(1 + e^-2), log 2 and log(1 + e).
    assert tiers["head"]["log_loss"] == pytest.approx(
        (0.126928 + 0.693147 + 1.313262) / 3, abs=1e-6
    )
    assert tiers["tail"]["log_loss"] == pytest.approx(3.048587, abs=1e-6)
    # Pooled: 4 positives, 4 negatives (0, 1, 3, 0). 2.0 beats three, 1.0 beats two and ties one,
    # -1.0 and -2.0 beat none: 5.5 of 16. The first request's best is positive, the second's not.
    assert tree["pooled"]["save"]["auc"] == 5.5 / 16
    assert tree["pooled"]["save"]["hit@1"] == 0.5
    assert (tree["requests"], tree["oracle"], tree["trivial"]) == (2, None, {})


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(coarse, st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=40))
def test_each_slice_equals_scikit_learn_on_that_slice(items: list[tuple[float, int, int]]) -> None:
    tree = metrics.holdout_metrics(
        scored([[(row, logit, label)] for logit, label, row in items]), ONE_OF_EACH, hit_at=3
    )
    for code, name in enumerate(TIERS):
        rows = {code + 2} | ({1} if name == "cold" else set())
        here = [(logit, label) for logit, label, row in items if row in rows]
        scores, labels = split(here)
        found = tree["tiers"][name]["save"]
        if len(set(labels.tolist())) == 2:
            assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)
        else:
            assert found["auc"] is None
        assert (found["positives"], found["candidates"]) == (labels.sum(), len(labels))


def test_the_oracle_is_scored_by_its_probabilities() -> None:
    tree = metrics.holdout_metrics(
        scored([[(2, 0.0, 1), (3, 5.0, 0)]], oracle=[0.8, 0.1]), ONE_OF_EACH, hit_at=1
    )
    oracle = tree["oracle"]["save"]
    assert (oracle["auc"], oracle["hit@1"]) == (1.0, 1.0)
    assert oracle["log_loss"] == pytest.approx(-(math.log(0.8) + math.log(0.9)) / 2, abs=1e-6)
    assert tree["pooled"]["save"]["auc"] == 0.0


def test_an_oracle_that_does_not_know_every_candidate_is_not_reported() -> None:
    partly = scored([[(2, 0.0, 1), (3, 5.0, 0)]], oracle=[0.8, math.nan])
    assert metrics.holdout_metrics(partly, ONE_OF_EACH, hit_at=1)["oracle"] is None
    assert metrics.holdout_curves(partly)["save"]["oracle_roc"] is None


def test_an_oracle_that_is_sure_and_wrong_has_a_finite_loss() -> None:
    tree = metrics.holdout_metrics(
        scored([[(2, 0.0, 1), (3, 5.0, 0)]], oracle=[0.0, 0.5]), ONE_OF_EACH, hit_at=1
    )
    assert math.isfinite(tree["oracle"]["save"]["log_loss"])


def test_trivial_scorers_are_scored_on_the_primary_action() -> None:
    tree = metrics.holdout_metrics(
        scored([[(2, 0.0, 1), (3, 5.0, 0)]]),
        ONE_OF_EACH,
        hit_at=1,
        trivial={"up": np.array([2.0, 1.0]), "flat": np.array([1.0, 1.0])},
    )
    assert tree["trivial"] == {"up": 1.0, "flat": 0.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_an_error_that_names_the_request(value: float) -> None:
    bad = scored([[(2, 0.0, 1)], [(2, 0.0, 1), (3, value, 0)]])
    with pytest.raises(TrainingError, match=r"save score .* request_id 101, candidate row 3"):
        metrics.holdout_metrics(bad, ONE_OF_EACH, hit_at=3)
    with pytest.raises(TrainingError, match="request_id 101"):
        metrics.holdout_curves(bad)


def test_unusable_inputs_are_named() -> None:
    good = scored([[(2, 0.0, 1), (3, 1.0, 0)]])

    def check(match: str, value: Scored, **options: Any) -> None:
        with pytest.raises(DataError, match=match):
            metrics.holdout_metrics(value, ONE_OF_EACH, hit_at=3, **options)

    check("label_save", scored([[(2, 0.0, 2)]]))
    check("oracle_save", scored([[(2, 0.0, 1)]], oracle=[1.5]))
    check("row 6 is beyond the catalog's last row 5", scored([[(6, 0.0, 1)]]))
    check("item_age gave NaN for request_id 100", good, trivial={"item_age": np.array([0, np.nan])})
    check("item_age gave 1 scores for 2", good, trivial={"item_age": np.array([0.0])})


def test_a_hold_out_without_requests_has_nothing_but_undefined_figures() -> None:
    tree = metrics.holdout_metrics(empty(["save"]), ONE_OF_EACH, hit_at=3)
    undefined = ("auc", "user_auc", "request_auc", "log_loss", "normalized_entropy")
    undefined += ("calibration", "ece", "hit@3", "ndcg@3", "mrr", "positive_logit")
    nothing = dict.fromkeys(undefined) | {"positives": 0, "candidates": 0}
    assert tree["requests"] == 0
    assert tree["pooled"] == {"save": nothing}
    assert tree["tiers"] == {name: {"save": nothing} for name in TIERS}
    assert metrics.holdout_curves(empty(["save"]))["save"] == {
        "roc": None,
        "oracle_roc": None,
        "reliability": [],
    }


def test_trees_and_curves_are_json() -> None:
    some = scored([[(2, 0.0, 1), (4, 1.0, 0)]], oracle=[0.5, 0.5])
    tree = metrics.holdout_metrics(some, ONE_OF_EACH, hit_at=3, trivial={"a": np.zeros(2)})
    tree |= {"curves": metrics.holdout_curves(some)}
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree


def test_the_mean_logit_of_positives_is_that_of_a_slices_own_and_follows_weights() -> None:
    # Rows 2 to 5 are head, torso, tail and cold.
    some = scored([[(2, 1.0, 1), (5, -6.0, 1), (2, 9.0, 0)], [(2, 2.0, 1), (5, -5.0, 0)]])
    tree = metrics.holdout_metrics(some, ONE_OF_EACH, hit_at=3)
    assert tree["pooled"]["save"]["positive_logit"] == pytest.approx((1.0 - 6.0 + 2.0) / 3)
    by_tier = {name: own["save"]["positive_logit"] for name, own in tree["tiers"].items()}
    assert by_tier == {"head": 1.5, "torso": None, "tail": None, "cold": -6.0}
    heavy = metrics.holdout_metrics(
        replace(some, weight=np.array([1.0, 3.0])), ONE_OF_EACH, hit_at=3
    )
    assert heavy["tiers"]["head"]["save"]["positive_logit"] == pytest.approx((1.0 + 3 * 2.0) / 4)
