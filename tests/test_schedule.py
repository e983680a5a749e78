import pytest

from thawline.errors import ConfigError
from thawline.training.schedule import RECIPES, Schedule, TrainingWindow, make_schedule


def trained_steps(recipe, epochs=3, steps_per_epoch=4):
    schedule = make_schedule(recipe, epochs)
    return [s for s in range(epochs * steps_per_epoch) if schedule.item_trains(s, steps_per_epoch)]


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("co-train", list(range(12))),
        ("frozen", []),
        ("freeze-until-last", [8, 9, 10, 11]),
        ("train-first", [0, 1, 2, 3]),
        ("window(0.5, 1)", [2, 3, 4, 5]),
        ("window(1.25, 0.5)", [5, 6]),
    ],
)
def test_a_recipe_trains_the_table_in_exactly_its_steps(recipe, steps):
    assert trained_steps(recipe) == steps


def test_the_share_of_an_epoch_follows_the_window():
    schedule = make_schedule("window(0.75, 1.5)", 3)

    assert [schedule.item_share(epoch) for epoch in range(3)] == [0.25, 1.0, 0.25]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("freeze-until-lst", "did you mean freeze-until-last"),
        ("nonsense", "choose one of co-train"),
        ("window", r"write window\(start, length\)"),
        ("window(1)", r"write window\(start, length\)"),
        ("window(a, b)", r"write window\(start, length\)"),
        ("co-train(1)", "write co-train"),
        ("window(2.5, 1)", "outside a run of 3 epochs"),
        ("window(-1, 1)", "outside a run of 3 epochs"),
        ("window(1, 0)", "ends before it starts"),
    ],
)
def test_a_recipe_that_cannot_be_used_says_what_to_do(recipe, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(recipe, 3)


def test_windows_that_overlap_are_refused():
    with pytest.raises(ConfigError, match="overlaps"):
        Schedule(3, (TrainingWindow(0, 1.5), TrainingWindow(1, 2)))


def test_every_recipe_says_what_it_does():
    assert all(recipe.about and recipe.name == name for name, recipe in RECIPES.items())
