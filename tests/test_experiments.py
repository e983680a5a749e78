"""Designed experiments: each lays out a valid study of the arms that its question needs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thawline.cli import app
from thawline.config import load_config, parse_config
from thawline.errors import ConfigError
from thawline.stages.experiment import find, why_not
from thawline.study.design import Design, data_key
from thawline.study.experiments import EXPERIMENTS
from thawline.study.experiments.optimizers import variants
from thawline.training.recipes import make_schedule

EXAMPLES = Path(__file__).parent.parent / "examples"
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


def config(*overrides):
    return parse_config("simulate: {}", overrides)


def laid_out(name, *overrides):
    """The trials of an experiment's first seed, by arm."""
    design = Design.of(EXPERIMENTS[name].lay_out(config(*overrides)))
    return {trial.arm.name: trial.config for trial in design.trials() if trial.seed == 0}


def windows_of(own, component="item"):
    plan = make_schedule(own, ["device"]).plans[component]
    return [(window.start, window.end) for window in plan.windows]


@pytest.mark.parametrize("name", [name for name, own in EXPERIMENTS.items() if not own.measure])
@pytest.mark.parametrize("example", ["feed", "news", "movielens"])
def test_every_example_can_run_every_experiment_or_is_told_why_not(name, example):
    own = load_config(EXAMPLES / f"{example}.yaml")
    why = why_not(own, EXPERIMENTS[name])
    if why is not None:
        assert name not in OWN
        assert len(why) > 20
        return
    design = Design.of(EXPERIMENTS[name].lay_out(own))
    trials = design.trials()
    keys = {trial.key(data_key(trial.config)) for trial in trials}
    assert len(keys) == len(trials) == 3 * len(design.arms) > 3
    for trial in trials:
        make_schedule(trial.config, list(own.events.context))
        assert trial.config.evaluation.bootstrap == 0
        assert trial.config.evaluation.retrieval_requests == 0


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_asks_and_what_others_have_found(name):
    own = EXPERIMENTS[name]
    assert own.name == name
    assert own.title
    assert "?" in own.question
    assert all(sentence.endswith(".") for sentence in own.reported)


def test_seeds_metric_and_grid_are_the_users_and_arms_are_crossed_with_the_grid():
    own = config("study.seeds=[4, 5]", "study.metric=user_auc", "study.jobs=3")
    grid = {"tables.item.learning_rate": [0.02, 0.2]}
    own = own.model_copy(update={"study": own.study.model_copy(update={"grid": grid})})
    study = EXPERIMENTS["consistency"].lay_out(own).study
    assert (study.seeds, study.metric, study.jobs) == ([4, 5], "user_auc", 3)
    design = Design.of(EXPERIMENTS["consistency"].lay_out(own))
    assert [arm.name for arm in design.arms[:2]] == [
        "co-train, learning_rate 0.02",
        "co-train, learning_rate 0.2",
    ]
    assert len(design.arms) == 8
    assert "re-anchor minus freeze-until-last, learning_rate 0.2" in [
        each.name for each in design.contrasts
    ]


def test_experiments_share_the_trials_of_arms_that_are_the_same():
    keys = {
        name: {trial.key("v") for trial in Design.of(own.lay_out(config())).trials()}
        for name, own in EXPERIMENTS.items()
    }
    # Co-training and freeze-until-last, three seeds each.
    for name in ("adapters", "remedies"):
        assert len(keys["consistency"] & keys[name]) == 6
    assert len(keys["gradient-paths"] & keys["consistency"]) == 3


def test_timing_slides_a_window_of_one_epoch_through_two():
    arms = laid_out("timing")
    assert {name: windows_of(own) for name, own in arms.items()} == {
        "window(0, 1)": [(0, 1)],
        "window(0.25, 1)": [(0.25, 1.25)],
        "window(0.5, 1)": [(0.5, 1.5)],
        "window(0.75, 1)": [(0.75, 1.75)],
        "window(1, 1)": [(1, 2)],
    }
    assert {own.finetune.epochs for own in arms.values()} == {2}


def test_the_contrast_of_timing_is_the_slope_of_a_line_through_the_starts():
    (contrast,) = Design.of(EXPERIMENTS["timing"].lay_out(config())).contrasts
    line = {f"window({start:g}, 1)": 3 - 2 * start for start in (0, 0.25, 0.5, 0.75, 1)}
    assert sum(contrast.weights[arm] * line[arm] for arm in contrast.weights) == pytest.approx(-2)
    assert sum(contrast.weights.values()) == pytest.approx(0)


def test_which_table_freezes_each_table_in_turn_and_splits_by_request_where_users_have_one():
    arms = laid_out("which-table")
    frozen = {
        name: [table for table in ("item", "user") if not windows_of(own, table)]
        for name, own in arms.items()
    }
    assert frozen == {
        "none frozen": [],
        "item frozen": ["item"],
        "user frozen": ["user"],
        "all frozen": ["item", "user"],
        "one epoch": [],
    }
    assert arms["one epoch"].finetune.epochs == 1
    assert {own.windows.holdout_by for own in arms.values()} == {"request"}
    assert {data_key(own) for own in arms.values()} != {data_key(config())}


def test_which_table_takes_the_tables_that_the_config_has():
    arms = laid_out("which-table", "tables.author={column: author_id, of: item}")
    assert "author frozen" in arms
    assert "user frozen" not in arms
    assert {own.windows.holdout_by for own in arms.values()} == {"user"}


def test_gradient_paths_are_cut_as_in_the_article():
    paths = {name: own.model.gradient_paths for name, own in laid_out("gradient-paths").items()}
    whole = ("contrastive", "transformer", "feature_cross", "history")
    assert paths == {
        "one epoch": whole,
        "co-train": whole,
        "frozen": whole,
        "contrastive": ("contrastive",),
        "contrastive + transformer": ("contrastive", "transformer"),
        "contrastive + feature cross": ("contrastive", "feature_cross"),
        "contrastive + both": ("contrastive", "transformer", "feature_cross"),
    }
    design = Design.of(EXPERIMENTS["gradient-paths"].lay_out(config()))
    assert {arm.baseline for arm in design.arms} == {"one epoch"}


def test_optimizers_are_compared_with_dense_adam_and_each_with_its_own_co_training():
    design = Design.of(EXPERIMENTS["optimizers"].lay_out(config()))
    against = {arm.name: arm.baseline for arm in design.arms}
    assert against["row-wise Adagrad, co-train"] == "dense Adam, co-train"
    assert against["row-wise Adagrad, freeze-until-last"] == "row-wise Adagrad, co-train"
    assert len(against) == 14


def test_the_rates_of_optimizers_follow_that_of_the_config():
    low, high = (
        variants(config(f"tables.item.learning_rate={rate}", "tables.item.drift_cap=2"))
        for rate in (0.01, 0.1)
    )
    for name, own in high.items():
        assert own["learning_rate"] == pytest.approx(10 * low[name]["learning_rate"])
        # A step takes the same share of a row's drift back at each rate.
        assert own["pull"] * own["learning_rate"] == pytest.approx(
            low[name]["pull"] * low[name]["learning_rate"]
        )
    bounded = [name for name, own in high.items() if own["drift_cap"] is not None]
    assert bounded == ["dense Adam, drift capped"]


def test_windows_are_the_configs_and_half_of_it_with_one_to_three_epochs():
    arms = laid_out("windows", "windows.finetune_days=10")
    assert list(arms)[:3] == [
        "10 days, 1 epoch",
        "10 days, 2 epochs, co-train",
        "10 days, 2 epochs, frozen",
    ]
    assert len(arms) == 2 * (1 + 2 * 4)
    own = arms["5 days, 3 epochs, train-first"]
    assert (own.windows.finetune_days, own.finetune.epochs) == (5, 3)
    assert windows_of(own) == [(0, 1)]
    assert len({data_key(own) for own in arms.values()}) == 2


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("consistency", ["finetune.epochs=1"], "finetune.epochs is 1"),
        ("timing", ["finetune.schedule.item.recipe=frozen"], "finetune.schedule.item says when"),
        ("gradient-paths", ["model.contrastive_weight=0"], "model.contrastive_weight is 0"),
        ("remedies", ["finetune.accumulation.micro_batches=2"], "one micro-batch"),
        ("remedies", ["tables.engine=sharded"], "tables.engine=local"),
        ("remedies", ["tables.item.pull=0.1"], "tables.item is held near"),
        ("windows", ["windows.finetune_days=1"], "no half"),
    ],
)
def test_a_config_that_cannot_answer_is_told_which_key_is_at_fault(name, overrides, message):
    assert message in why_not(config(*overrides), EXPERIMENTS[name])


def test_a_grid_over_the_rate_that_arms_set_is_refused():
    own = config()
    grid = {"tables.item.learning_rate": [0.02, 0.2]}
    own = own.model_copy(update={"study": own.study.model_copy(update={"grid": grid})})
    assert "--set tables.item.learning_rate" in why_not(own, EXPERIMENTS["optimizers"])
    assert why_not(own, EXPERIMENTS["timing"]) is None


def test_with_a_dataset_given_experiments_that_need_others_are_left_out():
    left_out = {name for name in OWN if why_not(config(), EXPERIMENTS[name], "a/dataset")}
    assert left_out == {"which-table", "windows"}


def test_an_unknown_experiment_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"no experiment 'timings'[\s\S]*did you mean timing"):
        find("timings")


def test_the_command_has_a_subcommand_an_experiment_with_its_question():
    found = CliRunner().invoke(app, ["experiment", "--help"])
    assert found.exit_code == 0
    for name in (*EXPERIMENTS, "all", "list"):
        assert f" {name} " in found.output
    one = CliRunner().invoke(app, ["experiment", "timing", "--help"])
    words = " ".join(one.output.replace("│", " ").split())
    assert "Does it matter when within a run the ID tables get their one epoch" in words
    assert "--seeds" in words
    listed = CliRunner().invoke(app, ["experiment", "list", "--set", "windows.finetune_days=1"])
    words = " ".join(listed.output.split())
    assert "cannot run: windows.finetune_days is 1" in words
