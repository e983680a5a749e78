"""Weights from the log to the losses and figures of the stages."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TINY_FEED, built

from thawline.config import Config
from thawline.data.batches import RequestReader
from thawline.errors import DataError
from thawline.evaluation.score_file import read_scores
from thawline.model.bundle import Bundle, save_table
from thawline.stages import evaluate, finetune


def weight_of(request_id):
    """Of a request by its hash: 0.5, 1 or 8."""
    return np.array([0.5, 1.0, 8.0])[np.asarray(request_id) % 3]


def config_for(tiny_dataset, folder, weight):
    """The tiny feed with the weights `weight` gives to requests; None: no column."""
    events = pq.read_table(tiny_dataset.root / "source" / "events.parquet")
    if weight is not None:
        each = weight(events["request_id"].to_numpy())
        events = events.append_column("w", pa.array(each, pa.float64()))
    path = folder / "events.parquet"
    folder.mkdir(parents=True)
    pq.write_table(events, path)
    return Config.model_validate(
        {
            "events": {
                "preset": "feed",
                "path": str(path),
                "latest": "2100-01-01",
                **({} if weight is None else {"weight": "w"}),
            },
            "workdir": str(folder),
            "windows": TINY_FEED["windows"],
            "runtime": TINY_FEED["runtime"],
            "model": {"dim": 8, "ffn": 16, "mlp": [16], "context_dim": 4},
            "finetune": {"epochs": 1, "batch_size": 64},
            "evaluation": {"bootstrap": 20},
        }
    )


@pytest.fixture(scope="module")
def made(tiny_dataset, tmp_path_factory):
    """Config and dataset by how requests are weighted."""
    root = tmp_path_factory.mktemp("weighted")
    ways = {
        "none": None,
        "ones": lambda ids: np.ones(len(ids)),
        "some": weight_of,
    }
    found = {}
    for name, weight in ways.items():
        config = config_for(tiny_dataset, root / name, weight)
        found[name] = config, built(config, root / name / "dataset")
    return found


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """The folder of each model, trained alike but for the weights, with its evaluation."""
    root = tmp_path_factory.mktemp("models")
    for name, (config, dataset) in made.items():
        table = root / name / "table"
        table.mkdir(parents=True)
        rows = torch.randn(dataset.catalog.num_rows, 8, generator=torch.Generator().manual_seed(0))
        save_table(table / "item.safetensors", rows)
        finetune.run(config, dataset.root, table, root / name / "model")
        evaluate.run(config, dataset.root, root / name / "model", root / name / "evaluation")
    return root


def rows_of(trained, name):
    return Bundle.load(trained / name / "model").weights["item"]


def metrics_of(trained, name, holdout="next"):
    facts = json.loads((trained / name / "evaluation" / "evaluation.json").read_text())
    return facts["metrics"][holdout]


def test_batches_hold_the_weight_of_each_request_in_any_order(made):
    _, dataset = made["some"]
    reader = RequestReader(dataset, "train", batch_size=50, seed=3, sampler=None)
    seen = 0
    for batch in reader.epoch(1):
        assert batch.weight.dtype == torch.float64
        np.testing.assert_array_equal(batch.weight.numpy(), weight_of(batch.request_id.numpy()))
        seen += len(batch)
    assert seen == dataset.manifest.requests["train"] > 200
    _, plain = made["none"]
    batch = next(RequestReader(plain, "train", batch_size=50, sampler=None).epoch(0))
    assert batch.weight is None


def test_a_weight_of_one_trains_what_no_weight_trains_and_others_do_not(trained):
    none, ones, some = (rows_of(trained, name) for name in ("none", "ones", "some"))
    torch.testing.assert_close(ones, none, rtol=0, atol=1e-5)
    assert (some - none).abs().max() > 1e-3


def test_the_evaluation_stage_weighs_every_figure_and_writes_the_weights(trained):
    scores = read_scores(trained / "some" / "evaluation" / "scores" / "next.parquet")
    np.testing.assert_array_equal(scores.weight, weight_of(scores.request_id))
    from sklearn.metrics import log_loss, roc_auc_score

    each = np.repeat(scores.weight, np.diff(scores.offsets))
    tree = metrics_of(trained, "some")
    for index, action in enumerate(scores.actions):
        labels, logits = scores.labels[:, index], scores.logits[:, index].astype(float)
        found = tree["pooled"][action]
        expected = roc_auc_score(labels, logits, sample_weight=each)
        assert found["auc"] == pytest.approx(expected, abs=1e-9)
        loss = log_loss(labels, 1 / (1 + np.exp(-logits)), sample_weight=each)
        assert found["log_loss"] == pytest.approx(loss, abs=1e-9)
        assert abs(found["auc"] - roc_auc_score(labels, logits)) > 1e-6
        low, high = tree["intervals"]["pooled"][action]["auc"]
        assert low < found["auc"] < high
    assert read_scores(trained / "none" / "evaluation" / "scores" / "next.parquet").weight is None


def test_a_file_with_a_bad_weight_is_named(made, tmp_path):
    config, _ = made["some"]
    dataset = built(config, tmp_path / "dataset")
    path = dataset.request_files("train")[0]
    table = pq.read_table(path, partitioning=None)
    place = table.schema.get_field_index("weight")
    bad = table.set_column(place, "weight", pa.array([0.0] * len(table)))
    pq.write_table(bad, path)
    with pytest.raises(DataError, match=rf"{path.name}.*weight of a request is no number above 0"):
        list(RequestReader(dataset, "train", batch_size=50, sampler=None).epoch(0))
