"""What a report says of the gate and the champion, and where it puts the dots."""

from typing import Any

import pytest
from report_trees import CHAMPION, GATE, compared, figures

from thawline.evaluation.dots import Dot, Scale, dot_plot
from thawline.evaluation.report_verdict import is_better, judge, worries


def plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def champion(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"champion": CHAMPION | {"comparison": {"next": list(rows)}}}


def scored(ratio: float, bounds: list[float] | None = None) -> dict[str, Any]:
    """An evaluation of which only the calibration of `save` matters."""
    intervals = None
    if bounds is not None:
        intervals = {"pooled": {"save": {"calibration": bounds or None}}}
    values = figures(0.7) | {"calibration": ratio}
    return {"metrics": {"next": {"pooled": {"save": values}, "intervals": intervals}}}


@pytest.mark.parametrize(
    ("figure", "challenger", "reference", "expected"),
    [
        ("auc", 0.75, 0.70, "better"),
        ("auc", 0.70, 0.75, "worse"),
        ("auc", 0.701, 0.70, "undecided"),
        ("log_loss", 0.30, 0.35, "better"),
        ("normalized_entropy", 0.95, 0.90, "worse"),
        ("ece", 0.01, 0.05, "better"),
        # Best at 1, from either side.
        ("calibration", 0.95, 0.80, "better"),
        ("calibration", 1.20, 1.05, "worse"),
        ("calibration", 1.05, 0.80, "better"),
    ],
)
def test_a_difference_counts_where_its_interval_leaves_no_doubt(
    figure, challenger, reference, expected
):
    assert judge(compared("pooled", challenger, reference, 0.01, figure=figure)) == expected


def test_a_difference_without_an_interval_is_undecided():
    assert judge(compared("pooled", 0.9, 0.1, 0.01, low=None, high=None)) == "undecided"


def test_what_was_not_compared_is_said_to_be_so():
    assert is_better({}, ["next"], "save") == ["It was not compared with another model."]
    assert is_better({"champion": None}, ["next"], "save") == [
        "There is no champion to compare it with."
    ]
    assert is_better(champion(), ["next"], "save") == [
        "Nothing could be compared with feed-ranker version 3."
    ]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            compared("pooled", 0.74, 0.75, 0.004),
            "On next, save AUC is 0.0100 below that of feed-ranker version 3 (95 % interval "
            "-0.0140 to -0.0060): worse.",
        ),
        (
            compared("pooled", 0.751, 0.75, 0.004, smallest_effect=None),
            "On next, save AUC is 0.0010 above that of feed-ranker version 3 (95 % interval "
            "-0.0030 to +0.0050): no difference can be told.",
        ),
        (
            compared("pooled", 0.751, 0.75, 0.004, low=None, high=None),
            "On next, save AUC is 0.0010 above that of feed-ranker version 3.",
        ),
        (
            compared("pooled", 0.751, 0.75, 0.004, difference=None),
            "On next, save AUC cannot be compared with that of feed-ranker version 3: it is "
            "undefined.",
        ),
    ],
)
def test_the_answer_says_how_sure_it_is(row, sentence):
    assert list(map(plain, is_better(champion(row), ["next"], "save"))) == [sentence]


def test_the_answer_names_the_tiers_on_which_it_is_better_or_worse():
    (sentence,) = is_better({"champion": CHAMPION}, ["next"], "save")
    assert sentence.endswith(
        ": better. By tier: better on head, worse on cold, undecided on torso."
    )


def test_a_difference_that_rounds_to_none_and_tiers_of_which_none_is_decided():
    rows = [compared(name, 0.75, 0.75, 0.004) for name in ("pooled", "head", "cold")]
    (sentence,) = is_better(champion(*rows), ["next"], "save")
    assert plain(sentence) == (
        "On next, save AUC is as high as that of feed-ranker version 3 (95 % interval -0.0040 to "
        "+0.0040): no difference can be told; the smallest effect these data could show is "
        "0.0056. By tier: undecided on all."
    )


def test_worries_come_from_rules_comparison_calibration_and_audit():
    finding = {"severity": "warning", "text": "Too few.", "waived": False}
    waived = {"severity": "error", "text": "A leak.", "waived": True}
    harmless = {"severity": "info", "text": "All well.", "waived": False}
    evaluation = scored(0.8) | {
        "gate": GATE,
        "champion": CHAMPION,
        "audit": {"findings": [waived, finding, harmless]},
    }
    assert list(map(plain, worries(evaluation, sampled=False))) == [
        "1 of the gate's 4 rules failed: save auc cold not below the champion's by more than 0.01.",
        "1 of the gate's 4 rules could not be decided: save calibration within 0.02.",
        "On next, the AUC is below the champion's: save cold (-0.0500).",
        "On next, save is predicted 20 % less often than it happens.",
        "Audit (waived): A leak.",
        "Audit: Too few.",
    ]


@pytest.mark.parametrize(
    ("evaluation", "sampled", "expected"),
    [
        (scored(1.2), False, ["On next, save is predicted 20 % more often than it happens."]),
        # Rates among sampled negatives are the sampler's.
        (scored(1.2), True, []),
        (scored(1.04), False, []),
        (scored(1.2, [0.9, 1.5]), False, []),
        # Too few users for an interval.
        (scored(1.2, []), False, []),
        (
            scored(1.2, [1.1, 1.3]),
            False,
            ["On next, save is predicted 20 % more often than it happens."],
        ),
        ({"metrics": {"next": {"pooled": {"save": {"auc": 0.7}}}}}, False, []),
    ],
)
def test_miscalibration_is_a_worry_where_it_is_large_and_certain(evaluation, sampled, expected):
    assert worries(evaluation, sampled=sampled) == expected


def test_a_scale_ends_on_round_figures_and_within_its_bounds():
    dots = [Dot("a", 0.712, 0.688, 0.731), Dot("thin", 0.2, thin=True)]
    scale = Scale.over(dots, 0.7)
    assert (round(scale.low, 9), round(scale.high, 9)) == (0.68, 0.74)
    # No difference at all is drawn on a scale of 0.002.
    none = Scale.over([Dot("a", 0.0, 0.0, 0.0)], 0.0)
    assert (round(none.low, 9), round(none.high, 9)) == (-0.001, 0.001)
    assert Scale.over([Dot("a", 0.99, 0.95, 1.0)], None, (0.0, 1.0)).high == 1.0


def test_dots_stand_where_their_values_are_and_at_the_end_where_they_are_beyond():
    dots = [Dot("low", 0.0), Dot("middle", 0.5, 0.25, 0.75), Dot("beyond", 7.0), Dot("none", None)]
    drawn = dot_plot(dots, 0.5, Scale(0.0, 1.0))
    # 4 % of the width are left free on either side.
    assert [row["at"] for row in drawn["rows"]] == [4.0, 50.0, 96.0, None]
    assert drawn["rows"][1]["bounds"] == (27.0, 46.0)
    assert drawn["reference"] == 50.0


@pytest.mark.parametrize("dots", [[], [Dot("none", None)], [Dot("one", 0.5)]])
def test_a_plot_of_nothing_or_of_one_value_has_a_scale(dots):
    drawn = dot_plot(dots, None, Scale.over(dots, None))
    assert drawn["low"] < drawn["high"]
