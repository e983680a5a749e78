"""The points of a ROC curve and the bins of a reliability curve."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from thawline.evaluation import auc, calibration

# Halves from -4 to 4: exact in float32, and ties are common.
pairs = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda step: step / 2), st.integers(0, 1)), max_size=40
)


def split(items: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([score for score, _ in items], np.float32),
        np.array([label for _, label in items], np.int8),
    )


@settings(deadline=None, max_examples=60)
@given(pairs, st.integers(2, 12))
def test_roc_points_are_corners_of_the_exact_curve(
    items: list[tuple[float, int]], points: int
) -> None:
    scores, labels = split([*items, (0.0, 0), (0.5, 1)])
    curve = auc.roc_curve_points(scores, labels, points)
    assert curve is not None
    found = list(zip(curve["fpr"], curve["tpr"], strict=True))
    fpr, tpr, thresholds = roc_curve(labels, scores, drop_intermediate=False)
    exact = {(f, t): s for f, t, s in zip(fpr, tpr, thresholds, strict=True)}
    assert set(found) <= set(exact)
    assert all(
        exact[corner] == s for corner, s in zip(found[1:], curve["threshold"][1:], strict=True)
    )
    assert (found[0], found[-1], curve["threshold"][0]) == ((0, 0), (1, 1), 1.0)
    assert found == sorted(found)
    assert len(found) <= points + 1


def test_the_area_under_a_thinned_roc_is_close_to_the_auc() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 20_000)
    scores = generator.normal(size=20_000) + labels
    curve = auc.roc_curve_points(scores, labels)
    assert curve is not None
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(
        roc_auc_score(labels, scores), abs=1e-3
    )


def test_reliability_bins_hold_equally_many_candidates() -> None:
    found = calibration.reliability(np.array([0.4, 0.1, 0.3, 0.2]), np.array([1, 0, 1, 0]), bins=2)
    assert found == [
        {"predicted": pytest.approx(0.15), "observed": 0.0, "candidates": 2},
        {"predicted": pytest.approx(0.35), "observed": 1.0, "candidates": 2},
    ]


@given(pairs.filter(bool), st.integers(1, 6))
def test_reliability_never_splits_ties_and_loses_nobody(
    items: list[tuple[float, int]], bins: int
) -> None:
    scores, labels = split(items)
    found = calibration.reliability(scores, labels, bins)
    assert len(found) <= bins
    assert sum(item["candidates"] for item in found) == len(items)
    positives = sum(item["observed"] * item["candidates"] for item in found)
    assert positives == pytest.approx(labels.sum())
    predicted = [item["predicted"] for item in found]
    assert predicted == sorted(set(predicted))
    if len(set(scores.tolist())) == 1:
        assert len(found) == 1


def test_weights_move_the_curves_as_copies_would() -> None:
    probability, labels = np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 1, 0, 1])
    weight = np.array([1, 3, 2, 1])
    copies = np.repeat(np.arange(4), weight)
    curve = auc.roc_curve_points(probability, labels, weight=weight.astype(float))
    assert curve == auc.roc_curve_points(probability[copies], labels[copies])
    found = calibration.reliability(probability, labels, 1, weight.astype(float))
    # (0.1 + 1.2 + 0.7 + 0.8) / 7, and 4 of 7.
    assert found == [
        {"predicted": pytest.approx(0.4), "observed": pytest.approx(4 / 7), "candidates": 4}
    ]
