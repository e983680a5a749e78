"""The fine-tuning stage over several ID tables and content, by every recipe."""

import json

import pytest
import torch
from conftest import TINY_FEED, built

from thawline.config import Config, Tables, parse_config
from thawline.data.batches import RequestReader
from thawline.errors import DataError
from thawline.model.bundle import Bundle, load_rows, save_table
from thawline.stages import evaluate, finetune
from thawline.training.recipes import RECIPES

TABLES = {
    "user": {"column": "user_id", "rows": 50, "dim": 4, "optimizer": "lazy-adam"},
    "author": {"column": "author_id", "of": "item", "rows": 30, "hashed": False, "dim": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    tree = {
        **TINY_FEED,
        "workdir": str(tmp_path_factory.mktemp("work")),
        "simulate": {**TINY_FEED["simulate"], "content_dim": 5},
        "model": {
            "dim": 8,
            "ffn": 16,
            "mlp": [16],
            "context_dim": 4,
            "adapter": "full",
            "content_tower": [6],
        },
        "tables": TABLES,
        "finetune": {"epochs": 2, "batch_size": 64},
    }
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def dataset(config, tmp_path_factory):
    return built(config, tmp_path_factory.mktemp("data") / "feed")


@pytest.fixture(scope="module")
def table(config, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(dataset.catalog.num_rows, config.model.dim, generator=generator)
    save_table(folder / "item.safetensors", rows)
    return folder


def train(config, dataset, table, out, *overrides):
    text = json.dumps(config.model_dump(mode="json"))
    changed = parse_config(text, overrides)
    epochs = finetune.run(changed, dataset.root, table, out)
    return epochs, Bundle.load(out)


def spell(recipe):
    return f"{recipe.name}{recipe.example}" if recipe.parameters else recipe.name


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_every_recipe_trains_all_tables_and_says_what_trained_when(
    config, dataset, table, tmp_path, recipe
):
    name = spell(recipe)
    epochs, bundle = train(config, dataset, table, tmp_path / "m", f"finetune.recipe={name}")

    facts = json.loads((tmp_path / "m" / "schedule.json").read_text())
    plan = recipe.plan(2, *recipe.example)
    for component in ("item", "user", "author"):
        windows = [[window.start, window.end] for window in plan.windows]
        assert facts["components"][component]["windows"] == windows
        shares = [epoch["trained"][component] for epoch in epochs]
        assert shares == [plan.share(0), plan.share(1)]
        drift = epochs[-1]["drift"][component]
        assert any(value > 0 for value in drift.values()) == bool(plan.windows)
    assert facts["components"]["content_tower"]["windows"] == [[0.0, 2.0]]
    assert bundle.weights["user"].shape == (50, 4)
    assert bundle.weights["author"].shape == (30, 3)
    assert bundle.weights["content"].shape == (dataset.catalog.num_rows, 5)
    assert torch.isfinite(torch.cat([each.flatten() for each in bundle.weights.values()])).all()


def test_which_table_is_frozen_stays_as_it_was(config, dataset, table, tmp_path):
    _, bundle = train(
        config,
        dataset,
        table,
        tmp_path / "m",
        "finetune.recipe=co-train",
        "finetune.schedule.item.recipe=frozen",
    )

    first = load_rows(table, dataset.catalog, config.model.dim, seed=0)
    assert torch.equal(bundle.weights["item"][1:], first[1:])
    assert not torch.equal(bundle.weights["user"], train_nothing(config, dataset, table, tmp_path))


def train_nothing(config, dataset, table, tmp_path):
    return train(config, dataset, table, tmp_path / "n", "finetune.recipe=frozen")[1].weights[
        "user"
    ]


def test_each_table_and_the_content_reach_the_scores(config, dataset, table, tmp_path):
    _, bundle = train(config, dataset, table, tmp_path / "m", "finetune.recipe=co-train")
    reader = RequestReader(
        dataset, "next", batch_size=32, sampler=None, id_columns=config.tables.others
    )
    batch = next(reader.epoch(0))
    scores = bundle.score(batch)

    for name in ("user", "author", "content"):
        weights = {**bundle.weights, name: torch.zeros_like(bundle.weights[name])}
        other = Bundle(bundle.meta, bundle.ranker, weights, bundle.catalog)
        assert not torch.equal(other.score(batch), scores)


def test_a_model_is_scored_with_its_own_tables_whatever_the_config_says(
    config, dataset, table, tmp_path
):
    train(config, dataset, table, tmp_path / "m", "finetune.recipe=co-train")
    fewer = config.tables.others["user"].model_copy(update={"rows": 7})

    figures = []
    for tables in (config.tables, Tables(), Tables(user=fewer)):
        changed = config.model_copy(update={"tables": tables})
        out = tmp_path / f"evaluation-{len(figures)}"
        metrics = evaluate.run(changed, dataset.root, tmp_path / "m", out).metrics
        figures.append({holdout: tree["pooled"] for holdout, tree in metrics.items()})

    assert figures[0] == figures[1] == figures[2]
    assert (tmp_path / "evaluation-0" / "report.html").exists()


def test_an_evaluation_has_no_page_where_none_is_wanted(config, dataset, table, tmp_path):
    train(config, dataset, table, tmp_path / "m", "finetune.recipe=frozen")

    verdict = evaluate.run(config, dataset.root, tmp_path / "m", tmp_path / "e", page=False)

    assert not (tmp_path / "e" / "report.html").exists()
    facts = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    assert facts["metrics"]["next"]["pooled"] == verdict.metrics["next"]["pooled"]


def test_the_same_seed_gives_the_same_folder(config, dataset, table, tmp_path):
    for name in ("a", "b"):
        train(config, dataset, table, tmp_path / name, "finetune.recipe=stratified")

    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) >= 8
    for file in files:
        if file.name != "epochs.json":
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_content_tower_without_content_is_refused_before_training(
    tiny_dataset, tiny_config, tmp_path
):
    config = parse_config(
        json.dumps(tiny_config.model_dump(mode="json")),
        ["model.content_tower=[8]", f"workdir={tmp_path}"],
    )

    with pytest.raises(DataError, match="built without content vectors"):
        finetune.run(config, tiny_dataset.root, tmp_path, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_run_in_bfloat16_that_computes_activations_again_trains_and_leaves_traces(
    config, dataset, table, tmp_path
):
    text = json.dumps(config.model_dump(mode="json"))
    options = ["finetune.autocast=bfloat16", "model.checkpoint_activations=true"]
    changed = parse_config(text, options)

    epochs = finetune.run(changed, dataset.root, table, tmp_path / "m", profile=tmp_path / "traces")

    assert epochs[1]["losses"]["total"] < epochs[0]["losses"]["total"]
    traces = sorted(file.name for file in (tmp_path / "traces").iterdir())
    assert traces == ["epoch-1.json", "epoch-2.json"]
