"""Settings of Spark for small logs, and what its datasets have in common with DuckDB's."""

import pyarrow.parquet as pq

SPARK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    # Of a query over a few rows, compiling it takes most of the time.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def with_engine(config, engine):
    windows = config.windows.model_copy(update={"engine": engine, "spark": SPARK})
    return config.model_copy(update={"windows": windows})


def tables(root):
    """Every Parquet file of a folder by its path, but a simulated log's."""
    return {
        str(file.relative_to(root)): pq.read_table(file, partitioning=None)
        for file in sorted(root.rglob("*.parquet"))
        if "source" not in file.relative_to(root).parts
    }


def assert_same(one, other):
    expected, found = tables(one.root), tables(other.root)
    assert list(found) == list(expected)
    for name, table in expected.items():
        assert found[name].schema == table.schema, name
        assert found[name].equals(table), name
    assert one.manifest == other.manifest
