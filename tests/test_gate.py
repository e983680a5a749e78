import math
from typing import Any

import pytest

from thawline.config import Gate
from thawline.errors import DataError
from thawline.evaluation.gate import decide


def holdout(**auc: float | None) -> dict[str, Any]:
    return {
        "pooled": {
            action: {"auc": value, "positives": 0, "candidates": 12}
            for action, value in auc.items()
        }
    }


GATE = Gate(holdout="next", min_auc=0.6)


def test_a_model_at_the_limit_passes() -> None:
    passed, reasons = decide(GATE, {"next": holdout(save=0.6)}, ["save"])
    assert passed
    assert reasons == ["save AUC on next is 0.6000, at least gate.min_auc 0.6"]


def test_a_model_below_the_limit_is_refused() -> None:
    passed, reasons = decide(GATE, {"next": holdout(save=0.51)}, ["save"])
    assert not passed
    assert reasons == ["save AUC on next is 0.5100, below gate.min_auc 0.6"]


def test_a_near_miss_reads_as_a_miss() -> None:
    passed, reasons = decide(GATE, {"next": holdout(save=0.5999999)}, ["save"])
    assert not passed
    assert reasons == ["save AUC on next is 0.5999999, below gate.min_auc 0.6"]


@pytest.mark.parametrize("value", [None, math.nan])
def test_an_undefined_auc_is_refused_whatever_the_limit(value: float | None) -> None:
    gate = Gate(holdout="next", min_auc=0.0)
    passed, reasons = decide(gate, {"next": holdout(save=value)}, ["save"])
    assert not passed
    assert reasons == ["save AUC on next is undefined: 0 positives among 12 candidates"]


def test_only_the_primary_action_on_the_chosen_hold_out_counts() -> None:
    metrics = {"next": holdout(save=0.7, click=0.1), "in_window": holdout(save=0.1, click=0.1)}
    assert decide(GATE, metrics, ["save", "click"])[0]
    assert not decide(GATE, metrics, ["click", "save"])[0]
    assert not decide(Gate(holdout="in_window", min_auc=0.6), metrics, ["save", "click"])[0]


def test_a_hold_out_that_was_not_scored_is_an_error() -> None:
    with pytest.raises(DataError, match=r"gate.holdout is next, but only in_window was scored"):
        decide(GATE, {"in_window": holdout(save=0.9)}, ["save"])


def test_metrics_without_the_primary_action_are_an_error() -> None:
    with pytest.raises(DataError, match="not the primary action save"):
        decide(GATE, {"next": holdout(click=0.9)}, ["save"])
