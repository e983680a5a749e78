import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss

from thawline.evaluation import calibration

items = st.lists(
    st.tuples(st.floats(-6, 6), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=30
)


def columns(drawn: list[tuple[float, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits, labels, weight = (np.array(column, float) for column in zip(*drawn, strict=True))
    return logits, labels, weight


@settings(deadline=None)
@given(items)
def test_a_weighted_log_loss_equals_scikit_learn(drawn: list[tuple[float, int, int]]) -> None:
    logits, labels, weight = columns([*drawn, (0.5, 1, 1)])
    probability = 1 / (1 + np.exp(-logits))
    expected = sklearn_log_loss(labels, probability, labels=[0, 1], sample_weight=weight)
    assert calibration.log_loss(logits, labels, weight) == pytest.approx(expected, abs=1e-9)


def test_always_predicting_the_rate_has_an_entropy_of_one() -> None:
    # 1 of 4, and log(1/3) is the logit of 1/4.
    logits, labels = np.full(4, math.log(1 / 3)), np.array([1, 0, 0, 0])
    assert calibration.normalized_entropy(logits, labels) == pytest.approx(1.0)
    assert calibration.calibration_ratio(logits, labels) == pytest.approx(1.0)
    assert calibration.expected_calibration_error(logits, labels) == pytest.approx(0.0)


def test_promising_twice_the_rate_shows_in_ratio_and_error() -> None:
    logits, labels = np.zeros(4), np.array([1, 0, 0, 0])
    assert calibration.calibration_ratio(logits, labels) == 2.0
    assert calibration.expected_calibration_error(logits, labels) == 0.25
    # log 2 over the entropy of 1/4.
    assert calibration.normalized_entropy(logits, labels) == pytest.approx(0.693147 / 0.562335)
    # With 3 of 6 positive by weight, one half is right.
    weight = np.array([3, 1, 1, 1])
    assert calibration.calibration_ratio(logits, labels, weight) == pytest.approx(1.0)
    assert calibration.normalized_entropy(logits, labels, weight) == pytest.approx(1.0)


def test_figures_that_one_class_leaves_undefined_are_none() -> None:
    logits = np.array([0.0, 1.0])
    assert calibration.normalized_entropy(logits, np.zeros(2)) is None
    assert calibration.normalized_entropy(logits, np.ones(2)) is None
    assert calibration.calibration_ratio(logits, np.zeros(2)) is None
    assert calibration.calibration_ratio(logits, np.ones(2)) == pytest.approx((0.5 + 0.731059) / 2)
    nothing = np.empty(0)
    assert calibration.expected_calibration_error(nothing, nothing) is None
    assert calibration.normalized_entropy(nothing, nothing) is None
    assert calibration.log_loss(logits, np.ones(2), np.zeros(2)) is None
    assert calibration.expected_calibration_error(logits, np.ones(2), np.zeros(2)) is None


@settings(deadline=None)
@given(items, st.integers(1, 8))
def test_a_weight_bins_a_candidate_as_so_many_copies_of_it(
    drawn: list[tuple[float, int, int]], bins: int
) -> None:
    logits, labels, weight = columns(drawn)
    copies = np.repeat(np.arange(len(logits)), weight.astype(int))
    found = calibration.expected_calibration_error(logits, labels, weight, bins)
    expected = calibration.expected_calibration_error(logits[copies], labels[copies], bins=bins)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))
    probability = calibration.sigmoid(logits)
    curve = calibration.reliability(probability, labels, bins, weight)
    of_copies = calibration.reliability(probability[copies], labels[copies], bins)
    assert [(each["predicted"], each["observed"]) for each in curve] == [
        (pytest.approx(each["predicted"]), pytest.approx(each["observed"])) for each in of_copies
    ]


@settings(deadline=None)
@given(items, st.integers(1, 8))
def test_the_calibration_error_is_the_mean_gap_of_the_reliability_bins(
    drawn: list[tuple[float, int, int]], bins: int
) -> None:
    logits, labels, _ = columns(drawn)
    curve = calibration.reliability(calibration.sigmoid(logits), labels, bins)
    gaps = [item["candidates"] * abs(item["predicted"] - item["observed"]) for item in curve]
    found = calibration.expected_calibration_error(logits, labels, bins=bins)
    assert found == pytest.approx(sum(gaps) / len(logits), abs=1e-12)
    # However it is binned, the gaps do not fall below that of everything in one bin.
    assert found >= abs(calibration.sigmoid(logits).mean() - labels.mean()) - 1e-12
