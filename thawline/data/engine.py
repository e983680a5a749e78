"""The query engine of the data stages: ibis on an embedded DuckDB, and hashes that outlive it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.duckdb import Backend

from thawline.config import Runtime, Windows
from thawline.errors import ConfigError, DataError

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000


@contextmanager
def open_engine(windows: Windows, runtime: Runtime, scratch: Path) -> Iterator[Backend]:
    """An in-memory DuckDB that spills into `scratch` beyond `windows.memory_limit`.

    Raises:
        ConfigError: A memory limit that DuckDB cannot read.
        DataError: The memory or the disk ran out while the engine was open.
    """
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
    try:
        yield engine
    except duckdb.OutOfMemoryException as error:
        raise DataError(
            f"the data stage ran out of memory or temporary disk: {first_line(error)}",
            f"raise windows.memory_limit (now {windows.memory_limit}) or free space on the disk",
        ) from error
    finally:
        engine.disconnect()


def keep(engine: Backend, name: str, table: ir.Table) -> ir.Table:
    """Runs a query and keeps its result in the engine under a new name."""
    return engine.create_table(name, table, temp=True)


def stream(engine: Backend, table: ir.Table, rows: int = 8_192) -> Iterator[pa.RecordBatch]:
    """Runs a query and gives its rows a batch at a time, in order."""
    # `Table.to_pyarrow_batches` of ibis 12.0 calls a method that DuckDB 2 no longer has.
    yield from engine.con.sql(engine.compile(table)).to_arrow_reader(rows)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def hash63(text: ir.StringValue) -> ir.IntegerValue:
    """A stable integer below 2^63: the first 63 bits of the text's MD5."""
    digits = text.hexdigest("md5").substr(0, 16)
    # Only the engine's own cast reads hexadecimal digits fast; it wants them unsigned.
    unsigned = (ibis.literal("0x") + digits).cast("uint64")
    return (unsigned >> 1).cast("int64")


def hashed_below(text: ir.StringValue, salt: str, share: float) -> ir.BooleanValue:
    """Whether the text's hash falls into the first `share` of all hashes.

    Compares hexadecimal digits as text, which every engine does alike. Another salt gives an
    independent choice.
    """
    if share >= 1.0:
        return ibis.literal(True)
    digits = (ibis.literal(f"{salt}:") + text).hexdigest("md5").substr(0, 12)
    return digits < f"{int(share * 16**12):012x}"


@ibis.udf.scalar.builtin(signature=(("timestamp",), "int64"))
def epoch_us(value):  # type: ignore[no-untyped-def]
    """Microseconds since 1970 of a timestamp; the engine's own function."""
