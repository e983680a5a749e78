"""The evaluation stage against a champion: from models on disk to the verdict."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import built

from thawline.config import Config
from thawline.errors import DataError, TrackingError
from thawline.evaluation.holdouts import score_holdout
from thawline.evaluation.score_file import read_scores
from thawline.model.bundle import save_table
from thawline.stages import champion as stage
from thawline.stages import compare, evaluate, finetune
from thawline.tracking.fetch import FetchedModel

pytestmark = pytest.mark.slow

FEED = {
    "simulate": {
        "impressions": 24_000,
        "users": 400,
        "items": 240,
        "days": 8,
        "candidates": 6,
        "interests": 8,
    },
    "windows": {
        "test_days": 2,
        "finetune_days": 4,
        "pretrain_days": 2,
        "history_length": 12,
        "sequence_length": 10,
        "holdout_users": 0.1,
        "tiers": {"head": 10, "torso": 4},
    },
    "model": {"dim": 8, "ffn": 8, "layers": 1, "mlp": [8]},
    "tables": {"item": {"learning_rate": 0.1}},
    "finetune": {"epochs": 2, "recipe": "co-train", "batch_size": 64},
    "evaluation": {"epoch_requests": 0, "bootstrap": 0, "retrieval_requests": 0},
    "gate": {"champion": "none", "resamples": 200, "min_auc": 0.3},
    "runtime": {"threads": 1},
}
LEAKS = ["catalogue_leak", "future_negatives", "only_negative_rows", "trivial_scorers"]


class NoRun:
    """Stands for an MLflow run."""

    def ignore(self, *_, **__):
        pass

    log_params = log_metrics = log_artifact = ignore


@pytest.fixture(autouse=True, scope="module")
def no_tracking():
    with pytest.MonkeyPatch.context() as patch:
        for each in (finetune, evaluate):
            patch.setattr(each, "stage_run", lambda *_: contextlib.nullcontext(NoRun()))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The clicks of a feed, without impressions, so that negatives are sampled."""
    root = tmp_path_factory.mktemp("log")
    feed = built(Config.model_validate(FEED), root / "feed")
    events = pq.read_table(feed.root / "source" / "events.parquet")
    clicks = events.filter(events["click"]).select(["user_id", "item_id", "timestamp"])
    pq.write_table(clicks, root / "clicks.parquet")
    tree = {key: value for key, value in FEED.items() if key != "simulate"}
    return Config.model_validate(tree | {"events": {"path": str(root / "clicks.parquet")}})


@pytest.fixture(scope="module")
def dataset(config, tmp_path_factory):
    return built(config, tmp_path_factory.mktemp("data") / "clicks")


def leaky(config):
    """Negatives from the whole catalogue alike, the future's items included."""
    negatives = config.negatives.model_copy(update={"catalogue_leak": True, "alpha": 0.0})
    audit = config.audit.model_copy(update={"waive": LEAKS})
    return config.model_copy(update={"negatives": negatives, "audit": audit})


@pytest.fixture(scope="module")
def models(config, dataset, tmp_path_factory):
    """A model as the config has it, and one whose training leaked."""
    root = tmp_path_factory.mktemp("models")
    (root / "table").mkdir()
    torch.manual_seed(0)
    rows = torch.randn(dataset.catalog.num_rows, 8) / 8
    save_table(root / "table" / "item.safetensors", rows)
    for name, settings in (("good", config), ("leaked", leaky(config))):
        finetune.run(settings, dataset.root, root / "table", root / name)
    return root


def against(config, champion, **gate):
    settings = config.gate.model_copy(update={"champion": str(champion), **gate})
    return config.model_copy(update={"gate": settings})


@pytest.fixture(scope="module")
def refused(config, dataset, models, tmp_path_factory):
    """The evaluation of the leaked model against the good one."""
    out = tmp_path_factory.mktemp("refused") / "evaluation"
    verdict = evaluate.run(against(config, models / "good"), dataset.root, models / "leaked", out)
    return verdict, json.loads((out / "evaluation.json").read_text()), out


def test_a_model_that_learned_the_samplers_leak_is_refused_for_being_worse(refused):
    verdict, facts, _ = refused
    assert verdict.passed is facts["passed"] is facts["gate"]["passed"] is False
    floor, auc, *_ = facts["gate"]["rules"]
    # The floor would let it pass.
    assert floor["status"] == "passed"
    assert auc["status"] == "failed"
    assert auc["high"] < -0.005
    assert auc["reason"] in facts["reasons"]
    assert auc["reason"].startswith("click AUC on next is 0.")
    assert "where it must be not below -0.005" in auc["reason"]


def test_the_evaluation_says_how_both_did_on_each_hold_out(refused, models):
    _, facts, _ = refused
    champion = facts["champion"]
    assert champion["name"] == str(models / "good")
    assert champion["version"] is None
    assert champion["recipe"] == "co-train"
    assert champion["notes"] == []
    for holdout, tree in facts["metrics"].items():
        rows = champion["comparison"][holdout]
        row = next(r for r in rows if (r["slice"], r["figure"]) == ("pooled", "auc"))
        assert row["challenger"] == tree["pooled"]["click"]["auc"]
        assert row["champion"] == champion["metrics"][holdout]["pooled"]["click"]["auc"]
        assert row["difference"] == row["challenger"] - row["champion"]
        assert row["requests"] == tree["requests"]
    assert set(champion["comparison"]) == {"next", "in_window"}


def test_the_scores_of_the_challenger_lie_beside_the_evaluation(refused, dataset):
    _, facts, out = refused
    scores = read_scores(out / "scores" / "next.parquet")
    assert scores.data_version == dataset.manifest.data_version
    assert scores.model == "co-train, seed 0"
    assert len(scores.request_id) == facts["metrics"]["next"]["requests"]
    assert len(scores.labels) == facts["metrics"]["next"]["pooled"]["click"]["candidates"]


def test_the_same_model_again_passes_and_differs_by_nothing(config, dataset, models, tmp_path):
    settings = against(config, models / "good")
    verdict = evaluate.run(settings, dataset.root, models / "good", tmp_path / "e")
    assert verdict.passed
    assert {row["difference"] for row in verdict.champion["comparison"]["next"]} <= {0.0, None}


def test_a_first_model_passes_and_a_waived_leak_in_its_own_sampler_refuses_it(
    config, dataset, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(stage, "fetch_model", lambda *_: None)
    verdict = evaluate.run(
        against(config, "registry"), dataset.root, models / "good", tmp_path / "first"
    )
    assert verdict.passed
    assert verdict.reasons[1] == "click AUC on next: there is no champion yet"
    assert json.loads((tmp_path / "first" / "evaluation.json").read_text())["champion"] is None
    # Scored by negatives that leak, the leaked model shines, but nobody believes it.
    verdict = evaluate.run(
        against(leaky(config), "registry"), dataset.root, models / "leaked", tmp_path / "leaked"
    )
    assert verdict.metrics["next"]["pooled"]["click"]["auc"] > 0.65
    assert not verdict.passed
    assert verdict.reasons[-1].startswith("the audit found catalogue_leak (waived)")


def test_the_champion_of_the_registry_is_named_with_its_version(
    config, dataset, models, tmp_path, monkeypatch
):
    asked = []

    def fetch(_, uri, folder):
        asked.append(uri)
        return FetchedModel(models / "good", "ranker", "7", {})

    monkeypatch.setattr(stage, "fetch_model", fetch)
    for wanted in ("registry", "models:/ranker/7"):
        champion, without = stage.find_champion(against(config, wanted), dataset, tmp_path, "cpu")
        assert without is None
        assert (champion.name, champion.version) == ("ranker", "7")
    assert asked == ["models:/thawline-ranker@champion", "models:/ranker/7"]


def test_a_registry_that_does_not_answer_stops_the_stage_before_anything_is_scored(
    config, dataset, models, tmp_path, monkeypatch
):
    def down(*_):
        raise TrackingError("the server does not answer", "start it")

    monkeypatch.setattr(stage, "fetch_model", down)
    monkeypatch.setattr(evaluate, "all_metrics", lambda *_, **__: pytest.fail("it scored"))
    with pytest.raises(TrackingError, match="does not answer"):
        evaluate.run(against(config, "registry"), dataset.root, models / "good", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_champion_that_cannot_be_used_is_named_with_the_way_out(
    config, dataset, tmp_path, monkeypatch
):
    with pytest.raises(DataError, match=r"champion \(.*gone\) cannot be compared with") as error:
        stage.find_champion(against(config, tmp_path / "gone"), dataset, tmp_path, "cpu")
    assert "gate.champion" in error.value.remedy
    monkeypatch.setattr(stage, "fetch_model", lambda *_: None)
    with pytest.raises(DataError, match="models:/x@best, but no version has that alias"):
        stage.find_champion(against(config, "models:/x@best"), dataset, tmp_path, "cpu")


def test_a_dataset_that_changes_between_the_two_scorings_is_refused(
    config, dataset, models, tmp_path
):
    champion, _ = stage.find_champion(against(config, models / "good"), dataset, tmp_path, "cpu")
    match = stage.Match.of(config, dataset, champion)
    scored = score_holdout(config, dataset, "next", champion.translator.score, users=True)
    match.play("next", scored)
    assert all(row["difference"] in (0.0, None) for row in match.comparison["next"])
    with pytest.raises(DataError, match="the requests of next changed while they were scored"):
        match.play("next", replace(scored, row=np.roll(scored.row, 1)))


def test_a_champion_whose_scores_are_nan_is_not_taken_for_the_challenger(
    config, dataset, models, tmp_path
):
    champion, _ = stage.find_champion(against(config, models / "good"), dataset, tmp_path, "cpu")
    score = champion.translator.score
    scored = score_holdout(config, dataset, "next", score, users=True)
    champion.translator.score = lambda batch: score(batch) * float("nan")
    with pytest.raises(DataError, match=r"champion \(.*good\) .*scores of next are NaN") as error:
        stage.Match.of(config, dataset, champion).play("next", scored)
    assert "gate.champion" in error.value.remedy


def test_models_are_compared_on_a_dataset_as_the_gate_compares_them(
    config, dataset, models, refused
):
    _, facts, out = refused
    sides = [str(models / "good")], [str(models / "leaked")]
    found = compare.run(config, *sides, dataset.root, resamples=200)
    assert found.notes == []
    for holdout, rows in facts["champion"]["comparison"].items():
        for mine, gates in zip(found.rows[holdout], rows, strict=True):
            assert (mine["b"], mine["a"]) == (gates["challenger"], gates["champion"])
            assert (mine["low"], mine["high"]) == (gates["low"], gates["high"])
    # An evaluation's scores stand beside a model's.
    mixed = compare.run(config, sides[0], [str(out)], dataset.root, resamples=200)
    assert mixed.rows == found.rows


def test_models_of_several_seeds_are_scored_and_paired(config, dataset, models):
    sides = [str(models / "good")] * 2, [str(models / "leaked")] * 2
    found = compare.run(config, *sides, dataset.root)
    first = found.rows["next"][0]
    assert (found.by, first["n"], first["sd"]) == ("seeds", 2, 0)
    assert first["difference"] < -0.005
