"""Pages of experiments: their numbers against those worked out by hand, whole or half finished."""

import pytest
from experiment_studies import found, reading, rows_of

from thawline.config import parse_config
from thawline.evaluation.formatting import DASH, MINUS
from thawline.study.experiments import EXPERIMENTS
from thawline.study.experiments.consistency import cold_minus_warm
from thawline.study.experiments.timing import Fit
from thawline.study.report import render

NOISE = {0: 0.0, 1: 0.001, 2: 0.003}
"""By seed: shared by all arms, so that it cancels out in differences."""
OWN = (
    "timing",
    "which-table",
    "gradient-paths",
    "consistency",
    "optimizers",
    "adapters",
    "remedies",
    "windows",
)


def config(*overrides, grid=None):
    own = parse_config("simulate: {}", overrides)
    return own.model_copy(update={"study": own.study.model_copy(update={"grid": grid or {}})})


def page(name, value, own=None, **more):
    study = found(EXPERIMENTS[name], own or config(), value, **more)
    return EXPERIMENTS[name].page(*study)


def start_of(arm):
    return float(arm.split("(")[1].split(",")[0])


def test_a_line_is_fitted_by_least_squares():
    # By hand: means 1 and 2, products (-1)(-1) + 0 + (1)(2) = 3 over 2, so slope 1.5.
    fit = Fit.of([0, 1, 2], [1, 1, 4])
    assert (fit.slope, fit.intercept) == (pytest.approx(1.5), pytest.approx(0.5))
    # Left: 0.5, -1, 0.5 (squares 1.5) of 1, 1, 4 about 2 (squares 6).
    assert fit.r_squared == pytest.approx(0.75)
    assert Fit.of([0, 1], [3, 3]).r_squared is None


def test_timing_tells_the_slope_by_tier_and_how_straight_the_line_is():
    bend = {0.0: 0.0, 0.25: 0.001, 0.5: 0.006, 0.75: 0.007, 1.0: 0.010}

    def value(arm, seed, piece, figure):
        start = start_of(arm)
        if piece == "cold":
            return 0.6 - 0.02 * start
        return 0.7 + bend[start] + NOISE[seed] * (1 + start if piece == "tail" else 1)

    (section,) = page("timing", value)
    rows = rows_of(section)
    # Weights -0.8, -0.4, 0, 0.4, 0.8: 0.4 (0.007 - 0.001) + 0.8 * 0.010 = 0.0104.
    assert rows["pooled"][0] == "+0.0104 ± 0.0000"
    # Means about 0.0048: squares sum to 7.08e-5; slope² / 1.6 explains 0.0104² * 0.625 = 6.76e-5.
    assert rows["pooled"][1] == "95%"
    assert rows["cold"][:2] == [f"{MINUS}0.0200 ± 0.0000", "100%"]
    # The noise of tail items grows with the start: sd of 0, 0.001, 0.003 is 0.00153.
    assert rows["tail"][0] == "+0.0117 ± 0.0015"
    assert rows["pooled"][2].startswith("undecided with 3 seeds (above 0 in 3 of 3)")
    assert "save AUC on next rises with the start" in section.words[0]
    assert "explains 95% of the variance" in section.words[0]


def test_timing_waits_for_a_seed_that_has_finished_with_every_start():
    def broken(arm, seed):
        return "no disk" if arm == "window(0.5, 1)" or seed == 2 else None

    (section,) = page("timing", lambda *_: 0.7, failed=broken)
    assert section.words == ("No seed has finished with every start yet.",)
    (section,) = page(
        "timing",
        lambda arm, seed, *_: 0.7 + 0.01 * start_of(arm) + NOISE[seed],
        failed=lambda arm, seed: "no disk" if (arm, seed) == ("window(1, 1)", 1) else None,
    )
    assert rows_of(section)["pooled"][0] == "+0.0100 ± 0.0000"


def test_a_grid_makes_sections_for_each_of_its_combinations():
    grid = {"tables.item.learning_rate": [0.02, 0.2]}

    def value(arm, seed, *_):
        return 0.7 + start_of(arm) * (0.02 if arm.endswith("learning_rate 0.2") else 0.01)

    low, high = page("timing", value, config(grid=grid))
    assert (low.title, high.title) == (
        "The trend, learning_rate 0.02",
        "The trend, learning_rate 0.2",
    )
    assert rows_of(low)["pooled"][0].startswith("+0.0100")
    assert rows_of(high)["pooled"][0].startswith("+0.0200")


CONSISTENT = {
    ("re-anchor", "cold"): 0.60,
    ("freeze-until-last", "cold"): 0.62,
    ("re-anchor", "head"): 0.71,
    ("re-anchor", "tail"): 0.68,
}


def test_consistency_takes_what_warm_items_lose_from_what_cold_ones_lose():
    def value(arm, seed, piece, figure):
        return CONSISTENT.get((arm, piece), 0.7) + NOISE[seed]

    study = found(
        EXPERIMENTS["consistency"], config(), value, drift=lambda arm, tier: len(arm) / 10
    )
    # Cold -0.02; warm (+0.01 + 0 - 0.02) / 3.
    taken = cold_minus_warm(reading(study), "re-anchor", "freeze-until-last")
    assert taken == {seed: pytest.approx(-0.02 + 0.01 / 3) for seed in (0, 1, 2)}
    (section,) = EXPERIMENTS["consistency"].page(*study)
    rows = rows_of(section)
    assert rows["cold"] == ["+0.0800 ± 0.0000", f"{MINUS}0.0200 ± 0.0000", "+0.0800 ± 0.0000"]
    assert rows["cold minus warm"][1] == f"{MINUS}0.0167 ± 0.0000"
    assert rows_of(section, 1)["re-anchor"] == ["0.90"] * 4
    assert f"on cold items: {MINUS}0.0200 (sd 0.0000; undecided with 3 seeds" in section.words[0]


AFTER = {"none frozen": (0.70, 0.72, 0.69), "item frozen": (0.68, 0.70, 0.71)}


def test_which_table_sets_each_frozen_table_against_one_epoch_and_against_none():
    def value(arm, seed, *_):
        return {"none frozen": 0.69, "item frozen": 0.71, "one epoch": 0.70}.get(arm, 0.68)

    (section,) = page(
        "which-table",
        value,
        after=lambda arm, seed, epoch: AFTER.get(arm, (0.7, 0.7, 0.7))[epoch - 1] + NOISE[seed],
    )
    assert f"against one epoch: {MINUS}0.0100 (sd" in section.words[0]
    assert f"The last epoch alone: {MINUS}0.0300 (sd" in section.words[0]
    assert section.words[1].startswith("item frozen, against none frozen: +0.0200 (sd 0.0000;")
    assert "against one epoch: +0.0100 (sd" in section.words[1]
    # None, item, user and all frozen, each against one epoch.
    assert rows_of(section)["pooled"] == [
        f"{MINUS}0.0100 ± 0.0000",
        "+0.0100 ± 0.0000",
        f"{MINUS}0.0200 ± 0.0000",
        f"{MINUS}0.0200 ± 0.0000",
    ]


def test_gradient_paths_are_a_row_an_arm_with_a_column_a_slice():
    def value(arm, seed, piece, figure):
        if piece == "tail" and arm == "contrastive":
            return 0.73
        return {"one epoch": 0.70, "co-train": 0.66}.get(arm, 0.71)

    (section,) = page(
        "gradient-paths",
        value,
        after=lambda arm, seed, epoch: 0.7 - 0.01 * (epoch == 3),
        drift=lambda arm, tier: 2.0 if arm == "co-train" else 0.5,
    )
    first, second = (rows_of(section, number) for number in (0, 1))
    # Pooled, head, torso, tail, cold.
    assert first["co-train"] == [f"{MINUS}0.0400 ± 0.0000"] * 5
    assert first["contrastive"][3] == "+0.0300 ± 0.0000"
    # The last epoch, the drift by tier.
    assert second["co-train"] == [f"{MINUS}0.0100 ± 0.0000", *["2.00"] * 4]


def test_optimizers_tell_the_last_epochs_change_the_drift_and_what_freezing_gains():
    def value(arm, seed, *_):
        base = 0.72 if arm.startswith("row-wise") else 0.70
        return base + (0.004 if arm.endswith("freeze-until-last") else 0.0)

    def after(arm, seed, epoch):
        fall = 0.005 if arm == "dense Adam, co-train" and epoch == 3 else 0.0
        return 0.7 + NOISE[seed] - fall

    (section,) = page(
        "optimizers",
        value,
        after=after,
        drift=lambda arm, tier: 14.9 if arm == "dense Adam, co-train" else 1.1,
    )
    first, second = (rows_of(section, number) for number in (0, 1))
    gain = "+0.0040 ± 0.0000"
    adagrad = ["0.7200", "+0.0200 ± 0.0000", "+0.0000 ± 0.0000", gain]
    assert first["row-wise Adagrad"] == adagrad
    assert second["row-wise Adagrad"] == [gain, gain, "1.10", "1.10"]
    assert first["dense Adam"][1:3] == ["", f"{MINUS}0.0050 ± 0.0000"]
    assert second["dense Adam"][2:] == ["14.90", "1.10"]
    assert section.words[0].startswith(f"dense Adam: co-training changes by {MINUS}0.0050 (sd")
    assert "with a tail drift of 14.90" in section.words[0]


def test_adapters_tell_which_share_of_the_full_ones_gain_a_smaller_one_reaches():
    gains = {"bias": 0.0056, "diagonal": 0.0070, "full": 0.0100}

    def value(arm, seed, *_):
        recipe, _, adapter = arm.partition(", ")
        gain = gains.get(adapter.partition(" ")[0], 0.0)
        if recipe == "freeze-until-last" and seed == 0:
            gain = -gain
        return 0.7 + NOISE[seed] + (-gain if recipe == "frozen" else gain)

    (section,) = page("adapters", value)
    assert section.words[0].endswith("of which bias reaches 56%, of which diagonal reaches 70%.")
    # A gain on which the seeds do not agree is none of which there could be a share.
    assert "better in 2 of 3" in section.words[2]
    assert all("reaches" not in words for words in section.words[1:])
    assert rows_of(section)["co-train"][:4] == [
        "0.7013",
        "+0.0056 ± 0.0000",
        "+0.0070 ± 0.0000",
        "+0.0100 ± 0.0000",
    ]


def test_remedies_tell_repairs_by_what_they_do_to_cold_items():
    def value(arm, seed, piece, figure):
        if piece == "cold":
            return {"cold rows by ridge": 0.57}.get(arm, 0.6)
        return {"cross-fitted rows": 0.71, "freeze-until-last": 0.72}.get(arm, 0.7)

    (section,) = page("remedies", value)
    assert section.words[0].startswith("cross-fitted rows: +0.0100 (sd 0.0000;")
    assert f"{MINUS}0.0100 (sd 0.0000;" in section.words[0]
    ridge = next(words for words in section.words if "ridge" in words)
    assert f"after co-training: {MINUS}0.0300 (sd" in ridge


def test_windows_set_every_run_against_one_epoch_of_the_long_window():
    def value(arm, seed, *_):
        days, _, *recipe = arm.split(", ")
        late = 0.02 if recipe == ["freeze-until-last"] else 0.0
        return 0.7 + NOISE[seed] + late - (0.01 if days == "5 days" else 0.0)

    (section,) = page("windows", value, config("windows.finetune_days=10"))
    rows = rows_of(section)
    assert rows["10 days, freeze-until-last"] == ["the control", *["+0.0200 ± 0.0000"] * 2]
    assert rows["5 days, freeze-until-last"] == [
        f"{MINUS}0.0100 ± 0.0000",
        *["+0.0100 ± 0.0000"] * 2,
    ]
    assert section.words[2].startswith("5 days, 2 epochs: freezing until the last epoch +0.0100 (")
    assert "+0.0200 (sd 0.0000; undecided with 3 seeds" in section.words[2]


@pytest.mark.parametrize("name", OWN)
def test_a_page_asks_tells_what_others_found_and_bears_trials_that_are_not_there(name):
    failed = found(EXPERIMENTS[name], config(), lambda *_: 0.7, failed=lambda *_: "no disk")
    facts, table, rows = failed
    text = render(facts | {"action": "save"}, rows, table)
    assert "What is asked" in text
    assert EXPERIMENTS[name].title in text
    one = found(
        EXPERIMENTS[name],
        config("study.seeds=[0]"),
        lambda *_: 0.7,
        failed=lambda arm, seed: "no disk" if "late" in arm or "last" in arm else None,
    )
    text = render(one[0], one[2], one[1])
    assert "What others report" in text
    assert DASH in text
