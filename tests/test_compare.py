"""Paired comparisons against a brute-force bootstrap: every user's candidates copied out."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from thawline.errors import DataError, TrainingError
from thawline.evaluation import compare
from thawline.evaluation.compare import Sides, comparison, measure
from thawline.evaluation.intervals import draws, figure_names
from thawline.evaluation.metrics import holdout_metrics
from thawline.evaluation.scored import Scored


def sides(requests=120, users=30, seed=0, *, better=0.0, actions=("save", "click")):
    """Requests of 1 to 6 candidates; the first model adds less noise to the truth by `better`."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 7, requests)
    shape = (int(sizes.sum()), len(actions))
    truth = generator.normal(size=shape)
    noise = generator.normal(size=(2, *shape))
    scored = Scored(
        actions=list(actions),
        request_id=np.arange(requests),
        timestamp=np.zeros(requests, np.int64),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        row=np.full(shape[0], 2),
        labels=(generator.random(shape) < 1 / (1 + np.exp(-truth))).astype(np.int8),
        logits=(truth + (1 - better) * noise[0]).round(2).astype(np.float32),
        oracle=None,
        user_id=pa.array(generator.integers(0, users, requests)),
    )
    tier = generator.integers(0, 4, shape[0]).astype(np.int8)
    return Sides(scored, tier, (truth + noise[1]).round(2).astype(np.float32))


def copied(scored, counts):
    """The candidates of every user as often as drawn, int64."""
    often = counts[scored.user][scored.request_index].astype(int)
    return np.repeat(np.arange(scored.num_candidates), often)


def by_hand(scored, logits, tier, slice_name, chosen):
    """AUC, log loss and calibration of the copies of a slice, by scikit-learn and means."""
    if slice_name != "pooled":
        chosen = chosen[tier[chosen] == compare.TIERS.index(slice_name)]
    labels, scores = scored.labels[chosen, 0], logits[chosen, 0].astype(float)
    probability = 1 / (1 + np.exp(-scores))
    if len(set(labels.tolist())) < 2:
        return None
    return {
        "auc": roc_auc_score(labels, scores),
        "log_loss": log_loss(labels, probability),
        "calibration": probability.mean() / labels.mean(),
    }


def test_differences_and_intervals_are_those_of_copied_users():
    both = sides(actions=("save",))
    found = measure(both, hit_at=3, resamples=60, seed=5)
    scored = both.scored
    everybody = np.arange(scored.num_candidates)
    for name in ("pooled", "torso"):
        one = by_hand(scored, scored.logits, both.tier, name, everybody)
        two = by_hand(scored, both.other, both.tier, name, everybody)
        resampled = {figure: [] for figure in one}
        for block in draws(scored.num_users, 60, 5):
            for counts in block:
                chosen = copied(scored, counts)
                left = by_hand(scored, scored.logits, both.tier, name, chosen)
                right = by_hand(scored, both.other, both.tier, name, chosen)
                for figure in one:
                    resampled[figure].append(left[figure] - right[figure])
        for figure in one:
            own = found["save", name, figure]
            assert own.value == pytest.approx(one[figure], abs=1e-9)
            assert own.difference == pytest.approx(one[figure] - two[figure], abs=1e-9)
            for confidence in (0.95, 0.8):
                ends = np.quantile(
                    resampled[figure], [(1 - confidence) / 2, 1 - (1 - confidence) / 2]
                )
                np.testing.assert_allclose(own.difference_interval(confidence), ends, atol=1e-9)
            assert own.smallest_effect == pytest.approx(
                2.8 * np.std(resampled[figure], ddof=1), abs=1e-9
            )


def test_every_figure_equals_that_of_the_metrics():
    both = sides()
    found = measure(both, hit_at=3, resamples=10)
    for side, logits in enumerate([both.scored.logits, both.other]):
        tree = holdout_metrics(
            replace(both.scored, logits=logits, row=2 + both.tier),
            np.arange(4, dtype=np.int8),
            hit_at=3,
        )
        for (action, name, figure), own in found.items():
            metrics = tree["pooled"] if name == "pooled" else tree["tiers"][name]
            assert own.values[side] == metrics[action][figure]
    assert {figure for _, _, figure in found} == set(figure_names(3))
    assert len(found) == 2 * 5 * len(figure_names(3))


def test_the_same_model_twice_differs_by_nothing():
    both = sides(600, 60)
    found = measure(replace(both, other=both.scored.logits), hit_at=3, resamples=50)
    for own in found.values():
        assert own.difference == 0
        assert own.difference_interval(0.95) == (0, 0)
        assert own.smallest_effect == 0


def test_a_better_model_is_seen_and_the_sign_is_challenger_minus_champion():
    found = measure(sides(1_500, 300, better=0.5), hit_at=3, resamples=300)
    low, high = found["save", "pooled", "auc"].difference_interval(0.95)
    assert 0 < low < found["save", "pooled", "auc"].difference < high
    assert found["save", "pooled", "log_loss"].difference_interval(0.95)[1] < 0


def test_pairing_shows_far_smaller_effects_than_two_samples_would():
    both = sides(600, 100)
    nearly = both.scored.logits + np.float32(0.01) * both.other
    found = measure(replace(both, other=nearly), hit_at=3, resamples=300)
    own = found["save", "pooled", "auc"]
    low, high = own.interval(0.95)
    assert own.smallest_effect < (high - low) / 20


@pytest.mark.parametrize("label", [0, 1])
def test_a_slice_of_one_class_is_undefined_and_has_no_interval(label):
    both = sides()
    labels = both.scored.labels.copy()
    labels[both.tier == 3] = label
    both = replace(both, scored=replace(both.scored, labels=labels))
    own = measure(both, hit_at=3, resamples=50)["save", "cold", "auc"]
    assert own.value is own.difference is own.smallest_effect is None
    assert own.interval(0.95) is own.difference_interval(0.95) is None
    assert own.positives == label * own.candidates


def test_a_figure_that_many_resamples_leave_undefined_has_no_interval():
    both = sides()
    labels = np.zeros_like(both.scored.labels)
    labels[5] = 1
    own = measure(
        replace(both, scored=replace(both.scored, labels=labels)), hit_at=3, resamples=100
    )["save", "pooled", "auc"]
    # One user has the positive: more than a third of the resamples lack it.
    assert own.value is not None
    assert own.interval(0.95) is own.difference_interval(0.95) is own.smallest_effect is None


@pytest.mark.parametrize(("users", "enough"), [(1, False), (19, False), (20, True)])
def test_fewer_than_20_users_with_positives_are_too_few_for_an_interval(users, enough):
    own = measure(sides(400, users), hit_at=3, resamples=50)["save", "pooled", "auc"]
    assert own.difference is not None
    assert (own.difference_interval(0.95) is not None) is enough
    assert (own.smallest_effect is not None) is enough


def test_one_model_alone_has_intervals_and_no_difference():
    both = sides()
    own = measure(replace(both, other=None), hit_at=3, resamples=50)["save", "pooled", "auc"]
    low, high = own.interval(0.95)
    assert low < own.value < high
    assert own.other is own.difference is own.smallest_effect is None
    assert own.difference_interval(0.95) is None


def test_many_users_are_drawn_in_groups_and_vary_alike(monkeypatch):
    both = sides(6_000, 3_000)
    whole = measure(both, hit_at=3, resamples=400, slices=["pooled"])
    monkeypatch.setattr(compare, "MOST_GROUPS", 500)
    folded = measure(both, hit_at=3, resamples=400, slices=["pooled"])
    for key, own in whole.items():
        assert folded[key].values == own.values
        # Of 400 resamples, a standard error is known to 3.5 %.
        assert folded[key].smallest_effect == pytest.approx(own.smallest_effect, rel=0.2)


def test_the_rows_of_a_comparison_are_json_and_name_both_sides():
    both = sides()
    rows = comparison(measure(both, hit_at=3, resamples=50), both.scored)
    first = rows[0]
    assert list(first) == [
        "action", "slice", "figure", "challenger", "champion", "difference", "low", "high",
        "smallest_effect", "requests", "users",
    ]  # fmt: skip
    assert (first["action"], first["slice"], first["figure"]) == ("save", "pooled", "auc")
    assert first["challenger"] - first["champion"] == first["difference"]
    assert (first["requests"], first["users"]) == (120, both.scored.num_users)
    named = comparison(measure(both, hit_at=3, resamples=50), both.scored, names=("b", "a"))
    assert named[0]["b"] == first["challenger"]


def test_scores_that_are_not_numbers_name_the_request_on_either_side():
    both = sides()
    broken = both.other.copy()
    broken[0, 1] = np.nan
    with pytest.raises(TrainingError, match="click score is NaN or infinite for request_id 0"):
        measure(replace(both, other=broken), hit_at=3)
    with pytest.raises(DataError, match="do not say who asked"):
        measure(replace(both, scored=replace(both.scored, user_id=None)), hit_at=3)
