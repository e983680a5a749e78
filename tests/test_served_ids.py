"""Serving models with further ID tables and content: a trained one, and one written by hand."""

import contextlib
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow_helpers import INT_IDS, write_model
from safetensors.torch import save_file

from thawline.config import Config, IdTableSettings
from thawline.data.batches import RequestReader
from thawline.data.ids import hash_ids, stored_as
from thawline.data.manifest import Dataset
from thawline.errors import DataError
from thawline.model.bundle import Bundle, save_table
from thawline.model.ids import ModelIds
from thawline.stages import finetune, windows
from thawline.tracking import packing
from thawline.tracking.served import ServedRanker

NOBODY = 10**12
"""An item that no catalog knows."""

CONFIG = Config.model_validate(
    {
        "simulate": {
            "impressions": 6_000,
            "users": 60,
            "items": 150,
            "days": 8,
            "authors": 20,
            "content_dim": 5,
        },
        "windows": {
            "test_days": 1,
            "finetune_days": 4,
            "pretrain_days": 2,
            "tiers": {"head": 20, "torso": 5},
            "history_length": 12,
            "holdout_users": 0.1,
        },
        "tables": {
            "user": {"column": "user_id", "rows": 40, "dim": 6, "init": 0.5},
            "regular": {"column": "user_id", "rows": 20, "dim": 3, "init": 0.5, "hashed": False},
            "author": {
                "column": "author_id",
                "of": "item",
                "rows": 12,
                "dim": 4,
                "init": 0.5,
                "hashed": False,
            },
        },
        "model": {"dim": 8, "ffn": 8, "layers": 1, "mlp": [8], "content_tower": [6]},
        "finetune": {"epochs": 1, "recipe": "co-train", "batch_size": 64, "learning_rate": 0.05},
        "evaluation": {"epoch_requests": 0},
        "audit": {"waive": []},
        "runtime": {"threads": 1},
    }
)


class NoRun:
    """Stands for an MLflow run."""

    def ignore(self, *_, **__):
        pass

    log_params = log_metrics = log_artifact = ignore


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dataset and the folder of a model trained on it."""
    root = tmp_path_factory.mktemp("trained")
    config = CONFIG.model_copy(update={"workdir": str(root)})
    with pytest.MonkeyPatch.context() as patch:
        for stage in (windows, finetune):
            patch.setattr(stage, "stage_run", lambda *_: contextlib.nullcontext(NoRun()))
        windows.run(config, root / "dataset")
        data = Dataset.open(root / "dataset")
        (root / "table").mkdir()
        torch.manual_seed(0)
        save_table(root / "table" / "item.safetensors", torch.randn(data.catalog.num_rows, 8) / 3)
        finetune.run(config, root / "dataset", root / "table", root / "model")
    return data, root / "model"


def served(folder):
    ranker = ServedRanker()
    ranker.load(folder)
    return ranker


def raw(data, batch):
    """The requests of a batch in raw ids and values."""
    items = [None, NOBODY, *data.catalog.item_id.to_pylist()]
    items = [NOBODY if item is None else item for item in items]
    stored = pq.ParquetDataset(data.request_files("next")).read().to_pylist()
    users = {row["request_id"]: row["user_id"] for row in stored}
    made = []
    for place, request_id in enumerate(batch.request_id.tolist()):
        real = batch.history_row[place] != 0
        row = {
            "history": [items[row] for row in batch.history_row[place][real].tolist()],
            "history_action": batch.history_action[place][real].tolist(),
            "history_age": batch.history_age[place][real].tolist(),
            "candidates": [
                items[row]
                for row in batch.candidate_row[place][batch.candidate_mask[place]].tolist()
            ],
            "user_id": users[request_id],
        }
        for column, (name, values) in enumerate(data.manifest.context.items()):
            row[name] = [None, *values][int(batch.context[place, column])]
        made.append(row)
    return pd.DataFrame(made)


def test_served_scores_equal_the_trainers_on_the_same_requests(trained):
    data, folder = trained
    ranker = served(folder)
    tables = CONFIG.tables.others
    reader = RequestReader(
        data, "next", batch_size=64, sampler=None, shuffle=False, id_columns=tables
    )
    seen = {name: set() for name in tables}
    for batch in reader.epoch(0):
        logits = ranker.bundle.score(batch)
        scores = ranker.predict(None, raw(data, batch))
        for place in range(len(batch)):
            wanted = logits[place][batch.candidate_mask[place]].double().sigmoid().numpy()
            found = np.array([scores[action][place] for action in data.manifest.actions]).T
            np.testing.assert_allclose(found, wanted, atol=1e-6)
        for name, rows in batch.ids.items():
            seen[name] |= set(rows.flatten().tolist())
    assert reader.num_requests > 20
    assert all(len(rows) > 5 for rows in seen.values())


def test_every_table_and_the_content_weigh_in_the_scores(trained):
    data, folder = trained
    ranker = served(folder)
    batch = next(
        RequestReader(
            data,
            "next",
            batch_size=64,
            sampler=None,
            shuffle=False,
            id_columns=CONFIG.tables.others,
        ).epoch(0)
    )
    before = ranker.bundle.score(batch)
    for name in ("user", "regular", "author", "content"):
        weight = ranker.bundle.weights[name]
        kept = weight.clone()
        weight.zero_()
        assert (ranker.bundle.score(batch) - before).abs().max() > 1e-3, name
        weight.copy_(kept)


def test_a_missing_null_or_unknown_id_is_row_0_and_numbers_are_taken_as_text(trained):
    data, folder = trained
    ranker = served(folder)
    known = int(
        next(
            row["user_id"]
            for row in pq.ParquetDataset(data.request_files("train")).read().to_pylist()
            if hash_ids([row["user_id"]])[0] in ranker.bundle.ids.known["regular"]
        )
    )
    items = data.catalog.item_id.drop_null().to_pylist()[:4]

    def score(users):
        made = pd.DataFrame(
            {"history": [items[:2]] * len(users), "candidates": [items] * len(users)}
        )
        made["user_id"] = users
        return ranker.predict(None, made)["click"].to_list()

    alone = pd.DataFrame({"history": [items[:2]], "candidates": [items]})
    without = ranker.predict(None, alone)["click"].to_list()
    assert score([None]) == score([float("nan")]) == score([""]) == without != score([known])
    assert score([known]) == score([str(known)]) == score([float(known)])
    # A hashed table has a row for every id; the vocabulary's has none for a stranger.
    ranker.bundle.weights["user"].zero_()
    without = ranker.predict(None, alone)["click"].to_list()
    assert score(["stranger"]) == without != score([known])


def test_the_model_folder_says_which_id_has_which_row(trained):
    data, folder = trained
    tables = CONFIG.tables.others
    ids = Bundle.load(folder).ids
    direct = ModelIds.of(data, tables)
    assert set(ids.known) == {"regular", "author"}
    assert set(ids.of_items) == {"author"}
    for name, hashes in direct.known.items():
        np.testing.assert_array_equal(ids.known[name], hashes)
    # By hand: the authors in the order of their items' support, then of their hashes.
    lines = pq.read_table(data.root / "items.parquet").column(stored_as("author_id")).to_numpy()
    support = {}
    for hashed, count in zip(lines.tolist(), data.catalog.support.tolist(), strict=True):
        if hashed and count:
            support[hashed] = support.get(hashed, 0) + count
    ordered = sorted(support, key=lambda hashed: (-support[hashed], hashed))[: 12 - 1]
    assert ids.known["author"].tolist() == ordered
    row = {hashed: place + 1 for place, hashed in enumerate(ordered)}
    assert ids.of_items["author"].tolist() == [0, 0, *(row.get(h, 0) for h in lines.tolist())]


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained[1], tmp_path / "model")
    return tmp_path / "model"


def too_long(folder):
    pq.write_table(pa.table({"hash": pa.array(range(12))}), folder / "ids" / "author.parquet")


def of_another_catalog(folder):
    save_file({"author": torch.zeros(7, dtype=torch.int64)}, folder / "item_ids.safetensors")


def beyond_the_table(folder):
    rows = Bundle.load(folder).ids.of_items["author"]
    save_file({"author": rows + 1}, folder / "item_ids.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "ids" / "author.parquet").unlink(), "author.parquet cannot be"),
        (too_long, r"author.parquet holds 12 values of int64; int64 and at most 11"),
        (lambda folder: (folder / "item_ids.safetensors").write_bytes(b"x"), "item_ids.*cannot be"),
        (of_another_catalog, r"lacks the \d+ rows of the table `author`"),
        (beyond_the_table, "beyond the 12 of the table `author`"),
        (lambda folder: (folder / "tables" / "user.safetensors").unlink(), "user.safetensors"),
        (lambda folder: (folder / "content.safetensors").unlink(), "content.safetensors"),
    ],
)
def test_a_file_that_is_missing_or_does_not_fit_is_named(copied, damage, message):
    damage(copied)
    with pytest.raises(DataError, match=message):
        Bundle.load(copied)


def test_id_columns_are_optional_inputs_of_the_registered_model(trained):
    bundle = Bundle.load(trained[1])
    required = {column.name: column.required for column in packing.signature(bundle).inputs}
    assert required["user_id"] is False
    assert "author_id" not in required
    assert packing.input_example(bundle)["user_id"].tolist() == ["1", "2"]
    json.dumps(packing.signature(bundle).to_dict())


def test_a_column_may_be_both_context_and_an_id(tmp_path):
    table = IdTableSettings(column="device", rows=9, dim=2)
    bundle = write_model(tmp_path / "model", INT_IDS, tables={"device": table})
    names = [column.name for column in packing.signature(bundle).inputs]
    assert names.count("device") == 1
    assert packing.input_example(bundle)["device"].tolist() == ["phone", "phone"]
    scores = served(tmp_path / "model").predict(None, packing.input_example(bundle))
    assert np.isfinite(scores["save"][0]).all()
