from typing import Any

from thawline.evaluation.diagnostics import (
    diagnostics,
    drifted,
    oracle_gap,
    staircase,
    underrated,
)
from thawline.evaluation.findings import findings


def texts(found: Any) -> list[str]:
    return [item.text for item in found]


def epoch(course: list[float | None], loss: float | None, **more: Any) -> dict[str, Any]:
    metrics = {"next": {"pooled": {"save": {"log_loss": loss, "auc": 0.7}}, "tiers": {}}}
    return {"course": course, "metrics": metrics} | more


def test_a_training_loss_that_steps_down_where_the_test_loss_rises_is_a_staircase() -> None:
    epochs = [
        epoch([0.60, None, 0.59, 0.58], 0.55),
        epoch([0.50, 0.49, 0.48, 0.475], 0.57),
        epoch([0.470, 0.465, 0.46, 0.455], 0.60),
    ]
    (found,) = staircase(epochs, "next")
    assert (found.level, found.holdout) == ("warning", "next")
    # Changes of 0.01 (five times) or 0.005: the usual one is 0.01.
    assert found.text == (
        "Where epoch 2 starts, the training loss steps down from 0.5800 to 0.5000 (it usually "
        "changes by 0.0100 in a twentieth of an epoch), and after it the loss on next has risen "
        "from 0.5500 to 0.5700: the model recalls examples rather than learning from them."
    )


def test_neither_a_step_alone_nor_a_rising_test_loss_alone_is_a_staircase() -> None:
    down = [0.60, 0.59, 0.58]
    assert not list(staircase([epoch(down, 0.55), epoch([0.50, 0.49, 0.48], 0.54)], "next"))
    assert not list(staircase([epoch(down, 0.55), epoch([0.57, 0.56, 0.55], 0.60)], "next"))
    # A loss that jumps about as much all the time.
    wild = [0.60, 0.50, 0.62, 0.55]
    assert not list(staircase([epoch(wild, 0.55), epoch([0.47, 0.58, 0.5], 0.60)], "next"))


def test_epochs_without_a_course_or_a_test_loss_are_passed_over() -> None:
    step = [epoch([0.6, 0.59], 0.5), epoch([0.4, 0.39], None)]
    assert not list(staircase(step, "next"))
    assert not list(staircase([{"metrics": {}}, epoch([0.4, 0.39], 0.6)], "next"))
    assert not list(staircase([epoch([0.6, None], 0.5), epoch([0.4, 0.39], 0.6)], "next"))
    assert not list(staircase([], "next"))


def test_rows_that_went_far_and_are_read_again_are_warned_of() -> None:
    epochs = [{"drift": {"item": {"head": 2.9, "tail": 14.9}, "user": {"head": 9.0}}}]
    schedule = {"components": {"item": {"replayed": 1.0}, "user": {"replayed": 0.0}}}
    (found,) = drifted(epochs, schedule)
    assert found.level == "warning"
    assert "The item rows have gone far" in found.text
    assert "first norms: tail 14.9; and 100% of the examples are seen again" in found.text
    assert not list(drifted(epochs, None))
    assert not list(drifted([], schedule))


def tiers(
    cold: float | None, warm: float, *, positives: int = 100, high: float | None = None
) -> dict[str, Any]:
    """A hold-out whose warm tiers have a calibration of `warm`."""

    def figures(ratio: float | None, count: int) -> dict[str, Any]:
        return {"save": {"auc": 0.7, "calibration": ratio, "positives": count}}

    return {
        "pooled": figures(warm, 1_000),
        "tiers": {
            "head": figures(warm + 0.1, 300),
            "torso": figures(warm - 0.1, 300),
            "tail": figures(None, 0),
            "cold": figures(cold, positives),
        },
        "intervals": high
        and {"tiers": {"cold": {"save": {"calibration": [0.0, high]}}}, "pooled": {}},
    }


def test_cold_items_that_are_promised_too_little_point_to_rows_of_negatives() -> None:
    audit = {
        "findings": [
            {"name": "tier_sizes", "figures": {}},
            {
                "name": "only_negative_rows",
                "figures": {"rows": 1234.0, "share": 0.4, "test_share": 0.25},
            },
        ]
    }
    (found,) = underrated("next", tiers(0.2, 1.0), audit)
    assert found.level == "warning"
    assert found.text == (
        "On next, save of cold items is predicted 0.20 times as often as it happens, that of warm "
        "ones 1.00 times: so do rows end that fine-tuning shows with label 0 alone. There are "
        "1,234 such rows, with 40.0% of its negatives and 25.0% of the test's positives."
    )
    assert texts(underrated("next", tiers(0.2, 1.0), None)) == [found.text.split(" There are")[0]]


def test_cold_items_are_not_accused_on_thin_evidence() -> None:
    assert not list(underrated("next", tiers(0.6, 1.0), None))
    assert not list(underrated("next", tiers(0.2, 0.3), None))
    assert not list(underrated("next", tiers(0.2, 1.0, positives=49), None))
    assert not list(underrated("next", tiers(0.2, 1.0, high=0.55), None))
    assert list(underrated("next", tiers(0.2, 1.0, high=0.45), None))
    assert not list(underrated("next", tiers(None, 1.0), None))


def against_oracle(value: float, ceiling: float, bounds: list[float] | None) -> dict[str, Any]:
    return {
        "pooled": {"save": {"auc": value}},
        "oracle": {"save": {"auc": ceiling}},
        "intervals": bounds and {"pooled": {"save": {"auc": bounds}}, "tiers": {}},
    }


def test_the_oracle_gap_is_told_in_shares_of_the_way() -> None:
    (found,) = oracle_gap("next", against_oracle(0.7, 0.9, [0.65, 0.75]))
    assert found.level == "note"
    assert found.text == (
        "On next, the save AUC goes 50% of the way from chance to the oracle's 0.9000 (95 % "
        "interval 38% to 62%)."
    )
    assert texts(oracle_gap("next", against_oracle(0.7, 0.9, None))) == [
        "On next, the save AUC goes 50% of the way from chance to the oracle's 0.9000."
    ]


def test_a_model_that_beats_the_oracle_beyond_noise_leaks() -> None:
    (leak,) = oracle_gap("next", against_oracle(0.92, 0.9, [0.91, 0.93]))
    assert leak.level == "warning"
    assert "above the oracle's 0.9000" in leak.text
    (noise,) = oracle_gap("next", against_oracle(0.92, 0.9, [0.89, 0.95]))
    assert noise.level == "note"


def test_without_an_oracle_or_a_defined_figure_there_is_no_gap() -> None:
    tree = against_oracle(0.7, 0.9, None)
    assert not list(oracle_gap("next", tree | {"oracle": None}))
    assert not list(oracle_gap("next", tree | {"pooled": {"save": {"auc": None}}}))
    assert not list(oracle_gap("next", tree | {"pooled": {}}))


def test_the_findings_of_an_evaluation_hold_the_diagnostics() -> None:
    epochs = [
        epoch([0.6, 0.59, 0.58], 0.5),
        epoch([0.4, 0.39, 0.38], 0.6, drift={"item": {"tail": 4.0}}),
    ]
    tree = tiers(0.2, 1.0) | {"trivial": {}, "requests": 10, "oracle": None}
    schedule = {"components": {"item": {"replayed": 0.5}}}
    told = diagnostics({"next": tree}, epochs, schedule=schedule)
    assert len(told) == 3
    whole = findings({"next": tree}, epochs, sampled=True, schedule=schedule)
    assert set(told) <= set(whole)
