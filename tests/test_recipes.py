import pytest

from thawline.config import parse_config
from thawline.errors import ConfigError
from thawline.training.recipes import RECIPES, components_of, make_plan, make_schedule
from thawline.training.schedule import TrainingWindow


def read(*overrides):
    return parse_config("simulate: {}", overrides)


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("co-train", list(range(12))),
        ("frozen", []),
        ("freeze-until-last", [8, 9, 10, 11]),
        ("train-first", [0, 1, 2, 3]),
        ("window(0.5, 1)", [2, 3, 4, 5]),
        ("window(1.25, 0.5)", [5, 6]),
        ("stratified", list(range(12))),
        ("re-anchor", list(range(12))),
        ("re-init", list(range(12))),
        ("alternate", [2, 3, 6, 7, 10, 11]),
    ],
)
def test_a_recipe_trains_the_table_in_exactly_its_steps(recipe, steps):
    plan = make_plan(recipe, 3)

    assert [step for step in range(12) if plan.trains(step, 4)] == steps


def test_stratified_opens_one_tier_after_the_other():
    plan = make_plan("stratified", 3)

    assert [sorted(plan.open_tiers(step, 1)) for step in range(3)] == [
        ["head"],
        ["head", "torso"],
        ["cold", "head", "tail", "torso"],
    ]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("freeze-until-lst", "did you mean freeze-until-last"),
        ("nonsense", "choose one of co-train"),
        ("window", r"write window\(start, length\)"),
        ("window(1)", r"write window\(start, length\)"),
        ("window(a, b)", r"write window\(start, length\)"),
        ("window(1, true)", r"write window\(start, length\)"),
        ("co-train(1)", "write co-train"),
        ("window(2.5, 1)", "outside a run of 3 epochs"),
        ("window(-1, 1)", "outside a run of 3 epochs"),
        ("window(1, 0)", "ends before it starts"),
    ],
)
def test_a_recipe_that_cannot_be_used_says_what_to_do(recipe, message):
    config = read(f"finetune.recipe={recipe}")

    with pytest.raises(ConfigError, match=message):
        make_schedule(config, [])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_every_recipe_fits_a_run_of_any_length_and_says_what_it_does(recipe, epochs):
    if recipe.name == "window" and epochs == 1:
        pytest.skip("its example needs two epochs")
    text = f"{recipe.name}{recipe.example}" if recipe.parameters else recipe.name

    make_schedule(read(f"finetune.recipe={text}", f"finetune.epochs={epochs}"), [])
    assert recipe.about


def test_components_follow_the_config():
    plain, rich = (
        read(),
        read("model.adapter=bias", "model.content_tower=[8]", "tables.user={column: user_id}"),
    )

    assert components_of(plain, ["device"]) == ["item", "history_action", "ctx_device", "dense"]
    assert components_of(rich, []) == [
        "item",
        "user",
        "adapter",
        "content_tower",
        "history_action",
        "dense",
    ]


def test_every_id_table_follows_the_recipe_unless_its_own_section_says_otherwise():
    config = read(
        "tables.user={column: user_id, reset_state_at_thaw: false}",
        "tables.author={column: author_id, of: item}",
        "finetune.schedule.author={windows: [[2, 3], [0, 0.5]], curve: cosine, warm_up: 0.25}",
        "finetune.schedule.dense={curve: cosine}",
    )
    schedule = make_schedule(config, [])

    assert schedule.of("item").windows == (TrainingWindow(2, 3),)
    assert schedule.of("user").windows == (TrainingWindow(2, 3),)
    assert not schedule.of("user").reset_state
    assert schedule.of("author").windows == (TrainingWindow(0, 0.5), TrainingWindow(2, 3))
    assert schedule.of("author").curve.warm_up == 0.25
    assert schedule.of("dense").windows == (TrainingWindow(0, 3),)
    assert schedule.of("dense").curve.kind == "cosine"
    assert schedule.of("history_action").windows == (TrainingWindow(0, 3),)


def test_which_table_overfits_can_be_asked_by_freezing_each_in_turn():
    config = read(
        "tables.user={column: user_id}",
        "finetune.recipe=co-train",
        "finetune.schedule.user.recipe=frozen",
    )
    schedule = make_schedule(config, [])

    assert schedule.of("user").windows == ()
    assert schedule.of("item").windows == (TrainingWindow(0, 3),)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["finetune.schedule.usr={}"], "no component `usr`.*"),
        (["finetune.schedule.itm={}"], "did you mean item"),
        (["finetune.schedule.adapter={windows: []}"], r"no component `adapter`\n.*model\.adapter"),
        (["finetune.schedule.content_tower={}"], r"`content_tower`\n.*set model\.content_tower"),
        (["finetune.schedule.item={recipe: nothing}"], "finetune.schedule.item.recipe: no recipe"),
        (["finetune.schedule.item={learning_rate: 1}"], "set tables.item.learning_rate"),
        (["finetune.schedule.dense={recipe: stratified}"], "stratified is for ID tables"),
        (["finetune.schedule.item={windows: [[0, 2], [1, 3]]}"], "overlaps"),
        (["finetune.schedule.item={windows: [[2, 4]]}"], "lies outside"),
        (["finetune.schedule.item={recipe: co-train, windows: [[0, 1]]}"], "keep one"),
        (
            [
                "finetune.recipe=co-train",
                "finetune.schedule.history_action={windows: []}",
                "finetune.schedule.dense={windows: []}",
                "model.gradient_paths=[]",
            ],
            "nothing trains from epoch 0 to 3",
        ),
        (["finetune.recipe=re-init", "tables.item.drift_cap=3"], "drop pull and drift_cap"),
    ],
)
def test_a_schedule_that_cannot_be_says_what_to_do(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(read(*overrides), [])
