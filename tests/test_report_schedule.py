"""What a report says and draws of a schedule, from what fine-tuning writes of it."""

import json
import re

import numpy as np
import pytest

from thawline.config import parse_config
from thawline.evaluation import epoch_plots, schedule
from thawline.training.recipes import components_of, make_schedule
from thawline.training.timeline import describe


def described(*overrides, context=()):
    config = parse_config("simulate: {}", list(overrides))
    made = describe(make_schedule(config, list(context)), components_of(config, context))
    return json.loads(json.dumps(made))


ALWAYS = "every example is seen again after its rows were written"
NEVER = "no example is seen again after its rows were written"


@pytest.mark.parametrize(
    ("recipe", "epochs", "sentence"),
    [
        ("freeze-until-last", 3, f"The item table trains in epoch 3 of 3 only; {NEVER}."),
        ("co-train", 1, f"The item table trains throughout; {NEVER}."),
        ("co-train", 2, f"The item table trains in all 2 epochs; {ALWAYS}."),
        ("train-first", 3, f"The item table trains in epoch 1 of 3 only; {ALWAYS}."),
        ("window(1, 2)", 4, f"The item table trains in epochs 2 to 3 of 4 only; {ALWAYS}."),
        (
            "window(0.25, 1)",
            2,
            "The item table trains from 0.25 to 1.25 of 2 epochs only; 75% of the examples are "
            "seen again after their rows were written.",
        ),
        # Half of the first epoch's are written, then half of the rest: 1 - 0.5^2.
        (
            "alternate",
            3,
            "The item table trains from 0.5 to 1, from 1.5 to 2 and from 2.5 to 3 of 3 epochs "
            "only; 75% of the examples are seen again after their rows were written.",
        ),
        (
            "alternate",
            6,
            "The item table trains in 6 spans, 3 of 6 epochs in all; 97% of the examples are seen "
            "again after their rows were written.",
        ),
        ("frozen", 3, "The item table is frozen: no example is written into its rows."),
        (
            "re-anchor",
            3,
            f"The item table trains in all 3 epochs; {ALWAYS}, but each epoch starts from the "
            "first rows, which know nothing of it.",
        ),
        (
            "re-init",
            3,
            f"The item table trains in all 3 epochs; {ALWAYS}, but each epoch starts from new "
            "random rows, which know nothing of it.",
        ),
    ],
)
def test_a_recipe_is_said_in_words(recipe, epochs, sentence):
    found = described(f"finetune.recipe={recipe}", f"finetune.epochs={epochs}")
    assert schedule.words(found) == [sentence]


def test_tiers_are_spoken_of_one_by_one_and_parts_of_the_network_not_at_all():
    found = described(
        "finetune.recipe=stratified",
        "finetune.epochs=2",
        "tables.user={column: user_id}",
        "finetune.schedule.user.windows=[]",
        "model.adapter=full",
        context=["surface"],
    )
    assert schedule.words(found) == [
        f"The head rows of the item table train in all 2 epochs; {ALWAYS}.",
        "The torso rows of the item table train from 0.5 to 2 of 2 epochs only; 50% of the "
        "examples are seen again after their rows were written.",
        f"The tail rows of the item table train in epoch 2 of 2 only; {NEVER}.",
        f"The cold rows of the item table train in epoch 2 of 2 only; {NEVER}.",
        "The user table is frozen: no example is written into its rows.",
    ]


def test_tables_that_train_alike_share_a_sentence():
    found = described(
        "tables.user={column: user_id}",
        "tables.author={column: author_id, of: item}",
        "tables.place={column: place, of: item}",
        "finetune.schedule.author.recipe=frozen",
        "finetune.schedule.place.recipe=frozen",
    )
    assert schedule.words(found) == [
        f"The item and user tables train in epoch 3 of 3 only; {NEVER}.",
        "The author and place tables are frozen: no example is written into their rows.",
    ]


@pytest.fixture
def drawn(monkeypatch):
    """The tracks that `timeline` hands to the drawing, by name."""

    def draw(found):
        kept = {}
        monkeypatch.setattr(
            epoch_plots,
            "timeline",
            lambda tracks, epochs, label: kept.update({track.name: track for track in tracks}),
        )
        schedule.timeline(found)
        return kept

    return draw


def test_every_component_and_every_tier_has_a_line_in_its_colour(drawn):
    tracks = drawn(
        described(
            "finetune.recipe=stratified",
            "tables.user={column: user_id}",
            "finetune.schedule.user.recipe=re-init",
            "finetune.schedule.dense.windows=[[0, 1], [1.5, 3]]",
            context=["surface"],
        )
    )
    assert {name: track.kind for name, track in tracks.items()} == {
        "item head": "head",
        "item torso": "torso",
        "item tail": "tail",
        "item cold": "cold",
        "user": "table",
        "history_action": "network",
        "ctx_surface": "network",
        "dense": "network",
    }
    assert tracks["item torso"].spans == [[(1.0, 1.0), (3.0, 1.0)]]
    assert tracks["dense"].spans == [[(0.0, 1.0), (1.0, 1.0)], [(1.5, 1.0), (3.0, 1.0)]]
    assert (tracks["user"].renewals, tracks["item head"].renewals) == ([1, 2], [])


def test_curves_follow_the_learning_rate(drawn):
    tracks = drawn(
        described(
            "finetune.schedule.item={windows: [[0, 1], [2, 3]], curve: cosine}",
            "finetune.schedule.dense={curve: cosine, warm_up: 1}",
        )
    )
    # Over the two epochs that are trained: half a cosine, which is at 1/2 in the middle.
    first, second = (np.array(span) for span in tracks["item"].spans)
    wanted = np.concatenate([first[:-1, 0], second[:-1, 0] - 1])
    np.testing.assert_allclose(
        np.concatenate([first[:-1, 1], second[:-1, 1]]),
        (1 + np.cos(np.pi * wanted / 2)) / 2,
        atol=1e-9,
    )
    assert (first[-1, 0], second[0, 0], second[-1, 0]) == (1, 2, 3)
    (dense,) = (np.array(span) for span in tracks["dense"].spans)
    assert dense[dense[:, 1].argmax(), 0] == pytest.approx(1, abs=0.03)


def test_a_short_window_of_a_curve_is_drawn(drawn):
    tracks = drawn(described("finetune.schedule.item={windows: [[0.5, 0.501]], curve: cosine}"))
    ((*_, end),) = tracks["item"].spans
    assert end[0] == 0.501


def test_a_timeline_names_what_it_shows_and_marks_new_rows():
    plain, renewed = (
        schedule.timeline(described(f"finetune.recipe={recipe}", context=["x" * 40]))
        for recipe in ("co-train", "re-init")
    )
    for name in ("item", "dense", f"ctx_{'x' * 17}…"):
        assert f">{name}</text>" in plain
    label = re.search(r'aria-label="([^"]*)"', renewed)
    assert label is not None
    assert "each epoch starts from new random rows" in label.group(1)
    assert "var(--paper)" in renewed
    assert "var(--paper)" not in plain


def test_drift_is_gathered_by_table():
    epochs = [
        {"drift": {"item": {"head": 0.1}, "user": {}}},
        {},
        {"drift": {"item": {"head": 0.3, "tail": 0.2}, "user": {"cold": 1.5}}},
    ]
    assert schedule.drifts(epochs) == {
        "item": [(1, {"head": 0.1}), (3, {"head": 0.3, "tail": 0.2})],
        "user": [(3, {"cold": 1.5})],
    }


def test_the_training_loss_is_drawn_part_by_part_and_breaks_between_epochs():
    drawn = epoch_plots.losses_by_epoch(
        [[0.9, 0.8, None, 0.7], [0.5], [None]], {"next": [0.6, 0.65, None]}, [], "Losses"
    )
    lines = [
        [tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
        for path, style in re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', drawn)
        if "stroke-width: 2.2" in style and "currentColor" in style
    ]
    first, second = sorted(lines)
    # Centres of the quarters of an epoch: 1/8, 3/8 and 7/8; 0.5 stands for the whole of the next.
    assert len(first) == 3
    quarter = first[1][0] - first[0][0]
    assert first[2][0] - first[1][0] == pytest.approx(2 * quarter, rel=1e-3)
    assert second[0][0] - first[2][0] == pytest.approx(quarter / 2, rel=1e-3)
    assert second[1][0] - second[0][0] == pytest.approx(4 * quarter, rel=1e-3)
    # A page's y grows downwards: from 0.9 to 0.7 and 0.5.
    assert second[0][1] - first[2][1] == pytest.approx(first[2][1] - first[0][1], rel=1e-3)
