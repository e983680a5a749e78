"""The ID tables of a model as Parquet, for retrieval."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow_helpers import INT_IDS, STRING_IDS, make_config, write_model
from typer.testing import CliRunner

from thawline.cli import app
from thawline.errors import DataError
from thawline.model import vectors
from thawline.model.bundle import Bundle
from thawline.model.ids import ModelIds
from thawline.stages import fetch


@pytest.fixture(scope="module", params=[INT_IDS, STRING_IDS], ids=["int", "string"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, request.param)
    return folder, request.param


def adapted(bundle, rows):
    """`e + eA + b` by numpy, float64."""
    own = bundle.weights["item"].numpy().astype(float)[rows]
    adapter = bundle.ranker.adapter
    matrix, bias = (part.detach().numpy().astype(float) for part in (adapter.matrix, adapter.bias))
    return own + own @ matrix + bias


def test_an_items_vector_is_its_row_after_the_adapter(model, tmp_path, monkeypatch):
    folder, ids = model
    bundle = Bundle.load(folder)
    monkeypatch.setattr(vectors, "ROWS_PER_GROUP", 4)
    (path,) = vectors.write_vectors(bundle, tmp_path)
    assert path == tmp_path / "item.parquet"
    table = pq.read_table(path)
    assert pq.ParquetFile(path).num_row_groups == 2
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 8)
    assert table.column("item_id").to_pylist() == ids
    # Row 0 is padding and row 1 stands for unknown items.
    wanted = adapted(bundle, np.arange(2, len(ids) + 2))
    assert np.abs(wanted - bundle.weights["item"].numpy()[2:]).max() > 0.1
    np.testing.assert_allclose(table.column("vector").to_pylist(), wanted, atol=1e-6)


def test_a_bucket_is_no_item_of_its_own(model, tmp_path):
    folder, ids = model
    bundle = Bundle.load(folder)
    kept = [item if place not in (1, 2) else None for place, item in enumerate(ids)]
    catalog = dataclasses.replace(
        bundle.catalog, item_id=pa.array(kept, bundle.catalog.item_id.type)
    )
    vectors.write_table(
        dataclasses.replace(bundle, catalog=catalog), "item", tmp_path / "i.parquet"
    )
    table = pq.read_table(tmp_path / "i.parquet")
    assert table.column("item_id").to_pylist() == [ids[0], *ids[3:]]
    wanted = adapted(bundle, [2, 5, 6, 7])
    np.testing.assert_allclose(table.column("vector").to_pylist(), wanted, atol=1e-6)


def test_a_further_table_with_a_vocabulary_has_hashes_and_its_rows_as_they_are(model, tmp_path):
    bundle = Bundle.load(model[0])
    authors = torch.randn(5, 3)
    # Ids of rows 1 to 3; the rest of the table has nobody.
    ids = ModelIds({"author": np.array([77, 5, 123_456_789_012])}, {})
    bundle = dataclasses.replace(bundle, weights={**bundle.weights, "author": authors}, ids=ids)
    paths = vectors.write_vectors(bundle, tmp_path)
    assert [path.name for path in paths] == ["item.parquet", "author.parquet"]
    table = pq.read_table(paths[1])
    assert table.column("hash").to_pylist() == [77, 5, 123_456_789_012]
    np.testing.assert_array_equal(table.column("vector").to_pylist(), authors[1:4].numpy())
    written = sum(path.stat().st_size for path in paths)
    assert abs(vectors.vector_bytes(bundle) - written) < 4_000


def test_the_command_writes_the_table_of_a_local_model_too(model, tmp_path):
    folder, ids = model
    arguments = ["table", "--model", str(folder), "--output", str(tmp_path / "out" / "t.parquet")]
    asked = CliRunner().invoke(app, arguments)
    assert asked.exit_code == 0, asked.output
    assert pq.read_table(tmp_path / "out" / "t.parquet").column("item_id").to_pylist() == ids
    config = make_config(tmp_path)
    with pytest.raises(DataError, match="no table 'user' with ids"):
        fetch.table(config, str(folder), "user", tmp_path / "user.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
