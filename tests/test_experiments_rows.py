"""Staleness, accumulation and content: what is laid out, and pages with numbers made up."""

import pytest
from experiment_studies import found, reading, rows_of

from thawline.config import parse_config
from thawline.evaluation.formatting import DASH, MINUS
from thawline.study.design import Design, data_key
from thawline.study.experiments import EXPERIMENTS
from thawline.study.experiments.staleness import diverged, hotter_of, largest_stable, stable

STALENESS, ACCUMULATION, CONTENT = (
    EXPERIMENTS[name] for name in ("staleness", "accumulation", "content")
)
CLICKS = "events: {path: log.parquet}"


def config(*overrides, text="simulate: {}"):
    return parse_config(text, overrides)


def laid_out(experiment, *overrides, text="simulate: {}"):
    """The configs of an experiment's first seed, by arm."""
    design = Design.of(experiment.lay_out(config(*overrides, text=text)))
    return {trial.arm.name: trial.config for trial in design.trials() if trial.seed == 0}


def test_lookups_miss_0_1_and_4_updates_by_optimizer_and_rate():
    arms = laid_out(STALENESS, text=CLICKS)
    by = {
        name: (own.tables.item.optimizer, own.tables.item.learning_rate, own.finetune.staleness)
        for name, own in arms.items()
    }
    assert by["row-wise Adagrad, 4 late"] == ("row-wise-adagrad", 0.02, 4)
    assert by["lazy Adam, 1 late"] == ("lazy-adam", 0.02, 1)
    assert by["SGD x 2, 0 late"] == ("sgd", 400.0, 0)
    assert by["SGD x 0.25, 4 late"] == ("sgd", 50.0, 4)
    assert len(by) == 2 * 3 + 3 * 4
    assert {(own.finetune.epochs, own.finetune.recipe) for own in arms.values()} == {
        (1, "co-train")
    }


def test_a_simulated_feed_is_run_with_a_hotter_law_as_well_and_a_log_is_not():
    arms = laid_out(STALENESS, "simulate.zipf=1.2")
    hot = {name: own for name, own in arms.items() if name.endswith(", Zipf 1.7")}
    assert len(hot) == 2 * (1 + 4)
    assert {own.simulate.zipf for own in hot.values()} == {1.7}
    assert hot["SGD x 2, 0 late, Zipf 1.7"].tables.item.learning_rate == 400.0
    assert hot["SGD x 0.0625, 4 late, Zipf 1.7"].tables.item.learning_rate == 12.5
    assert len({data_key(own) for own in arms.values()}) == 2
    assert hotter_of(config("simulate.zipf=2.8")) == 3.0
    assert hotter_of(config("simulate.zipf=3")) is None
    assert hotter_of(config(text=CLICKS)) is None


def test_each_stale_arm_is_compared_with_the_same_rate_without_staleness():
    design = Design.of(STALENESS.lay_out(config()))
    against = {arm.name: arm.baseline for arm in design.arms}
    assert against["SGD x 1, 4 late"] == "SGD x 1, 0 late"
    assert against["lazy Adam, 4 late"] == "lazy Adam, 0 late"
    assert against["row-wise Adagrad, 4 late, Zipf 1.5"] == "row-wise Adagrad, 0 late, Zipf 1.5"
    assert against["SGD x 0.25, 4 late"] == "SGD x 0.25, 4 late"


@pytest.mark.parametrize(
    "error",
    [
        "the loss became nan at step 5 (epoch 0); the batch's first request ids: 14557",
        "the loss became -inf at step 5 (epoch 0)",
        "network holds NaN or inf in `53.exp_avg_sq`",
        "the score of request_id 7 is infinite",
    ],
)
def test_numbers_that_are_not_finite_are_an_answer(error):
    assert diverged(error)
    assert STALENESS.answers(error)


@pytest.mark.parametrize(
    "error", ["its process ended with signal 9", "no information on the audit", ""]
)
def test_other_errors_are_failures(error):
    assert not diverged(error)


def stability(bound, ruined=lambda arm, seed: False):
    """A study in which SGD's rates from `bound` (by updates late) on do not stay finite."""

    def failed(arm, seed):
        optimizer, _, late = arm.partition(", ")
        if not optimizer.startswith("SGD") or seed != 2:
            return None
        rate = float(optimizer.rpartition(" ")[2])
        return "the loss became nan" if rate >= bound[int(late.partition(" ")[0])] else None

    def value(arm, seed, piece, figure):
        late = int(arm.partition(", ")[2].partition(" ")[0])
        return (0.15 + 0.0004 * late + 0.001 * seed) * (2.1 if ruined(arm, seed) else 1.0)

    return found(STALENESS, config(text=CLICKS), value, failed)


def test_the_largest_stable_rate_is_that_below_the_least_that_diverged_in_any_seed():
    study = stability({0: 4.0, 1: 2.0, 4: 1.0})
    one = reading(study)
    assert largest_stable(one, 0) == (2.0, 4.0)
    assert largest_stable(one, 1) == (1.0, 2.0)
    assert largest_stable(one, 4) == (0.5, 1.0)
    rates, _ = STALENESS.page(*study)
    rows = rows_of(rates)
    # The bounds 2, 1 and 2 sin(pi / 18) = 0.347; 0.347 / 2 of the rate that holds at once.
    assert rows["0"] == ["x 2", "x 4", "2.000", "1.00", "x 2"]
    assert rows["1"] == ["x 1", "x 2", "1.000", "0.50", "x 1"]
    assert rows["4"] == ["x 0.5", "x 1", "0.347", "0.17", "x 0.347"]
    assert "4 updates late: stable up to x 0.5, diverged at x 1." in rates.words


def test_rates_of_which_none_or_all_diverged_are_said_to_be_so():
    study = stability({0: 9.0, 1: 0.1, 4: 1.0})
    one = reading(study)
    assert largest_stable(one, 0) == (8.0, None)
    assert largest_stable(one, 1) == (None, 0.5)
    rates, _ = STALENESS.page(*study)
    assert rates.words[0] == "0 updates late: no rate diverged, up to x 8."
    assert rates.words[1] == "1 update late: every rate diverged, from x 0.5 on."
    assert rows_of(rates)["1"][0] == DASH


def test_rows_that_ran_away_without_an_infinite_number_have_diverged_too():
    bound = {0: 9.0, 1: 9.0, 4: 9.0}
    one = reading(stability(bound, lambda arm, seed: arm.startswith("SGD") and seed == 1))
    assert stable(one, "SGD x 1, 0 late") is False
    assert stable(one, "lazy Adam, 4 late") is True
    one = reading(stability(bound))
    assert stable(one, "SGD x 1, 0 late") is True


def test_what_missed_updates_cost_is_told_where_neither_side_diverged():
    _, harm = STALENESS.page(*stability({0: 4.0, 1: 2.0, 4: 1.0}))
    rows = rows_of(harm)
    assert rows["row-wise Adagrad"] == [
        "0.1510",
        "0.1514",
        "+0.0004 ± 0.0000",
        "0.1526",
        "+0.0016 ± 0.0000",
    ]
    assert rows["SGD x 1"][-2:] == ["diverged", DASH]
    # No lookup that misses nothing ran at this rate.
    assert rows["SGD x 0.25"] == [DASH, DASH, DASH, "0.1526", DASH]
    assert any(text.startswith("lazy Adam, 4 late: log loss +0.0016 (sd") for text in harm.words)


def test_a_step_of_accumulation_is_as_large_as_the_configs_own():
    arms = laid_out(ACCUMULATION, "finetune.batch_size=256")
    assert {
        own.finetune.batch_size * own.finetune.accumulation.micro_batches for own in arms.values()
    } == {256}
    factors = {
        name: (own.finetune.accumulation.tables, own.finetune.accumulation.table_factor)
        for name, own in arms.items()
        if name.startswith("lazy Adam")
    }
    assert factors == {
        "lazy Adam, exact": ("exact", 1.0),
        "lazy Adam, fused": ("fused", 1.0),
        "lazy Adam, fused, rate / M": ("fused", 0.125),
    }
    assert len(arms) == 9
    assert {own.finetune.staleness for own in arms.values()} == {0}


def test_accumulation_is_told_by_log_loss_against_exact():
    worse = {"fused": 0.001, "fused, rate / M": 0.023, "exact": 0.0}

    def value(arm, seed, piece, figure):
        optimizer, _, way = arm.partition(", ")
        sign = 1 if figure == "log_loss" else -1
        return 0.3 + 0.01 * seed + sign * worse[way] * (optimizer == "row-wise Adagrad")

    (section,) = ACCUMULATION.page(*found(ACCUMULATION, config(), value))
    row = rows_of(section)["row-wise Adagrad"]
    assert row[:3] == ["0.3100", "+0.0010 ± 0.0000", "+0.0230 ± 0.0000"]
    assert row[3:] == [f"{MINUS}0.0010 ± 0.0000", f"{MINUS}0.0230 ± 0.0000"]
    assert "worse in 3 of 3" in section.words[0]
    assert "no difference with 3 seeds" in section.words[2]


def test_a_feed_without_content_gets_some_and_a_tower_that_all_arms_but_one_have():
    arms = laid_out(CONTENT)
    assert {name: own.model.content_tower for name, own in arms.items()} == {
        "one epoch, co-train": (64,),
        "3 epochs, co-train": (64,),
        "3 epochs, table frozen": (64,),
        "3 epochs, table in the last alone": (64,),
        "3 epochs, table in the last alone, no tower": None,
    }
    assert {own.simulate.content_dim for own in arms.values()} == {16}
    own = laid_out(CONTENT, "simulate.content_dim=4", "model.content_tower=[]")
    assert own["one epoch, co-train"].model.content_tower == ()
    assert {each.simulate.content_dim for each in own.values()} == {4}


def test_a_log_without_content_cannot_say_anything_of_a_tower():
    assert "items.content names no column" in CONTENT.needs(config(text=CLICKS))
    own = config("items={path: items.parquet, content: image}", text=CLICKS)
    assert CONTENT.needs(own) is None
    assert laid_out(CONTENT, "items={path: items.parquet, content: image}", text=CLICKS)


def test_content_is_compared_with_one_epoch_and_the_tower_with_none():
    level = {"3 epochs, table in the last alone": 0.72, "3 epochs, co-train": 0.68}

    def value(arm, seed, piece, figure):
        return level.get(arm, 0.70) + (0.05 if piece == "cold" and "no tower" not in arm else 0.0)

    (section,) = CONTENT.page(*found(CONTENT, config(), value))
    rows = rows_of(section)
    assert [cell[:7] for cell in rows["pooled"]] == [
        f"{MINUS}0.0200",
        "+0.0000",
        "+0.0200",
        "+0.0200",
    ]
    assert rows["cold"][-1].startswith("+0.0700")


@pytest.mark.parametrize(
    ("experiment", "override", "message"),
    [
        (STALENESS, "finetune.cross_fit=true", "finetune.cross_fit is on"),
        (ACCUMULATION, "finetune.cross_fit=true", "finetune.cross_fit is on"),
        (CONTENT, "finetune.schedule.item.recipe=frozen", "finetune.schedule.item says when"),
        (STALENESS, "study.grid={tables.item.optimizer: [sgd]}", "the grid varies"),
    ],
)
def test_a_config_that_cannot_answer_is_told_which_key_is_at_fault(experiment, override, message):
    assert message in experiment.needs(config(override))
