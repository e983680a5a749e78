import math

import pytest

from thawline.errors import ConfigError
from thawline.training.schedule import Curve, Plan, Schedule, TrainingWindow
from thawline.training.timeline import draw, lines


def window(start, end):
    return TrainingWindow(start, end)


def test_a_plan_trains_in_exactly_the_steps_of_its_windows():
    plan = Plan((window(0, 0.5), window(1.25, 2)))

    assert [step for step in range(12) if plan.trains(step, 4)] == [0, 1, 5, 6, 7]
    assert [plan.share(epoch) for epoch in range(3)] == [0.5, 0.75, 0.0]


def test_tiers_train_in_windows_of_their_own_and_the_plan_in_their_union():
    plan = Plan.by_tier({"head": [window(0, 1)], "torso": [window(0.5, 2)], "tail": []})

    assert plan.windows == (window(0, 2),)
    assert [sorted(plan.open_tiers(step, 2)) for step in range(5)] == [
        ["head"],
        ["head", "torso"],
        ["torso"],
        ["torso"],
        [],
    ]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (Curve(), [1, 1, 1, 1, 1, 1]),
        (Curve(warm_up=0.5), [0.5, 1, 1, 1, 1, 1]),
        (Curve("cosine"), [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)]),
        (
            Curve("cosine", warm_up=0.5),
            [0.5, 1, *((1 + math.cos(math.pi * i / 4)) / 2 for i in range(4))],
        ),
        (Curve("cosine", restart=True), [1, 0.5, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
        (Curve(warm_up=0.5, restart=True), [0.5, 1, 0.5, 1, 1, 1]),
    ],
)
def test_a_curve_paces_the_trained_steps(curve, expected):
    plan = Plan((window(0, 0.5), window(1, 2)), curve=curve)
    steps = [step for step in range(8) if plan.trains(step, 4)]

    assert steps == [0, 1, 4, 5, 6, 7]
    assert [plan.factor(step, 4) for step in steps] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((window(2, 1),)), r"window \[2, 1\) of `user` ends before it starts"),
        (Plan((window(1, 1),)), "ends before it starts"),
        (Plan((window(math.nan, 1),)), "ends before it starts"),
        (Plan((window(2.5, 3.5),)), "lies outside a run of 3 epochs"),
        (Plan((window(-1, 1),)), "lies outside a run of 3 epochs"),
        (Plan((window(0, 1.5), window(1, 2))), "overlaps the one before"),
        (Plan.by_tier({"head": [window(0, 1), window(0.5, 2)]}), "overlaps the one before"),
        (Plan.by_tier({"head": [window(0, 4)]}), "lies outside"),
        (Plan((window(0, 1),), curve=Curve(warm_up=2)), "warms up for 2 epochs but trains for 1"),
    ],
)
def test_windows_that_cannot_be_are_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(3, {"user": plan})


def test_a_time_in_which_nothing_trains_is_refused():
    schedule = Schedule(3, {"item": Plan((window(2, 3),)), "dense": Plan((window(0, 1.5),))})

    with pytest.raises(ConfigError, match=r"nothing trains from epoch 1\.5 to 2"):
        schedule.require_training(["item", "dense"])
    schedule.require_training(["item", "dense", "adapter"])


def test_the_timeline_shows_what_trains_when():
    schedule = Schedule(
        2,
        {
            "item": Plan.by_tier({"head": [window(0, 2)], "tail": [window(1, 2)]}),
            "user": Plan((window(0.5, 1.25),)),
        },
    )
    anew = Plan((window(0, 2),), renewal="random")

    assert draw(schedule.of("user"), 2, cells=4) == {"": "··━━|━···"}
    assert draw(anew, 2, cells=2) == {"": "━━↺━━"}
    assert lines(schedule, ["item", "user", "dense"]) == [
        ("item head", "━━━━━━━━━━━━|━━━━━━━━━━━━"),
        ("item tail", "············|━━━━━━━━━━━━"),
        ("user", "······━━━━━━|━━━·········"),
        ("dense", "━━━━━━━━━━━━|━━━━━━━━━━━━"),
    ]


@pytest.mark.parametrize(("epochs", "cells"), [(1, 12), (4, 12), (5, 6), (10, 4), (17, 2), (99, 2)])
def test_the_timeline_of_a_long_run_has_fewer_cells_an_epoch(epochs, cells):
    always = Plan((window(0, epochs),))

    assert draw(always, epochs) == {"": "|".join(epochs * [cells * "━"])}
