"""DuckDB and Spark give the same rows of the same expressions."""

import shutil

import pyarrow.parquet as pq
import pytest
from test_windows import config_for, random_log, write_log

from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset

SPARK = {"spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"}


def require_spark():
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'thawline[spark]'")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17, and there is no java on the PATH")


def with_engine(config, engine):
    windows = config.windows.model_copy(update={"engine": engine, "spark": SPARK})
    return config.model_copy(update={"windows": windows})


def built(config, root):
    root.mkdir(parents=True)
    build_dataset(config, root)
    return Dataset.open(root)


def tables(root):
    """Every Parquet file of a folder by its path."""
    return {
        str(file.relative_to(root)): pq.read_table(file, partitioning=None)
        for file in sorted(root.rglob("*.parquet"))
        if "source" not in file.relative_to(root).parts
    }


def assert_same(one, other):
    assert one.manifest == other.manifest
    expected, found = tables(one.root), tables(other.root)
    assert list(found) == list(expected)
    for name, table in expected.items():
        assert found[name].schema == table.schema, name
        assert found[name].equals(table), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["impressions-int", "impressions-text", "clicks-int", "clicks-text"]
)
def test_both_engines_build_the_same_dataset_row_for_row(case, tmp_path):
    require_spark()
    kind, ids = case.split("-")
    config = config_for(write_log(random_log(ids), tmp_path / "log.parquet"), kind == "impressions")
    duckdb = built(with_engine(config, "duckdb"), tmp_path / "duckdb")
    spark = built(with_engine(config, "spark"), tmp_path / "spark")
    assert sum(duckdb.manifest.requests.values()) > 50
    assert_same(duckdb, spark)
