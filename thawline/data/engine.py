"""The query engines of the data stages: ibis on an embedded DuckDB or on Spark, and their hashes.

Every expression is written once, with ibis. The few functions that ibis has no common name for
are declared here as `thawline_<name>`; each engine brings its own SQL for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.duckdb import Backend as DuckDB
from ibis.backends.sql import SQLBackend as Backend

from thawline.config import Runtime, Windows
from thawline.errors import ConfigError, DataError

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000


OURS = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.InternalException,
    duckdb.NotImplementedException,
    duckdb.OutOfMemoryException,
    duckdb.ParserException,
)
"""What DuckDB raises for reasons that are not in a file."""

MACROS = {
    # Only the engine's own cast reads hexadecimal digits fast; it wants them unsigned.
    "thawline_hash63": "CAST(CAST('0x' || substr(md5(x), 1, 16) AS UBIGINT) >> 1 AS BIGINT)",
    "thawline_epoch_us": "epoch_us(x)",
    "thawline_text_epoch_us": "epoch_us(TRY_CAST(x AS TIMESTAMPTZ))",
    "thawline_text_float": "TRY_CAST(x AS DOUBLE)",
}
"""DuckDB's SQL of the functions below; Spark's is in `spark`."""


@contextmanager
def open_engine(windows: Windows, runtime: Runtime, scratch: Path) -> Iterator[Backend]:
    """The engine that `windows.engine` names, which spills into `scratch`.

    Raises:
        ConfigError: A memory limit that is no size, or an engine that is not installed.
        DataError: The memory or the disk ran out while the engine was open.
    """
    if windows.engine == "spark":
        with _open_spark(windows, runtime, scratch) as engine:
            yield engine
        return
    try:
        engine = ibis.duckdb.connect(
            memory_limit=windows.memory_limit,
            temp_directory=str(scratch),
            threads=runtime.threads or len(os.sched_getaffinity(0)),
        )
    except duckdb.Error as error:
        raise ConfigError(
            f"windows.memory_limit: {windows.memory_limit!r} is not a size: {first_line(error)}",
            "write a size such as 4GB",
        ) from error
    for name, sql in MACROS.items():
        engine.con.execute(f"CREATE MACRO {name}(x) AS {sql}")
    try:
        yield engine
    except duckdb.OutOfMemoryException as error:
        raise DataError(
            f"the data stage ran out of memory or temporary disk: {first_line(error)}",
            f"raise windows.memory_limit (now {windows.memory_limit}) or free space on the disk",
        ) from error
    finally:
        engine.disconnect()


@contextmanager
def _open_spark(windows: Windows, runtime: Runtime, scratch: Path) -> Iterator[Backend]:
    try:
        from thawline.data import spark
    except ImportError as error:
        raise ConfigError(
            f"windows.engine: spark needs a package that is missing: {error}",
            "pip install 'thawline[spark]' and Java 17, or set windows.engine to duckdb",
        ) from error
    engine = spark.connect(windows, runtime, scratch)
    try:
        yield engine
    except spark.ERRORS as error:
        raise DataError(
            f"the data stage failed in Spark: {spark.reason(error)}",
            f"if memory ran out, raise windows.memory_limit (now {windows.memory_limit}) or the "
            "executors' memory in windows.spark; else look into Spark's log",
        ) from error
    finally:
        engine.disconnect()


def keep(engine: Backend, name: str, table: ir.Table) -> ir.Table:
    """Runs a query and keeps its result in the engine under a new name."""
    return engine.create_table(name, table, temp=True)


def stream(engine: Backend, table: ir.Table, rows: int = 8_192) -> Iterator[pa.RecordBatch]:
    """Runs a query and gives its rows a batch at a time, in order."""
    if isinstance(engine, DuckDB):
        # `Table.to_pyarrow_batches` of ibis 12.0 calls a method that DuckDB 2 no longer has.
        yield from engine.con.sql(engine.compile(table)).to_arrow_reader(rows)
    else:
        yield from engine.stream(table, rows)


def of_input(error: Exception) -> bool:
    """Whether an engine failed over what it read, not over what it was asked."""
    if isinstance(error, duckdb.Error):
        return not isinstance(error, OURS)
    # Spark's errors without importing it: a query that it refuses is an AnalysisException.
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"PySparkException", "Py4JJavaError"}) and "AnalysisException" not in names


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def hash63(text: ir.StringValue) -> ir.IntegerValue:
    """A stable integer below 2^63: the first 63 bits of the text's MD5."""
    return thawline_hash63(text)


def hashed_below(text: ir.StringValue, salt: str, share: float) -> ir.BooleanValue:
    """Whether the text's hash falls into the first `share` of all hashes.

    Compares hexadecimal digits as text, which every engine does alike. Another salt gives an
    independent choice.
    """
    if share >= 1.0:
        return ibis.literal(True)
    digits = (ibis.literal(f"{salt}:") + text).hexdigest("md5").substr(0, 12)
    return digits < f"{int(share * 16**12):012x}"


def epoch_us(value: ir.TimestampValue) -> ir.IntegerValue:
    """Microseconds since 1970 UTC of a timestamp."""
    return thawline_epoch_us(value)


def text_epoch_us(text: ir.StringValue) -> ir.IntegerValue:
    """Microseconds since 1970 UTC of a time written as text; null where it is none."""
    return thawline_text_epoch_us(text)


def text_float(text: ir.StringValue) -> ir.FloatingValue:
    """The number that a text writes; null where it writes none."""
    return thawline_text_float(text)


@ibis.udf.scalar.builtin(signature=(("string",), "int64"))
def thawline_hash63(x):  # type: ignore[no-untyped-def] # noqa: D103
    ...


@ibis.udf.scalar.builtin(signature=(("timestamp",), "int64"))
def thawline_epoch_us(x):  # type: ignore[no-untyped-def] # noqa: D103
    ...


@ibis.udf.scalar.builtin(signature=(("string",), "int64"))
def thawline_text_epoch_us(x):  # type: ignore[no-untyped-def] # noqa: D103
    ...


@ibis.udf.scalar.builtin(signature=(("string",), "float64"))
def thawline_text_float(x):  # type: ignore[no-untyped-def] # noqa: D103
    ...
