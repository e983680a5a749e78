"""A study, laid out: grids, arms, baselines, trials and their keys, halving."""

import pytest

from thawline.config import Study, parse_config
from thawline.errors import ConfigError
from thawline.stages.study_report import check
from thawline.study.design import Design
from thawline.study.grid import baseline_values, parse_grid, split_values
from thawline.study.halving import survivors

GRID = {"finetune.recipe": ["co-train", "frozen"], "tables.item.learning_rate": [0.02, 0.2]}


def config(study=None, *overrides):
    parsed = parse_config("simulate: {}", overrides)
    return parsed.model_copy(update={"study": Study.model_validate(study or {"grid": GRID})})


def test_values_are_parted_by_commas_outside_of_brackets_and_quotes_and_read_as_yaml():
    assert split_values("a, window(0.5, 1),[1, {b: 2, c: 3}], 'x,y'") == [
        "a",
        "window(0.5, 1)",
        "[1, {b: 2, c: 3}]",
        "'x,y'",
    ]
    assert parse_grid(
        [
            "finetune.recipe=co-train,window(0.5, 1)",
            "model.mlp=[16],[32, 16]",
            "a.b=1,0.5,true,null",
        ]
    ) == {
        "finetune.recipe": ["co-train", "window(0.5, 1)"],
        "model.mlp": [[16], [32, 16]],
        "a.b": [1, 0.5, True, None],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["finetune.recipe"], r"--grid 'finetune.recipe' has no values"),
        (["=co-train"], "has no values"),
        (["finetune.recipe="], "has no values"),
        (["a.b=1", "a.b=2"], "--grid a.b comes twice"),
        (["a.b=[1"], r"holds no YAML value: \[1"),
    ],
)
def test_an_option_that_is_no_grid_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_grid(options)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"finetune.recip": ["co-train"]}, r"finetune.recip: unknown key[\s\S]*finetune.recipe\?"),
        ({"finetune.epochs": [1, "two"]}, r"the arm epochs two[\s\S]*finetune.epochs"),
        ({"finetune.recipe": ["freze"]}, "the arm freze: finetune.recipe: no recipe 'freze'"),
        ({"windows.test_days": [1]}, r"windows.test_days cannot vary[\s\S]*one dataset"),
        ({"seed": [1, 2]}, r"seed cannot vary[\s\S]*--seeds"),
    ],
)
def test_a_key_or_value_that_no_config_can_have_is_named_before_anything_runs(grid, message):
    with pytest.raises(ConfigError, match=message):
        check(config({"grid": grid}))


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"grid": {"finetune.recipe": []}}, "grid.finetune.recipe has no value"),
        ({"grid": {"finetune.epochs": [1, 1]}}, "grid.finetune.epochs names a value twice"),
        ({"seeds": [0, 0]}, "none twice"),
        ({"seeds": []}, "at least one"),
        ({"seeds": [-1]}, "greater than or equal to 0"),
        ({"halving": {"epochs": [2, 1]}}, "must grow"),
    ],
)
def test_a_section_that_is_no_study_is_refused(study, message):
    with pytest.raises(ValueError, match=message):
        Study.model_validate(study)


def test_arms_are_all_combinations_named_by_what_varies():
    names = [arm.name for arm in Design.of(config()).arms]
    assert names == [
        "co-train, learning_rate 0.02",
        "co-train, learning_rate 0.2",
        "frozen, learning_rate 0.02",
        "frozen, learning_rate 0.2",
    ]
    alike = {"finetune.learning_rate": [1, 2], "pretrain.learning_rate": [1]}
    assert [arm.name for arm in Design.of(config({"grid": alike})).arms] == [
        "learning_rate 1",
        "learning_rate 2",
    ]
    both = alike | {"pretrain.learning_rate": [1, 2]}
    assert Design.of(config({"grid": both})).arms[1].name == (
        "finetune.learning_rate 1, pretrain.learning_rate 2"
    )
    assert [arm.name for arm in Design.of(config({"grid": {}})).arms] == ["the config"]


def test_a_baseline_of_one_key_leaves_the_other_keys_as_in_the_arm():
    def baselines(text):
        study = {"grid": GRID, "baseline": text}
        return [arm.baseline for arm in Design.of(config(study)).arms]

    first = "co-train, learning_rate 0.02"
    assert baselines(None) == [first] * 4
    assert (
        baselines("frozen")
        == [
            "frozen, learning_rate 0.02",
            "frozen, learning_rate 0.2",
        ]
        * 2
    )
    assert (
        baselines("tables.item.learning_rate=0.2, co-train") == ["co-train, learning_rate 0.2"] * 4
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("froze", "the grid has no 'froze'"),
        ("finetune.recipe=0.02", "the grid has no 'finetune.recipe=0.02'"),
        ("1", "is a value of a and of b"),
    ],
)
def test_a_baseline_that_the_grid_does_not_have_once_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        baseline_values(GRID | {"a": [1], "b": [1]}, text)


def test_a_trial_is_the_config_with_the_arms_values_and_the_seed():
    trials = Design.of(config({"grid": GRID, "seeds": [3, 5]})).trials()
    assert [(trial.arm.name[:6], trial.seed) for trial in trials[:5]] == [
        ("co-tra", 3),
        ("co-tra", 3),
        ("frozen", 3),
        ("frozen", 3),
        ("co-tra", 5),
    ]
    last = trials[-1].config
    assert (last.seed, last.finetune.recipe, last.tables.item.learning_rate) == (5, "frozen", 0.2)
    assert last.gate.champion == "none"
    assert last.study == Study()


def test_a_trials_key_changes_with_what_decides_its_figures_and_with_nothing_else():
    def key(*overrides, version="v1", **study):
        own = {"grid": {"finetune.recipe": ["frozen"]}, "seeds": [0]} | study
        return Design.of(config(own, *overrides)).trials()[0].key(version)

    same = [
        key(),
        key("workdir=elsewhere"),
        key("runtime.threads=3"),
        key("gate.min_auc=0.6"),
        key("tracking.experiment=other"),
        key("finetune.checkpoint.every_steps=7"),
        key(jobs=4, metric="mrr"),
        key(grid={"finetune.recipe": ["frozen", "co-train"]}),
    ]
    assert len(set(same)) == 1
    others = [
        key("finetune.epochs=5"),
        key("evaluation.hit_at=5"),
        key("pretrain.epochs=1"),
        key(version="v2"),
        key(seeds=[1]),
    ]
    assert len({same[0], *others}) == 6


def test_trials_share_pretrained_rows_unless_something_that_pretraining_reads_differs():
    def tables(**study):
        trials = Design.of(config({"seeds": [0, 1]} | study)).trials()
        return len({trial.table_key("v") for trial in trials})

    assert tables(grid=GRID) == 1
    assert tables(grid=GRID, pretrain="each-seed") == 2
    assert tables(grid={"pretrain.epochs": [0, 1], "model.adapter": ["off", "bias"]}) == 2
    assert tables(grid={"model.dim": [8, 16]}, pretrain="each-seed") == 4


def test_rounds_of_halving_set_the_epochs_and_end_with_the_configs_own():
    study = {"grid": {"finetune.recipe": ["co-train", "frozen"]}, "seeds": [0]}
    design = Design.of(config(study | {"halving": {"epochs": [1, 2]}}))
    assert list(design.rounds) == [1, 2, 3]
    assert [t.config.finetune.epochs for t in design.trials(2, design.arms[1:])] == [2]
    assert {t.epochs for t in design.trials(3)} == {3}
    with pytest.raises(ConfigError, match=r"3 epochs are not fewer than .* finetune.epochs=3"):
        Design.of(config(study | {"halving": {"epochs": [3]}}))
    study["grid"]["finetune.epochs"] = [2, 3]
    with pytest.raises(ConfigError, match=r"finetune.epochs varies, and study.halving sets it"):
        Design.of(config(study | {"halving": {"epochs": [1]}}))


def test_an_arm_that_a_short_round_cannot_run_is_named_with_the_round():
    study = {"grid": {"finetune.recipe": ["window(1, 1)"]}, "halving": {"epochs": [1]}}
    with pytest.raises(ConfigError, match=r"the arm window\(1, 1\), in the round of 1 epochs"):
        check(config(study))


def test_halving_keeps_one_arm_in_eta_rounded_up_and_its_baseline():
    scores = {"a": 0.70, "b": 0.74, "c": None, "d": 0.72, "e": 0.71}
    first = dict.fromkeys(scores, "a")
    # 5 of 2 each are 2.5, so 3: b, d, e; and a, which they are compared with.
    assert survivors(scores, first, figure="auc", eta=2) == ["a", "b", "d", "e"]
    # 5 of 5 each is 1.
    assert survivors(scores, first, figure="auc", eta=5) == ["a", "b"]
    assert survivors(scores, {k: k for k in scores}, figure="log_loss", eta=3) == ["a", "e"]
    assert survivors({"a": None, "b": None}, {"a": "a", "b": "a"}, figure="auc", eta=2) == []


ARMS = {
    "co-train": {"set": {"finetune.recipe": "co-train"}},
    "late": {"set": {"finetune.recipe": "freeze-until-last", "model.adapter": "bias"}},
    "window(0.5, 1)": {"set": {"finetune.recipe": "window(0.5, 1)"}, "baseline": "late"},
}
RATES = {"tables.item.learning_rate": [0.02, 0.2]}


def test_named_arms_run_with_every_combination_of_the_grid():
    design = Design.of(config({"arms": ARMS, "grid": RATES, "seeds": [1]}))
    assert [(arm.name, arm.baseline) for arm in design.arms] == [
        ("co-train, learning_rate 0.02", "co-train, learning_rate 0.02"),
        ("co-train, learning_rate 0.2", "co-train, learning_rate 0.2"),
        ("late, learning_rate 0.02", "co-train, learning_rate 0.02"),
        ("late, learning_rate 0.2", "co-train, learning_rate 0.2"),
        ("window(0.5, 1), learning_rate 0.02", "late, learning_rate 0.02"),
        ("window(0.5, 1), learning_rate 0.2", "late, learning_rate 0.2"),
    ]
    assert design.arms[3].values == {"arm": "late", "tables.item.learning_rate": 0.2}
    trained = design.trials()[3].config
    assert trained.finetune.recipe == "freeze-until-last"
    assert (trained.model.adapter, trained.tables.item.learning_rate) == ("bias", 0.2)
    alone = Design.of(config({"arms": ARMS, "grid": {}}))
    assert [arm.name for arm in alone.arms] == list(ARMS)


def test_an_arm_that_sets_a_section_leaves_the_keys_that_it_does_not_name():
    nested = {"finetune": {"recipe": "frozen", "schedule": {"dense": {"recipe": "co-train"}}}}
    arms = {"a": {"set": nested}, "b": {}}
    design = Design.of(config({"arms": arms}, "finetune.epochs=2"))
    assert design.arms[0].changes == {
        "finetune.recipe": "frozen",
        "finetune.schedule": {"dense": {"recipe": "co-train"}},
    }
    trial = design.trials()[0].config
    assert (trial.finetune.recipe, trial.finetune.epochs) == ("frozen", 2)
    halved = {"arms": {"a": {"set": {"finetune": {"epochs": 3}}}}, "halving": {"epochs": [1]}}
    with pytest.raises(ConfigError, match=r"study.arms: finetune.epochs varies"):
        Design.of(config(halved))


def test_the_baseline_may_be_a_named_arm_or_none_or_fix_the_grid():
    def baselines(text, arms=ARMS):
        study = {"arms": arms, "grid": RATES, "baseline": text}
        return [arm.baseline for arm in Design.of(config(study)).arms]

    both = ["late, learning_rate 0.02", "late, learning_rate 0.2"]
    assert baselines("late") == both * 3
    assert baselines("arm=late") == both * 3
    fixed = baselines("late, tables.item.learning_rate=0.2")
    assert fixed == [both[1]] * 6
    # An arm's own baseline wins; its own name is none.
    alone = ARMS | {"window(0.5, 1)": {"baseline": "window(0.5, 1)"}}
    assert baselines("late", alone)[4:] == [
        "window(0.5, 1), learning_rate 0.02",
        "window(0.5, 1), learning_rate 0.2",
    ]
    named = {"arms": {"1": {}, "2": {}}, "baseline": "2"}
    assert [arm.baseline for arm in Design.of(config(named)).arms] == ["2", "2"]


def test_contrasts_are_of_arms_at_each_combination_of_the_grid():
    study = {"arms": ARMS, "contrasts": {"gain": {"late": 1, "co-train": -1}}}
    (only,) = Design.of(config(study)).contrasts
    assert (only.name, only.weights) == ("gain", {"late": 1, "co-train": -1})
    (first, second) = Design.of(config(study | {"grid": RATES})).contrasts
    assert (first.name, second.name) == ("gain, learning_rate 0.02", "gain, learning_rate 0.2")
    assert second.weights == {"late, learning_rate 0.2": 1, "co-train, learning_rate 0.2": -1}
    across = {"late, learning_rate 0.2": 1, "late, learning_rate 0.02": -1}
    found = Design.of(config(study | {"grid": RATES, "contrasts": {"rate": across}})).contrasts
    assert [(each.name, each.weights) for each in found] == [("rate", across)]
    grid = {"grid": {"finetune.recipe": ["co-train", "frozen"]}}
    found = Design.of(config(grid | {"contrasts": {"x": {"frozen": 2}}})).contrasts
    assert found[0].weights == {"frozen": 2}


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"grid": {"finetune.recipe": ["frozen"]}}, r"co-train.set: finetune.recipe is set by"),
        ({"grid": {"model": [{}]}}, "late.set: model.adapter is set by the grid's model too"),
        ({"arms": {"a": {"set": {"seed": 3}}}}, r"arms.a.set: seed cannot vary[\s\S]*--seeds"),
        ({"arms": {"a": {"set": {"finetune.epoch": 3}}}}, r"arms: the arm a[\s\S]*unknown key"),
        ({"contrasts": {"x": {"early": 1}}}, r"contrasts.x: there is no arm 'early'"),
        ({"contrasts": {"late": {"co-train": 1}}}, "late is an arm's name"),
        ({"halving": {"epochs": [1]}, "arms": {"a": {"set": {"finetune.epochs": 3}}}},
         "study.arms: finetune.epochs varies"),
        ({"baseline": "early"}, "the study has no 'early'"),
        ({"grid": {"pretrain.epochs": [1, "1"]}}, "two arms are called co-train, epochs 1"),
    ],
)  # fmt: skip
def test_arms_and_contrasts_that_cannot_be_are_named(study, message):
    with pytest.raises(ConfigError, match=message):
        check(config({"arms": ARMS} | study))


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"arms": {"a": {"baseline": "b"}}}, "arms.a.baseline: there is no arm 'b'"),
        ({"contrasts": {"x": {}}}, "contrasts.x needs an arm"),
        ({"contrasts": {"x": {"a": 0, "b": 1}}}, "no weight of 0"),
    ],
)
def test_a_section_of_arms_that_is_no_study_is_refused(study, message):
    with pytest.raises(ValueError, match=message):
        Study.model_validate(study)
