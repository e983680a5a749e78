"""The first rows of ID tables beside `item`: random ones, and those of an earlier model."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow_helpers import INT_IDS, write_model

from thawline.config import IdTableSettings
from thawline.data.ids import vocabulary_path
from thawline.data.manifest import Dataset
from thawline.errors import DataError
from thawline.model.bundle import Bundle, save_bundle
from thawline.model.ids import ModelIds
from thawline.stages.id_tables import first_rows
from thawline.tables.carry import carry_known

KNOWN = IdTableSettings(column="user_id", rows=6, dim=2, hashed=False, init=0.5)
HASHED = IdTableSettings(column="user_id", rows=6, dim=2)


def write_source(folder, settings, hashes=()):
    """A model folder with a table `user`: row r holds r and -r."""
    bundle = write_model(folder / "plain", INT_IDS, tables={"user": HASHED})
    place = torch.arange(float(settings.rows))
    bundle = dataclasses.replace(
        bundle,
        meta=bundle.meta.model_copy(update={"tables": {"user": settings}}),
        weights=dict(bundle.weights) | {"user": torch.stack([place, -place], 1)},
        ids=ModelIds({} if settings.hashed else {"user": np.array(hashes, np.int64)}),
    )
    save_bundle(folder / "model", bundle, folder / "plain" / "catalog.parquet")
    return folder / "model"


@pytest.fixture
def dataset(tmp_path):
    """A dataset of which only the vocabulary is looked at: 70 is the most frequent, then 10."""
    root = tmp_path / "dataset"
    path = vocabulary_path(root, "request", "user_id")
    path.parent.mkdir(parents=True)
    hashes, support = pa.array([70, 10, 80, 30], pa.int64()), pa.array([9, 8, 7, 6], pa.int64())
    pq.write_table(pa.table({"hash": hashes, "support": support}), path)
    manifest = {"ids": {"request": {"user_id": 4}}}
    return Dataset(root, type("Manifest", (), manifest)())


def test_ids_of_a_vocabulary_keep_their_rows_where_the_rows_have_moved(tmp_path, dataset):
    source = write_source(tmp_path, KNOWN, [10, 20, 30])

    rows = first_rows("user", KNOWN, dataset, source, seed=3)

    fresh = first_rows("user", KNOWN, dataset, tmp_path / "table", seed=3)
    assert rows[2].tolist() == [1, -1]
    assert rows[4].tolist() == [3, -3]
    for new in (0, 1, 3, 5):
        assert rows[new].tolist() == fresh[new].tolist()
    assert len(fresh.unique(dim=0)) == 6


def test_a_vocabulary_may_get_more_or_fewer_rows(tmp_path, dataset):
    source = write_source(tmp_path, KNOWN, [10, 20, 30])
    for rows, kept in ((3, {2: 1}), (9, {2: 1, 4: 3})):
        settings = KNOWN.model_copy(update={"rows": rows})
        found = first_rows("user", settings, dataset, source, seed=3)
        assert found.shape == (rows, 2)
        carried = {
            row: int(own[0]) for row, own in enumerate(found.tolist()) if own[0] == -own[1] != 0
        }
        assert carried == kept


def test_hashed_rows_are_taken_over_as_they_are(tmp_path, dataset):
    source = write_source(tmp_path, HASHED)

    rows = first_rows("user", HASHED, dataset, source, seed=3)

    assert rows.equal(Bundle.load(source).weights["user"])


@pytest.mark.parametrize(
    ("trained", "changed", "message"),
    [
        (HASHED, {"rows": 7}, r"tables\.user\.rows is 7, but .* was trained with 6"),
        (HASHED, {"dim": 3}, r"(?s)tables\.user\.dim is 3.*set tables\.user\.dim=2"),
        (HASHED, {"hashed": False}, r"tables\.user\.hashed is False.*trained with True"),
        (HASHED, {"column": "board"}, r"tables\.user\.column is board, but .* with user_id"),
        (KNOWN, {"of": "item"}, r"tables\.user\.of is item, but .* trained with request"),
        (KNOWN, {"hashed": True}, r"tables\.user\.hashed is True.*trained with False"),
    ],
)
def test_rows_that_would_mean_something_else_are_refused(
    tmp_path, dataset, trained, changed, message
):
    source = write_source(tmp_path, trained, [10, 20, 30])
    with pytest.raises(DataError, match=message):
        first_rows("user", trained.model_copy(update=changed), dataset, source, seed=3)


def test_a_model_folder_without_its_vocabulary_is_refused(tmp_path, dataset):
    source = write_source(tmp_path, KNOWN, [10, 20, 30])
    (source / "ids" / "user.parquet").unlink()
    with pytest.raises(DataError, match=r"user\.parquet cannot be read"):
        first_rows("user", KNOWN, dataset, source, seed=3)


def test_rows_are_carried_by_hash_as_a_loop_would():
    rng = np.random.default_rng(0)
    old, new = (rng.choice(200, size, replace=False).astype(np.int64) for size in (80, 120))
    weight, fresh = torch.randn(81, 3), torch.randn(150, 3)
    before = fresh.clone()

    carried = carry_known(weight, old, new, fresh)

    place = {hashed: row + 1 for row, hashed in enumerate(old.tolist())}
    for row in range(150):
        hashed = int(new[row - 1]) if 1 <= row <= 120 else None
        wanted = weight[place[hashed]] if hashed in place else before[row]
        assert carried[row].equal(wanted)
    assert fresh.equal(before)
