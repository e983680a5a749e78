"""What a study's trials say: the tidy table, the statistics by hand, words and the page."""

import json
import math

import pyarrow.parquet as pq
import pytest

from thawline.config import parse_config
from thawline.errors import DataError
from thawline.stages.study_report import report_only
from thawline.study.arm_facts import exposure
from thawline.study.comparison import compare_arms, words
from thawline.study.report import render
from thawline.study.statistics import paired
from thawline.study.trials import tidy, training_of, write_study
from thawline.training.recipes import make_schedule

SCHEDULE = {
    "epochs": 2,
    "components": {
        "item": {
            "windows": [[1.0, 2.0]],
            "tiers": {},
            "renewal": None,
            "curve": {"kind": "constant", "warm_up": 0.0, "restart": False},
            "reset_state": True,
            "replayed": 0.0,
        }
    },
}


def metrics(auc, loss, cold=None):
    figures = {"auc": auc, "log_loss": loss, "calibration": 1.0, "positives": 9}
    return {
        "next": {
            "requests": 40,
            "pooled": {"click": figures},
            "tiers": {"cold": {"click": {"auc": cold}}},
        }
    }


def result(arm, seed, auc, loss, **more):
    return {
        "trial": f"{arm}-{seed}",
        "arm": arm,
        "values": {"finetune.recipe": arm, "model.mlp": [8]},
        "seed": seed,
        "round": 2,
        "status": "finished",
        "seconds": 61.0,
        "exported_epoch": 2,
        "epochs": [metrics(auc - 0.1, 0.9), metrics(auc, loss)],
        "metrics": metrics(auc, loss),
        **more,
    }


def facts(results, seeds=(0, 1, 2), arms=("co-train", "frozen")):
    return {
        "grid": {"finetune.recipe": list(arms), "model.mlp": [[8]]},
        "seeds": list(seeds),
        "pretrain": "once",
        "metric": "auc",
        "holdout": "next",
        "action": "click",
        "data_version": "v1",
        "rounds": [2],
        "arms": [
            {
                "name": arm,
                "values": {"finetune.recipe": arm, "model.mlp": [8]},
                "baseline": "co-train",
                "epochs": 2,
                "dropped_after": None,
                "schedule": SCHEDULE,
            }
            for arm in arms
        ],
        "trials": [
            {key: own.get(key) for key in ("trial", "arm", "seed", "round", "status", "error",
                                           "remedy", "seconds")}
            for own in results
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def results():
    """Pairs that differ by +0.03, +0.02, +0.04 in AUC and by -0.1, +0.1, 0 in log loss."""
    co_train = [(0.70, 0.5), (0.72, 0.5), (0.71, 0.5)]
    frozen = [(0.73, 0.4), (0.74, 0.6), (0.75, 0.5)]
    return [
        result(arm, seed, auc, loss)
        for arm, figures in (("co-train", co_train), ("frozen", frozen))
        for seed, (auc, loss) in enumerate(figures)
    ]


@pytest.fixture
def folder(results, tmp_path):
    write_study(tmp_path, facts(results), tidy(results, ["finetune.recipe", "model.mlp"]))
    return tmp_path


def test_the_table_has_a_row_for_each_trial_holdout_action_slice_figure_and_epoch(folder):
    table = pq.read_table(folder / "trials.parquet")
    # 6 trials of 2 epochs and a final evaluation, of 4 pooled figures and 1 of cold items.
    assert table.num_rows == 6 * 3 * 5
    rows = [
        row
        for row in table.to_pylist()
        if (row["trial"], row["slice"], row["figure"]) == ("frozen-1", "pooled", "auc")
    ]
    assert [(row["epoch"], row["final"], round(row["value"], 9)) for row in rows] == [
        (1, False, 0.64),
        (2, False, 0.74),
        (2, True, 0.74),
    ]
    assert (rows[0]["finetune.recipe"], rows[0]["model.mlp"]) == ("frozen", "[8]")
    assert (rows[0]["seed"], rows[0]["round"], rows[0]["requests"]) == (1, 2, 40)


def test_arms_are_paired_by_seed_with_the_baseline(folder):
    rows = {(row["arm"], row["slice"], row["figure"]): row for row in report_only(folder).rows}
    base = rows["co-train", "pooled", "auc"]
    assert (base["baseline"], base["seeds"]) == (None, 3)
    assert base["mean"] == pytest.approx(0.71)
    assert base["sd"] == pytest.approx(0.01)
    own = rows["frozen", "pooled", "auc"]
    assert own["mean"] == pytest.approx(0.74)
    assert own["difference"] == pytest.approx(0.03)
    assert own["difference_sd"] == pytest.approx(0.01)
    # 4.3027 is Student's t at 97.5 % with 2 degrees of freedom.
    assert own["low"] == pytest.approx(0.03 - 4.3027 * 0.01 / math.sqrt(3), abs=1e-6)
    assert own["agreement"] == 1.0
    # Of the 8 flips of three signs, all plus and all minus are as far from 0.
    assert own["p_value"] == 0.25
    assert own["pairs_needed"] == 4
    assert own["words"] == "undecided with 3 seeds (better in 3 of 3)"
    loss = rows["frozen", "pooled", "log_loss"]
    # Every flip of -0.1, +0.1, 0 has a sum of 0 or of 0.2.
    assert (loss["difference"], loss["p_value"]) == (pytest.approx(0), 1.0)
    assert rows["frozen", "pooled", "calibration"]["words"] == "no difference with 3 seeds"
    # An AUC that is undefined everywhere has no row, and counts are no figures of an arm.
    assert {key[1:] for key in rows} == {
        ("pooled", "auc"),
        ("pooled", "log_loss"),
        ("pooled", "calibration"),
    }


def test_seeds_that_only_one_side_has_make_no_pair(results):
    kept = [own for own in results if own["trial"] not in ("co-train-0", "frozen-2")]
    (row,) = [
        row
        for row in compare_arms(facts(kept), tidy(kept, []))
        if (row["arm"], row["figure"]) == ("frozen", "auc")
    ]
    assert (row["seeds"], row["n"], row["words"]) == (2, 1, "undecided with 1 seed")
    assert row["difference"] == pytest.approx(0.02)
    alone = [own for own in results if own["arm"] == "frozen"]
    row = compare_arms(facts(alone), tidy(alone, []))[0]
    assert (row["n"], row["difference"], row["words"]) == (0, None, "no pair of seeds")


@pytest.mark.parametrize(
    ("differences", "figure", "said"),
    [
        ([0.1] * 5, "auc", "undecided with 5 seeds (better in 5 of 5)"),
        # 2 of 64 flips.
        ([0.1] * 6, "auc", "better with 6 seeds (better in 6 of 6)"),
        ([0.1] * 6, "log_loss", "worse with 6 seeds (worse in 6 of 6)"),
        ([0.1] * 6, "calibration", "higher with 6 seeds (higher in 6 of 6)"),
        ([-0.3, 0.1, -0.1], "auc", "undecided with 3 seeds (worse in 2 of 3)"),
        ([0.0, 0.0], "auc", "no difference with 2 seeds"),
    ],
)
def test_words_say_what_the_pairs_decide(differences, figure, said):
    assert words(paired(differences), figure) == said


def test_a_figure_that_is_infinite_or_nan_makes_no_pair(results):
    values = {0: math.inf, 1: math.nan}
    kept = [
        result("frozen", own["seed"], 0.7, values.get(own["seed"], 0.5))
        if own["arm"] == "frozen"
        else own
        for own in results
    ]
    rows = compare_arms(facts(kept), tidy(kept, []))
    loss = next(row for row in rows if (row["arm"], row["figure"]) == ("frozen", "log_loss"))
    assert (loss["seeds"], loss["n"], loss["difference"]) == (1, 1, 0)


def test_figures_of_earlier_rounds_are_not_compared(results):
    short = [own | {"round": 1, "metrics": metrics(0.9, 0.1)} for own in results]
    both = compare_arms(facts(results), tidy([*short, *results], []))
    assert both == compare_arms(facts(results), tidy(results, []))


def test_the_page_says_what_was_found_and_what_failed_and_loads_nothing(results):
    failed = {
        **results[0],
        "trial": "x",
        "seed": 7,
        "status": "failed",
        "error": "the loss became nan <at> step 3",
        "remedy": "lower finetune.learning_rate",
    }
    told = facts([*results, failed])
    page = render(told, compare_arms(told, tidy([*results, failed], [])))
    assert "6 trials finished, 1 failed: 2 arms, 3 seeds." in page
    assert (
        "frozen: click AUC on next 0.7400 (sd 0.0100 over 3 seeds), +0.0300 against co-train: "
        "undecided with 3 seeds (better in 3 of 3)." in page
    )
    assert "cannot come under p = 0.25" in page
    assert "the loss became nan &lt;at&gt; step 3" in page
    assert "What to do: lower finetune.learning_rate" in page
    assert "The item table trains in epoch 2 of 2 only" in page
    assert page.count('<svg class="plot"') == 1, "both arms have one schedule"
    assert 'href="trials/frozen-1/report.html"' in page
    assert "http" not in page
    assert "<script" not in page


def test_a_study_of_which_nothing_finished_has_a_page(tmp_path):
    write_study(tmp_path, facts([]) | {"action": None}, tidy([], []))
    assert report_only(tmp_path).rows == []
    assert "0 trials finished" in (tmp_path / "study.html").read_text(encoding="utf-8")


def test_a_folder_without_a_study_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no study that can be read"):
        report_only(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps({}))
    (tmp_path / "trials.parquet").write_bytes(b"PAR")
    with pytest.raises(DataError, match="holds no study"):
        report_only(tmp_path)


@pytest.fixture
def crossed():
    """Four arms and three seeds, whose AUC differences of differences are 0.04, 0.01 and 0.01."""
    figures = {
        "replay": [0.60, 0.61, 0.62],
        "replay, frozen": [0.65, 0.64, 0.66],
        "fresh": [0.70, 0.72, 0.71],
        "fresh, frozen": [0.71, 0.74, 0.74],
    }
    results = [
        result(arm, seed, auc, 0.5) for arm, own in figures.items() for seed, auc in enumerate(own)
    ]
    weights = {"replay, frozen": 1, "replay": -1, "fresh, frozen": -1, "fresh": 1}
    told = facts(results, arms=list(figures)) | {
        "contrasts": [{"name": "more from replays", "weights": weights}]
    }
    for arm in told["arms"]:
        arm["baseline"] = "replay"
    return told, results


def test_a_contrast_is_a_weighted_sum_within_each_seed(crossed):
    told, results = crossed
    rows = compare_arms(told, tidy(results, []))
    (row,) = [row for row in rows if row["contrast"] and row["figure"] == "auc"]
    assert (row["arm"], row["baseline"], row["seeds"], row["n"]) == (
        "more from replays",
        None,
        3,
        3,
    )
    assert row["mean"] == row["difference"] == pytest.approx(0.02)
    # Deviations of 0.02, -0.01, -0.01: sqrt(0.0006 / 2).
    assert row["sd"] == row["difference_sd"] == pytest.approx(math.sqrt(0.0003))
    assert row["p_value"] == 0.25
    assert row["words"] == "undecided with 3 seeds (above 0 in 3 of 3)"
    loss = next(row for row in rows if row["contrast"] and row["figure"] == "log_loss")
    assert (loss["mean"], loss["words"]) == (0, "no difference with 3 seeds")
    assert {row["contrast"] for row in rows if row["arm"] != "more from replays"} == {False}


def test_a_contrast_needs_all_of_its_arms_in_a_seed(crossed):
    told, results = crossed
    kept = [own for own in results if own["trial"] not in ("replay-0", "fresh-2")]
    rows = compare_arms(told, tidy(kept, []))
    (row,) = [row for row in rows if row["contrast"] and row["figure"] == "auc"]
    assert (row["n"], row["mean"]) == (1, pytest.approx(0.01))
    rows = compare_arms(told, tidy([own for own in results if own["arm"] != "replay"], []))
    assert not any(row["contrast"] for row in rows)


def test_the_page_has_the_contrasts_apart_from_the_arms(crossed):
    told, results = crossed
    page = render(told, compare_arms(told, tidy(results, [])))
    assert "more from replays: +0.0200 click AUC on next: undecided with 3 seeds" in page
    section = page[page.index('<section id="contrasts">') :]
    assert "next: replay, frozen - replay - fresh, frozen + fresh" in section
    assert "+0.0200" in section
    before = page[page.index('<section id="holdout-1">') : page.index('<section id="contrasts">')]
    assert "more from replays" not in before


def test_the_page_says_what_is_missing(crossed):
    told, results = crossed
    assert "not been run" not in render(told, compare_arms(told, tidy(results, [])))
    kept = [own for own in results if own["arm"] != "replay"]
    told["trials"] = [trial for trial in told["trials"] if trial["arm"] != "replay"]
    page = render(told, compare_arms(told, tidy(kept, [])))
    assert "3 more have not been run to the end" in page
    said = "The contrast more from replays has no seed with which all of its arms finished."
    assert said in page


def epoch(seconds, trained, drift):
    return {"seconds": seconds, "trained": trained, "drift": drift}


def test_the_training_of_a_trial_has_rows_beside_the_hold_outs(results):
    epochs = [
        epoch(3.0, {"item": 0.0, "dense": 1.0}, {"item": {"head": 0.0, "pooled": 0.0}}),
        epoch(5.0, {"item": 1.0, "dense": 1.0}, {"item": {"head": 0.3, "pooled": 0.2}}),
        epoch(4.0, {"item": 0.5, "dense": 1.0}, {"item": {"head": 0.4, "pooled": 0.3}}),
    ]
    trained = training_of(epochs, 2)
    one = results[0] | {"epochs": [metrics(0.7, 0.5)] * 3, "training": trained}
    rows = [row for row in tidy([one], []).to_pylist() if row["holdout"] == "training"]

    def values(action, piece, figure):
        return [
            (row["epoch"], row["final"], row["value"])
            for row in rows
            if (row["action"], row["slice"], row["figure"]) == (action, piece, figure)
        ]

    # The exported epoch is the second; the seconds and shares are those of all three.
    assert values("item", "head", "drift") == [
        (1, False, 0.0),
        (2, False, 0.3),
        (3, False, 0.4),
        (2, True, 0.3),
    ]
    assert values("item", "pooled", "drift")[-1] == (2, True, 0.2)
    assert values("all", "pooled", "seconds") == [
        (1, False, 3.0),
        (2, False, 5.0),
        (3, False, 4.0),
        (2, True, 12.0),
    ]
    assert values("item", "pooled", "trained_share")[-1] == (2, True, 0.5)
    assert values("dense", "pooled", "trained_share")[-1] == (2, True, 1.0)
    assert len(rows) == 4 * (2 + 1 + 2)
    other = results[3] | {"training": training_of(epochs[:1] * 2, 1)}
    told = facts([one, other])
    (row,) = [
        row for row in compare_arms(told, tidy([one, other], []))
        if (row["figure"], row["arm"]) == ("seconds", "frozen")
    ]  # fmt: skip
    assert (row["difference"], row["words"]) == (-6.0, "undecided with 1 seed")


@pytest.mark.parametrize(
    ("overrides", "replayed", "moving"),
    [
        (["finetune.recipe=co-train"], 1.0, 1.0),
        (["finetune.recipe=frozen"], 0.0, 0.0),
        (["finetune.recipe=freeze-until-last"], 0.0, 0.0),
        (["finetune.recipe=train-first"], 1.0, 0.0),
        # Trains in half of the first epoch and half of the second, of which the last has three.
        (["finetune.recipe=window(0.5, 1)"], 0.75, 0.5),
        # Half of each epoch; 1 - 1/2 · 1/2 are written before the last.
        (["finetune.recipe=alternate"], 0.75, 0.5),
        (["finetune.recipe=co-train", "finetune.examples=fresh"], 0.0, 1.0),
        (["finetune.recipe=co-train", "model.gradient_paths=[]"], 0.0, 0.0),
        # The network rests in the first epoch, so that one of its two before the last is moving.
        (
            [
                "finetune.schedule.item.windows=[[0, 1.5], [2, 3]]",
                "finetune.schedule.dense.windows=[[1, 3]]",
            ],
            1.0,
            0.5,
        ),
    ],
)
def test_exposure_follows_from_the_schedule(overrides, replayed, moving):
    config = parse_config("simulate: {}\nfinetune: {epochs: 3}", overrides)
    found = exposure(config, make_schedule(config, []))
    assert found == {
        "item": {
            "replayed": pytest.approx(replayed),
            "moving": pytest.approx(moving),
            "renewal": None,
            "tiers": {},
        }
    }


def test_exposure_of_tiers_and_renewed_rows_is_told():
    config = parse_config("simulate: {}\nfinetune: {epochs: 3, recipe: stratified}")
    tiers = exposure(config, make_schedule(config, []))["item"]["tiers"]
    assert tiers["head"] == {"replayed": 1.0, "moving": 1.0}
    # From the middle, 1 of 3 epochs on: in the second and the third.
    assert tiers["torso"] == {"replayed": 1.0, "moving": 0.5}
    assert tiers["tail"] == {"replayed": 0.0, "moving": 0.0}
    config = parse_config("simulate: {}\nfinetune: {epochs: 3, recipe: re-init}")
    assert exposure(config, make_schedule(config, []))["item"]["renewal"] == "random"


def test_the_page_says_what_named_arms_set_and_which_data_they_have(results):
    told = facts(results) | {"data_versions": {"co-train": "v1", "frozen": "v2"}}
    for arm, changes in zip(told["arms"], ({}, {"windows.finetune_days": 2}), strict=True):
        arm |= {"values": {"arm": arm["name"]}, "changes": changes}
    page = render(told, compare_arms(told, tidy(results, [])))
    section = page[page.index('<section id="arms">') : page.index('<section id="timelines">')]
    assert "<code>nothing</code>" in section
    assert "<code>windows.finetune_days=2</code>" in section
    assert "v1 (co-train); v2 (frozen)" in page
