"""Content vectors: from a file with a line an item to an array over the catalog's rows."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TINY_FEED
from engine_helpers import with_engine
from window_reference import config_for, random_log, write_log

from thawline.config import Config, parse_config
from thawline.data import item_file
from thawline.data.content import read_content
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset
from thawline.errors import ConfigError, DataError

pytest_plugins = ["engine_fixtures"]

DIM = 3


def vector_of(item):
    """Numbers that float32 holds."""
    return [item / 8, -item / 2, 1.5]


def lines_of(items):
    """Lines in falling order of the ids; every fifth item has null, every seventh no line."""
    return [
        {"item": item, "vector": None if item % 5 == 0 else vector_of(item)}
        for item in sorted(items, reverse=True)
        if item % 7
    ]


def write(lines, path, kind=None):
    schema = pa.schema([("item", pa.int64()), ("vector", kind or pa.list_(pa.float32()))])
    pq.write_table(pa.Table.from_pylist(lines, schema), path)
    return str(path)


@pytest.fixture(scope="module")
def rows():
    return random_log("int")


@pytest.fixture
def config(rows, tmp_path):
    """The config of a log of the items 951 to 1000, without a file of items."""
    return config_for(write_log(rows, tmp_path / "log.parquet"), True)


def with_content(config, path):
    items = {"path": path, "item_id": "item", "content": "vector"}
    return Config.model_validate(config.model_dump(mode="json") | {"items": items})


def built(config, root):
    root.mkdir()
    build_dataset(config, root)
    return Dataset.open(root)


def expected_content(dataset, lines):
    by_item = {line["item"]: line["vector"] for line in lines}
    vectors = [by_item.get(item) or [0] * DIM for item in dataset.catalog.item_id.to_pylist()]
    return np.array([[0] * DIM, [0] * DIM, *vectors], np.float32)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), DIM)])
@pytest.mark.timeout(600)
def test_vectors_are_in_the_catalogs_rows_with_zeros_elsewhere(
    config, rows, engine, kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(item_file, "FLOATS_PER_GROUP", 7 * DIM)
    known = {row["item"] for row in rows}
    lines = lines_of([*known, 1, 2, 3])
    path = write(lines, tmp_path / "items.parquet", kind)
    dataset = built(with_engine(with_content(config, path), engine), tmp_path / "dataset")
    content = read_content(dataset)
    assert content.dtype == np.float32
    assert content.shape == (dataset.catalog.num_rows, DIM)
    assert np.array_equal(content, expected_content(dataset, lines))
    seen = set(dataset.catalog.item_id.to_pylist())
    given = {line["item"] for line in lines if line["vector"]} & seen
    facts = dataset.manifest.content
    assert (facts.dim, facts.items, facts.missing) == (DIM, len(given), len(seen - given))
    assert 0 < len(given) < len(seen)
    with pq.ParquetFile(dataset.root / "items.parquet") as file:
        sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert sizes == [7] * (len(seen) // 7) + [len(seen) % 7]


def test_a_bucket_has_no_vector(config, rows, tmp_path):
    catalog = {"min_support": 12, "buckets": 4}
    shared = config.model_dump(mode="json")
    shared["windows"]["catalog"] = catalog
    lines = lines_of({row["item"] for row in rows})
    path = write(lines, tmp_path / "items.parquet")
    dataset = built(with_content(Config.model_validate(shared), path), tmp_path / "dataset")
    assert dataset.catalog.item_id.to_pylist()[:4] == [None] * 4
    assert dataset.manifest.rows.bucketed > 5
    assert np.array_equal(read_content(dataset), expected_content(dataset, lines))
    assert not read_content(dataset)[:6].any()


def test_a_simulated_feed_has_the_content_of_its_items(tmp_path):
    simulated = TINY_FEED["simulate"] | {"content_dim": 5}
    dataset = built(
        Config.model_validate(TINY_FEED | {"simulate": simulated}), tmp_path / "dataset"
    )
    items = pq.read_table(dataset.root / "source" / "items.parquet").to_pydict()
    by_item = dict(zip(items["item_id"], items["content"], strict=True))
    expected = [by_item[item] for item in dataset.catalog.item_id.to_pylist()]
    assert np.array_equal(read_content(dataset)[2:], np.array(expected, np.float32))


def test_the_version_of_the_data_follows_the_vectors(config, rows, tmp_path):
    lines = lines_of({row["item"] for row in rows})
    path = write(lines, tmp_path / "items.parquet")
    one = built(with_content(config, path), tmp_path / "one")
    same = built(with_content(config, path), tmp_path / "same")
    changed = next(line for line in lines if line["vector"])
    changed["vector"] = [0.0, 0.0, 0.25]
    path = write(lines, tmp_path / "changed.parquet")
    other = built(with_content(config, path), tmp_path / "other")
    assert same.manifest.data_version == one.manifest.data_version
    assert other.manifest.data_version != one.manifest.data_version


def test_a_dataset_without_vectors_says_how_to_get_them(config, tmp_path):
    dataset = built(config, tmp_path / "dataset")
    with pytest.raises(DataError, match="was built without content vectors"):
        read_content(dataset)


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        ([1.0, 2.0], "different lengths, such as 2 numbers of item '953' and 3 of item"),
        ([], "different lengths, such as 0 numbers of item '953'"),
        ([1.0, None, 2.0], "the vector of item '953' holds a null, a NaN or an infinite number"),
        ([1.0, float("nan"), 2.0], "the vector of item '953' holds a null, a NaN"),
        ([1.0, float("inf"), 2.0], "the vector of item '953' holds a null, a NaN"),
    ],
)
def test_a_broken_vector_is_named_with_its_item(config, rows, vector, said, tmp_path):
    lines = lines_of({row["item"] for row in rows})
    next(line for line in lines if line["item"] == 953)["vector"] = vector
    path = write(lines, tmp_path / "items.parquet")
    with pytest.raises(DataError, match=said) as error:
        built(with_content(config, path), tmp_path / "refused")
    assert "items.parquet" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "vector", "said"),
    [
        (pa.float32(), 1.0, "is of type float32"),
        (pa.list_(pa.string()), ["a"], "is of type array<string>"),
        (pa.list_(pa.float32()), None, "holds no vector"),
        (pa.list_(pa.float32()), [], "holds no vector"),
    ],
)
def test_a_column_without_vectors_is_refused(config, kind, vector, said, tmp_path):
    lines = [{"item": item, "vector": vector} for item in range(951, 1_001)]
    path = write(lines, tmp_path / "items.parquet", kind)
    with pytest.raises(DataError, match=rf"column 'vector' \(items.content\) {said}"):
        built(with_content(config, path), tmp_path / "refused")


def test_a_missing_column_of_vectors_is_refused(config, tmp_path):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item": [1000]}), path)
    with pytest.raises(DataError, match=r"no column 'vector' \(items.content\)"):
        built(with_content(config, str(path)), tmp_path / "refused")


def test_vectors_need_a_file(config):
    with pytest.raises(ConfigError, match="content names a column, but path names no file"):
        parse_config("events: {path: log.parquet}\nitems: {content: vector}")


def test_a_damaged_file_of_vectors_is_named(config, rows, tmp_path):
    path = write(lines_of({row["item"] for row in rows}), tmp_path / "items.parquet")
    dataset = built(with_content(config, path), tmp_path / "dataset")
    stored = dataset.root / "items.parquet"
    table = pq.read_table(stored)
    pq.write_table(table.slice(1), stored)
    with pytest.raises(DataError, match=r"items.parquet has \d+ lines, the catalog"):
        read_content(dataset)
    stored.write_bytes(stored.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"items.parquet cannot be read"):
        read_content(dataset)
