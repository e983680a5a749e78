"""Figures of requests and users against every order and every pair."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score

from thawline.evaluation import auc, ranking

coarse = st.integers(-4, 4).map(float)
requests = st.lists(
    st.lists(st.tuples(coarse, st.integers(0, 1)), min_size=1, max_size=5), max_size=6
)
Request = list[tuple[float, int]]


def flat(groups: list[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    items = [item for request in groups for item in request]
    owner = np.repeat(np.arange(len(groups)), [len(request) for request in groups])
    return (
        np.array([score for score, _ in items], np.float32),
        np.array([label for _, label in items], np.int8),
        owner,
    )


def over_every_order(groups: list[Request], gain) -> float | None:
    """Mean over requests with a positive of the mean gain of the labels in each sorted order."""
    means = []
    for request in groups:
        if any(label for _, label in request):
            orders = [
                [label for _, label in sorted(order, key=lambda item: -item[0])]
                for order in itertools.permutations(request)
            ]
            means.append(np.mean([gain(labels) for labels in orders]))
    return None if not means else float(np.mean(means))


def same(found: float | None, expected: float | None) -> bool:
    return found == (None if expected is None else pytest.approx(expected, abs=1e-12))


@settings(deadline=None, max_examples=50)
@given(requests, st.integers(1, 4))
def test_hit_ndcg_and_mrr_equal_the_mean_over_every_way_to_break_ties(
    groups: list[Request], k: int
) -> None:
    scores, labels, owner = flat(groups)

    def dcg(labels: list[int]) -> float:
        return sum(label / math.log2(place + 2) for place, label in enumerate(labels[:k]))

    assert same(
        ranking.hit_rate(scores, labels, owner, k),
        over_every_order(groups, lambda labels: float(any(labels[:k]))),
    )
    assert same(
        ranking.ndcg(scores, labels, owner, k),
        over_every_order(groups, lambda labels: dcg(labels) / dcg(sorted(labels, reverse=True))),
    )
    assert same(
        ranking.mrr(scores, labels, owner),
        over_every_order(groups, lambda labels: 1 / (labels.index(1) + 1)),
    )


def test_ndcg_equals_scikit_learn_without_ties() -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=(20, 8)), generator.integers(0, 2, (20, 8))
    labels[:, 0] = 1
    found = ranking.ndcg(scores.ravel(), labels.ravel(), np.repeat(np.arange(20), 8), 5)
    assert found == pytest.approx(ndcg_score(labels, scores, k=5), abs=1e-12)


def test_a_constant_scorer_ranks_as_a_shuffle_does() -> None:
    scores, labels, owner = np.zeros(4), np.array([0, 0, 0, 1]), np.zeros(4, int)
    assert ranking.hit_rate(scores, labels, owner, 1) == pytest.approx(1 / 4)
    assert ranking.mrr(scores, labels, owner) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_requests_need_not_be_sorted() -> None:
    scores, labels, owner = np.array([2, 1, 1, 2]), np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])
    assert ranking.hit_rate(scores, labels, owner, 1) == 0.5
    assert ranking.mrr(scores, labels, owner) == 0.75
    assert auc.group_auc(scores, labels, owner) == 0.5


@settings(deadline=None, max_examples=50)
@given(requests)
def test_the_auc_of_groups_is_the_mean_of_those_that_have_both_classes(
    groups: list[Request],
) -> None:
    scores, labels, owner = flat(groups)
    own = [
        roc_auc_score(labels[owner == group], scores[owner == group])
        for group in range(len(groups))
        if len(set(labels[owner == group])) == 2
    ]
    assert same(auc.group_auc(scores, labels, owner), float(np.mean(own)) if own else None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(coarse, st.integers(0, 1), st.integers(0, 3)), max_size=30))
def test_a_weighted_auc_equals_scikit_learn(items: list[tuple[float, int, int]]) -> None:
    items = [*items, (0.0, 0, 2), (1.0, 1, 1)]
    scores, labels, weight = (np.array(column, float) for column in zip(*items, strict=True))
    expected = roc_auc_score(labels, scores, sample_weight=weight)
    assert auc.auc(scores, labels, weight) == pytest.approx(expected, abs=1e-9)
    ones = np.zeros(len(scores), int)
    assert auc.group_auc(scores, labels, ones, weight) == pytest.approx(expected, abs=1e-9)


def test_a_class_without_weight_leaves_the_auc_undefined() -> None:
    scores, labels = np.array([1.0, 2.0, 3.0]), np.array([0, 1, 1])
    weight = np.array([0.3, 0.0, 0.0])
    assert auc.auc(scores, labels, weight) is None
    assert auc.group_auc(scores, labels, np.zeros(3, int), weight) is None
