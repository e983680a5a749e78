"""Self-influence and the leak: what is laid out, and pages whose numbers are worked out by hand."""

from pathlib import Path

import pytest
from experiment_studies import found, reading, rows_of

from thawline.config import load_config, parse_config
from thawline.evaluation.formatting import DASH, MINUS
from thawline.study.design import Design, data_key
from thawline.study.experiments import EXPERIMENTS
from thawline.study.experiments.leak import share_made

REPLAY, LEAK = EXPERIMENTS["self-influence"], EXPERIMENTS["leak"]
NEWS = Path(__file__).parent.parent / "examples" / "news.yaml"
NOISE = {0: 0.0, 1: 0.001, 2: 0.003}
"""By seed: shared by all arms, so that it cancels out in differences."""


def config(*overrides):
    return parse_config("simulate: {}", overrides)


def laid_out(experiment, *overrides):
    """The configs of an experiment's first seed, by arm."""
    design = Design.of(experiment.lay_out(config(*overrides)))
    return {trial.arm.name: trial.config for trial in design.trials() if trial.seed == 0}


def weights(experiment, *overrides):
    design = Design.of(experiment.lay_out(config(*overrides)))
    return {contrast.name: contrast.weights for contrast in design.contrasts}


def test_the_table_trains_in_the_first_third_and_then_examples_are_replayed_or_fresh():
    arms = laid_out(REPLAY, "finetune.epochs=5", "tables.user={column: user_id}")
    assert {
        name: (own.finetune.recipe, own.finetune.examples, own.tables.item.learning_rate)
        for name, own in arms.items()
    } == {
        "train-first, replay": ("train-first", "replay", 0.02),
        "train-first, fresh": ("train-first", "fresh", 0.02),
        "train-first at 10 x the rate, replay": ("train-first", "replay", 0.2),
        "train-first at 10 x the rate, fresh": ("train-first", "fresh", 0.2),
        "frozen, replay": ("frozen", "replay", 0.02),
        "frozen, fresh": ("frozen", "fresh", 0.02),
    }
    assert {own.finetune.epochs for own in arms.values()} == {3}
    high = arms["train-first at 10 x the rate, fresh"].tables.others["user"]
    assert high.learning_rate == pytest.approx(0.2)


def test_a_grid_over_the_rate_takes_the_place_of_the_high_one():
    own = config()
    grid = {"tables.item.learning_rate": [0.01, 0.1]}
    own = own.model_copy(update={"study": own.study.model_copy(update={"grid": grid})})
    for experiment in (REPLAY, LEAK):
        design = Design.of(experiment.lay_out(own))
        assert len(design.arms) == 8
        assert not any("10 x" in arm.name for arm in design.arms)


def test_the_cost_of_replay_is_taken_by_tier_with_the_general_cost_of_repeating_taken_off():
    points = {
        # replay, fresh: repeating costs 0.010 as such, and 0.005 more where rows were written.
        ("train-first", "replay"): 0.700,
        ("train-first", "fresh"): 0.715,
        ("frozen", "replay"): 0.680,
        ("frozen", "fresh"): 0.690,
        ("train-first at 10 x the rate", "replay"): 0.600,
        ("train-first at 10 x the rate", "fresh"): 0.660,
    }

    def value(arm, seed, piece, figure):
        recipe, shown = arm.rsplit(", ", 1)
        tail = 0.02 if piece == "tail" and (recipe, shown) == ("train-first", "replay") else 0.0
        return points[recipe, shown] + NOISE[seed] - tail

    study = found(REPLAY, config(), value)
    costs = {
        (row["arm"], row["slice"]): row["mean"]
        for row in study[2]
        if row["contrast"] and row["figure"] == "auc"
    }
    assert costs["cost of replayed labels", "pooled"] == pytest.approx(0.005)
    assert costs["cost of replayed labels", "tail"] == pytest.approx(0.025)
    assert costs["cost of replayed labels at 10 x the rate", "pooled"] == pytest.approx(0.05)
    (section,) = REPLAY.page(*study)
    rows = rows_of(section)
    assert rows["tail"][0].startswith("+0.0250")
    assert rows["pooled"][1].startswith(f"{MINUS}0.0150")
    assert rows["pooled"][2].startswith("+0.0500")
    assert rows["pooled"][4].startswith(f"{MINUS}0.0100")
    assert "+0.0050 (sd 0.0000; undecided with 3 seeds, above 0 in 3 of 3)" in section.words[0]


def test_without_the_frozen_pair_nothing_is_said_of_the_cost():
    study = found(
        REPLAY,
        config(),
        lambda arm, seed, piece, figure: 0.7,
        failed=lambda arm, seed: "killed" if arm.startswith("frozen") else None,
    )
    (section,) = REPLAY.page(*study)
    assert "not known yet pooled" in section.words[0]


def test_a_feed_is_read_as_positives_whose_negatives_leak_or_not():
    arms = laid_out(LEAK, "audit.waive=[tier_sizes]")
    assert {
        name: (own.finetune.recipe, own.negatives.catalogue_leak) for name, own in arms.items()
    } == {
        "frozen, no leak": ("frozen", False),
        "frozen, leak": ("frozen", True),
        "co-train, no leak": ("co-train", False),
        "co-train, leak": ("co-train", True),
        "co-train at 10 x the rate, no leak": ("co-train", False),
        "co-train at 10 x the rate, leak": ("co-train", True),
    }
    for own in arms.values():
        assert not own.events.impressions
        assert {"tier_sizes", "catalogue_leak", "only_negative_rows"} <= set(own.audit.waive)
    assert len({data_key(own) for own in arms.values()}) == 1


def test_rows_that_say_that_an_item_was_shown_are_left_out():
    own = parse_config(
        "events: {path: a, actions: {click: {column: what, equals: click}}, impression: {column: "
        "what, equals: [view, seen]}, request_gap_seconds: 60, ignored_actions: [hover, view]}"
    )
    for trial in Design.of(LEAK.lay_out(own)).trials():
        assert trial.config.events.by_word == {"what": {"click", "hover", "view", "seen"}}
        assert trial.config.events.impression is None


def test_the_leak_is_judged_on_later_days_whatever_the_config_says():
    assert LEAK.lay_out(config("study.holdout=in_window")).study.holdout == "next"


def test_a_log_of_positives_keeps_its_dataset():
    own = load_config(NEWS)
    trials = Design.of(LEAK.lay_out(own)).trials()
    assert {data_key(trial.config) for trial in trials} == {data_key(own)}


def test_the_share_that_the_leak_makes_is_what_is_gone_without_it():
    # The reproduction's gaps at its high rate: 4.30 points with the leak, 0.70 without.
    gap = {"leak": 0.0430, "no leak": 0.0070}

    def value(arm, seed, piece, figure):
        recipe, negatives = arm.rsplit(", ", 1)
        if figure == "positive_logit":
            return -6.44 if arm == "co-train, leak" and piece == "cold" else -1.51
        behind = gap[negatives] if recipe == "co-train" else 0.0
        return 0.8 - behind + NOISE[seed]

    study = found(LEAK, config(), value)
    assert share_made(reading(study), "pooled") == pytest.approx(0.837, abs=5e-4)
    gaps, logits = LEAK.page(*study)
    assert "the leak makes 84% of the gap" in gaps.words[0]
    own, high = (rows_of(gaps, number)["pooled"] for number in (0, 1))
    assert own[0].startswith("+0.0430")
    assert own[1].startswith("+0.0070")
    assert own[3] == "84%"
    # At ten times the rate nothing is lost here, of which there is no share.
    assert high[3] == DASH
    assert f"{MINUS}6.44" in rows_of(logits)["cold"]
    assert f"{MINUS}6.44" not in rows_of(logits)["tail"]
    made = [row for row in study[2] if row["arm"] == "what the leak adds to it"]
    assert {row["figure"]: row["mean"] for row in made if row["slice"] == "cold"}[
        "positive_logit"
    ] == pytest.approx(-1.51 + 6.44)


def test_the_contrasts_name_every_gap():
    assert list(weights(LEAK)) == [
        "frozen minus co-train, no leak",
        "frozen minus co-train at 10 x the rate, no leak",
        "frozen minus co-train, leak",
        "frozen minus co-train at 10 x the rate, leak",
        "what the leak adds to it",
        "what the leak adds to it at 10 x the rate",
    ]
    assert all(sum(own.values()) == 0 for own in weights(LEAK).values())
