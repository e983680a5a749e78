"""The gate on constructed pairs of models whose answer is known."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from thawline.config import Config, Gate, parse_config
from thawline.errors import ConfigError, DataError
from thawline.evaluation.compare import Measured, Sides, measure
from thawline.evaluation.gate import decide
from thawline.evaluation.scored import Scored


def holdout(**auc: float | None) -> dict[str, Any]:
    return {
        "pooled": {
            action: {"auc": value, "positives": 0, "candidates": 12}
            for action, value in auc.items()
        }
    }


def gate(*rules: dict[str, Any], **settings: Any) -> Gate:
    return Gate.model_validate({"rules": rules, **settings})


FLOOR = gate(holdout="next", min_auc=0.6)


def test_a_model_at_the_limit_passes() -> None:
    decision = decide(FLOOR, {"next": holdout(save=0.6)}, ["save"])
    assert decision.passed
    assert decision.reasons == ["save AUC on next is 0.6000, at least gate.min_auc 0.6"]


def test_a_model_below_the_limit_is_refused() -> None:
    decision = decide(FLOOR, {"next": holdout(save=0.51)}, ["save"])
    assert not decision.passed
    assert decision.reasons == ["save AUC on next is 0.5100, below gate.min_auc 0.6"]


@pytest.mark.parametrize(
    ("value", "ends", "status", "reason"),
    [
        (0.65, [0.61, 0.7], "passed", "0.6500 (95 % interval 0.6100 to 0.7000), at least"),
        (0.65, [0.6, 0.7], "passed", "0.6500 (95 % interval 0.6000 to 0.7000), at least"),
        (
            *(0.65, [0.59, 0.7], "undecided"),
            "0.6500 (95 % interval 0.5900 to 0.7000): these data cannot tell whether it is at "
            "least",
        ),
        # The figure alone refuses, whether or not the data could show it.
        (0.59, [0.5, 0.7], "failed", "0.5900 (95 % interval 0.5000 to 0.7000), below"),
        (0.5, [0.45, 0.55], "failed", "0.5000 (95 % interval 0.4500 to 0.5500), below"),
        (0.65, None, "passed", "0.6500, at least"),
    ],
)
def test_a_floor_is_passed_by_the_low_end_of_the_interval_and_failed_by_the_figure(
    value: float, ends: list[float] | None, status: str, reason: str
) -> None:
    tree = holdout(save=value) | {"intervals": {"pooled": {"save": {"auc": ends}}}}
    decision = decide(FLOOR, {"next": tree}, ["save"])
    assert decision.rules[0].status == status
    assert decision.rules[0].reason == f"save AUC on next is {reason} gate.min_auc 0.6"
    assert [decision.rules[0].low, decision.rules[0].high] == (ends or [None, None])
    assert decision.passed == (status != "failed")
    strict = FLOOR.model_copy(update={"undecided": "refuse"})
    assert decide(strict, {"next": tree}, ["save"]).passed == (status == "passed")


def test_a_near_miss_reads_as_a_miss() -> None:
    decision = decide(FLOOR, {"next": holdout(save=0.5999999)}, ["save"])
    assert not decision.passed
    assert decision.reasons == ["save AUC on next is 0.5999999, below gate.min_auc 0.6"]


@pytest.mark.parametrize("value", [None, math.nan])
def test_an_undefined_auc_is_refused_whatever_the_limit(value: float | None) -> None:
    decision = decide(gate(min_auc=0.0), {"next": holdout(save=value)}, ["save"])
    assert not decision.passed
    assert decision.reasons == ["save AUC on next is undefined: 0 positives among 12 candidates"]


def test_only_the_primary_action_on_the_chosen_hold_out_counts_for_the_floor() -> None:
    metrics = {"next": holdout(save=0.7, click=0.1), "in_window": holdout(save=0.1, click=0.1)}
    assert decide(FLOOR, metrics, ["save", "click"]).passed
    assert not decide(FLOOR, metrics, ["click", "save"]).passed
    other = gate(holdout="in_window", min_auc=0.6)
    assert not decide(other, metrics, ["save", "click"]).passed


def test_a_hold_out_that_was_not_scored_is_an_error() -> None:
    with pytest.raises(DataError, match=r"gate.holdout is next, but only in_window was scored"):
        decide(FLOOR, {"in_window": holdout(save=0.9)}, ["save"])
    rules = gate({"figure": "auc", "not_below": 0, "holdout": "in_window"})
    with pytest.raises(DataError, match=r"rule's holdout is in_window, but only next was scored"):
        decide(rules, {"next": holdout(save=0.9)}, ["save"])


def test_metrics_without_the_primary_action_are_an_error() -> None:
    with pytest.raises(DataError, match="not the primary action save"):
        decide(FLOOR, {"next": holdout(click=0.9)}, ["save"])


# Challenger against champion.


def pair(*, requests=3_000, noise=(1.0, 1.0), cold=None, shift=0.0, cold_positives=True):
    """Figures of two models that see the truth through noise: the challenger's, the champion's.

    `cold` is the challenger's noise on cold items, a fifth of all. `shift` is added to its logits.
    """
    generator = np.random.default_rng(0)
    shape = (4 * requests, 1)
    truth = generator.normal(size=shape)
    tier = generator.choice(np.array([0, 0, 1, 2, 3], np.int8), shape[0])
    own = np.where(tier == 3, noise[0] if cold is None else cold, noise[0])[:, None]
    labels = generator.random(shape) < 1 / (1 + np.exp(1.5 - 1.5 * truth))
    if not cold_positives:
        labels &= tier[:, None] != 3
    seen = [truth + scale * generator.normal(size=shape) for scale in (own, noise[1])]
    if shift:
        # Both are the true log odds, so that the shift alone is wrong.
        seen = [1.5 * truth - 1.5 + shift, 1.5 * truth - 1.5]
    scored = Scored(
        actions=["save"],
        request_id=np.arange(requests),
        timestamp=np.zeros(requests, np.int64),
        offsets=np.arange(0, shape[0] + 1, 4),
        row=np.full(shape[0], 2),
        labels=labels.astype(np.int8),
        logits=seen[0].astype(np.float32),
        oracle=None,
        user_id=pa.array(generator.integers(0, requests // 5, requests)),
    )
    sides = Sides(scored, tier, seen[1].astype(np.float32))
    return measure(sides, hit_at=3, resamples=200)


AUC = {"figure": "auc", "not_below": -0.005}
COLD = AUC | {"slice": "cold"}


def verdict(rules: Gate, figures, **settings):
    found = decide(
        rules,
        {"next": holdout(save=0.7)},
        ["save"],
        figures={"next": figures},
        **({"without": None} | settings),
    )
    return found.passed, [rule.status for rule in found.rules[1:]], found.reasons[1:]


@pytest.fixture(scope="module")
def better():
    return pair(noise=(0.8, 1.0))


@pytest.fixture(scope="module")
def cold_worse():
    return pair(noise=(0.7, 1.0), cold=1.5)


def test_a_better_model_passes_every_rule(better):
    passed, statuses, reasons = verdict(gate(AUC, COLD), better)
    assert passed
    assert statuses == ["passed", "passed"]
    assert reasons[0].startswith("save AUC on next is 0.")
    assert reasons[0].endswith(", not below -0.005")
    assert reasons[1].startswith("save AUC on cold items of next is 0.")


def test_a_worse_model_fails_and_the_reason_says_by_how_much(better):
    swapped = {
        key: replace(own, values=own.values[::-1], resampled=own.resampled[:, ::-1])
        for key, own in better.items()
    }
    passed, statuses, (reason,) = verdict(gate(AUC), swapped)
    assert not passed
    assert statuses == ["failed"]
    own = swapped["save", "pooled", "auc"]
    low, high = own.difference_interval(0.95)
    assert high < -0.005
    assert reason == (
        f"save AUC on next is {own.value:.4f}, the champion's {own.other:.4f}: a difference of "
        f"{own.difference:+.4f} (95 % interval {low:+.4f} to {high:+.4f}), where it must be not "
        "below -0.005"
    )


@pytest.mark.parametrize(("policy", "passes"), [("pass", True), ("refuse", False)])
def test_too_few_users_leave_a_rule_undecided_and_the_config_says_what_then(policy, passes):
    few = pair(requests=150)
    passed, statuses, (reason,) = verdict(gate(AUC, undecided=policy), few)
    assert passed is passes
    assert statuses == ["undecided"]
    assert reason.startswith("undecided: save AUC on next")
    effect = few["save", "pooled", "auc"].smallest_effect
    assert f"(the smallest difference that they could show is {effect:.4f})" in reason
    # A rule may have its own policy.
    other = "refuse" if policy == "pass" else "pass"
    assert verdict(gate(AUC | {"undecided": policy}, undecided=other), few)[0] is passes


def test_a_model_that_is_worse_on_cold_items_alone_is_refused_for_them(cold_worse):
    passed, statuses, reasons = verdict(gate(AUC, COLD), cold_worse)
    assert not passed
    assert statuses == ["passed", "failed"]
    assert "on cold items of next" in reasons[1]
    assert verdict(gate(AUC), cold_worse)[0]


def test_a_model_that_promises_too_much_fails_on_calibration_though_it_ranks_alike():
    shifted = pair(shift=0.4)
    # But for ties that rounding makes.
    assert abs(shifted["save", "pooled", "auc"].difference) < 1e-6
    rules = gate(AUC, {"figure": "calibration", "within": 0.05})
    passed, statuses, reasons = verdict(rules, shifted)
    assert not passed
    assert statuses == ["passed", "failed"]
    assert "where it must be within 0.05 of 1" in reasons[1]
    # Against the champion, the loss tells it too.
    worse = gate({"figure": "normalized_entropy", "not_above": 0.005})
    assert verdict(worse, shifted)[1] == ["failed"]
    fine = pair(shift=1e-9)
    assert verdict(rules, fine)[1] == ["passed", "passed"]


def test_an_undefined_slice_is_undecided_never_passed():
    none = pair(requests=400, cold_positives=False)
    passed, statuses, (reason,) = verdict(gate(COLD, undecided="refuse"), none)
    assert not passed
    assert statuses == ["undecided"]
    cold = none["save", "cold", "auc"].candidates
    assert reason == (
        f"undecided: save AUC on cold items of next is undefined: 0 positives among {cold} "
        "candidates"
    )


def known(value, other, resampled):
    """A figure whose resampled differences are given; the model's own values are `value`."""
    differences = np.asarray(resampled, float)
    pairs = np.stack([value + 0 * differences, value - differences], axis=1)
    return {
        ("save", "pooled", "auc"): Measured(
            "save", "pooled", "auc", (value, other), pairs, candidates=90, positives=7
        )
    }


def test_a_rule_is_decided_by_the_ends_of_its_interval_at_its_confidence():
    # From -0.010 to 0.090: the 95 % interval is -0.0075 to 0.0875, the 80 % one 0 to 0.08.
    figures = known(0.7, 0.66, np.linspace(-0.010, 0.090, 101))
    for bound, confidence, status in [
        (-0.0076, 0.95, "passed"),
        (-0.0074, 0.95, "undecided"),
        (-0.0001, 0.80, "passed"),
        (0.0874, 0.95, "undecided"),
        (0.0876, 0.95, "failed"),
    ]:
        rule = {"figure": "auc", "not_below": bound, "confidence": confidence}
        assert verdict(gate(rule), figures)[1] == [status], bound
    decision = decide(
        gate({"figure": "auc", "not_below": -0.01}),
        {"next": holdout(save=0.7)},
        ["save"],
        figures={"next": figures},
        without=None,
    )
    rule = decision.tree()["rules"][1]
    assert rule["name"] == "save AUC on next not below -0.01"
    assert rule["status"] == "passed"
    assert rule["bound"] == -0.01
    assert (rule["value"], rule["low"], rule["high"]) == pytest.approx((0.04, -0.0075, 0.0875))


def test_a_figure_without_an_interval_is_undecided():
    figures = known(0.7, 0.6, np.full(100, np.nan))
    _, statuses, (reason,) = verdict(gate(AUC), figures)
    assert statuses == ["undecided"]
    assert reason.endswith(
        "too few users are behind it for an interval (7 positives among 90 candidates)"
    )


def test_bounds_on_the_challenger_alone_need_no_champion():
    generator = np.random.default_rng(0)
    own = Measured("save", "pooled", "auc", (0.7,), generator.normal(0.7, 0.01, (500, 1)), 90, 7)
    figures = {("save", "pooled", "auc"): own}
    low, high = own.interval(0.95)
    for bound, status in [({"at_least": low - 1e-6}, "passed"), ({"at_most": 0.7}, "undecided"),
                          ({"at_least": high + 1e-6}, "failed")]:  # fmt: skip
        rules = gate({"figure": "auc", **bound})
        assert verdict(rules, figures, without="there is none")[1] == [status]


def test_a_first_model_passes_by_the_absolute_rules():
    found = decide(Gate(), {"next": holdout(save=0.7)}, ["save"])
    assert found.passed
    assert [rule.status for rule in found.rules] == ["passed"] * 5
    assert found.reasons[1] == "save AUC on next: there is no champion yet"
    assert not decide(Gate(), {"next": holdout(save=0.4)}, ["save"]).passed


def test_a_champion_without_the_action_leaves_the_rule_undecided():
    alone = Measured("save", "pooled", "auc", (0.7,), np.full((100, 1), 0.7), 90, 7)
    _, statuses, (reason,) = verdict(gate(AUC), {("save", "pooled", "auc"): alone})
    assert statuses == ["undecided"]
    assert reason == "undecided: save AUC on next: the champion does not predict save"


def test_figures_that_were_not_measured_are_an_error_not_a_pass():
    with pytest.raises(DataError, match="save AUC on next was not measured"):
        verdict(gate(AUC), {})


def finding(name, severity, waived=False):
    return SimpleNamespace(name=name, severity=severity, waived=waived)


@pytest.mark.parametrize(
    ("rule", "findings", "status", "reason"),
    [
        ("no_errors", [finding("tier_sizes", "warning")], "passed", "the audit has no errors"),
        (
            "no_errors",
            [finding("catalogue_leak", "error", True)],
            "failed",
            "the audit found catalogue_leak (waived), so the figures cannot be trusted",
        ),
        (
            "no_unwaived_errors",
            [finding("catalogue_leak", "error", True)],
            "passed",
            "the audit has no unwaived errors",
        ),
        (
            "no_unwaived_errors",
            [finding("late_events", "error"), finding("tier_sizes", "error", True)],
            "failed",
            "the audit found late_events, so the figures cannot be trusted",
        ),
    ],
)
def test_a_rule_on_the_audit(rule, findings, status, reason):
    passed, statuses, reasons = verdict(gate({"audit": rule}), {}, findings=findings)
    assert passed is (status == "passed")
    assert (statuses, reasons) == ([status], [reason])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{}", "name a figure"),
        ("{figure: auc}", "one bound of .*; none is set"),
        ("{figure: auc, not_below: 0, at_least: 0.5}", "not_below and at_least is set"),
        ("{figure: auc, not_above: 0}", "auc is better when higher: use not_below"),
        ("{figure: log_loss, not_below: 0}", "log_loss is better when lower: use not_above"),
        ("{figure: mrr, within: 0.1}", "within is for calibration"),
        ("{figure: calibration, not_below: 0}", "calibration is best at 1"),
        ("{figure: auc, audit: no_errors}", "either on the audit or on a figure"),
        ("{figure: ece, at_most: 0.1}", r"gate\.rules\.0\.figure"),
        ("{figure: auc, not_below: 0, slice: warm}", r"gate\.rules\.0\.slice"),
    ],
)
def test_a_rule_that_says_nothing_or_two_things_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(f"{{simulate: {{}}, gate: {{rules: [{rule}]}}}}")


def test_a_rule_on_an_unknown_action_is_refused_before_any_work():
    rules = gate(AUC | {"action": "like"})
    with pytest.raises(ConfigError, match=r"gate\.rules\.0\.action is 'like', but .* are save"):
        decide(rules, {"next": holdout(save=0.7)}, ["save"])
    from thawline.stages.check import check

    config = Config.model_validate({"simulate": {}, "gate": {"rules": [AUC | {"action": "like"}]}})
    with pytest.raises(ConfigError, match="the log's actions are save, click"):
        check(config)
