"""ibis on Spark as the data stages need it: kept tables, ordered lists, Arrow both ways.

What ibis' own PySpark backend lacks or does through pandas, and the SQL of the functions that
`engine` names, in Spark's dialect.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
import sqlglot as sg
import sqlglot.expressions as sge
from ibis.backends.pyspark import Backend
from ibis.backends.pyspark.datatypes import PySparkSchema
from ibis.backends.sql.compilers.pyspark import PySparkCompiler
from ibis.common.exceptions import UnsupportedOperationError
from ibis.util import gen_name
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.types import StringType

from thawline.config import Runtime, Windows
from thawline.data.packing import COLUMN, pack, unpack
from thawline.data.storage import origin
from thawline.errors import ConfigError

ERRORS = (PySparkException, Py4JJavaError)
"""What a query that fails in Spark raises."""

FUNCTIONS = {
    # The first 60 bits, then 3 of the next 4: a signed integer cannot take all 64.
    "thawline_hash63": "CAST(CONV(SUBSTRING(MD5(@x), 1, 15), 16, 10) AS BIGINT) * 8 "
    "+ SHIFTRIGHT(CAST(CONV(SUBSTRING(MD5(@x), 16, 1), 16, 10) AS BIGINT), 1)",
    "thawline_epoch_us": "UNIX_MICROS(CAST(@x AS TIMESTAMP))",
    # Spark alone takes `2026` and `12:30` for times; with a slash between, it takes none.
    "thawline_text_epoch_us": "UNIX_MICROS(CASE WHEN @x RLIKE '^ *[0-9]+[-/][0-9]+[-/][0-9]' "
    "THEN TRY_CAST(TRANSLATE(@x, '/', '-') AS TIMESTAMP) END)",
    # Java alone takes `1.5d` and `1.5f` for numbers.
    "thawline_text_float": "CASE WHEN NOT @x RLIKE '[dDfF] *$' OR LOWER(TRIM(@x)) RLIKE 'inf$' "
    "THEN TRY_CAST(@x AS DOUBLE) END",
}
"""Spark's SQL of the functions that `engine` names, over their argument `@x`."""

UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}


class SparkCompiler(PySparkCompiler):
    """Adds what Spark's SQL can say but ibis does not: lists and firsts in an order."""

    __slots__ = ()

    def visit_ScalarUDF(self, op: Any, **kwargs: Any) -> sge.Expression:  # noqa: N802
        """Our own functions are written out in place."""
        sql = FUNCTIONS.get(getattr(op, "__func_name__", ""))
        if sql is None:
            return super().visit_ScalarUDF(op, **kwargs)
        (argument,) = kwargs.values()
        tree = sg.parse_one(sql, dialect="spark")

        def fill(node: sge.Expression) -> sge.Expression:
            return argument.copy() if isinstance(node, sge.Parameter) else node

        return tree.transform(fill)

    def visit_ArrayCollect(  # noqa: N802
        self, op: Any, *, arg: Any, where: Any, order_by: Any, include_null: Any, distinct: Any
    ) -> sge.Expression:
        """A list in an order: structs of the keys and the value, sorted, then the values."""
        if not order_by or distinct or where is not None:
            return super().visit_ArrayCollect(
                op,
                arg=arg,
                where=where,
                order_by=order_by,
                include_null=include_null,
                distinct=distinct,
            )
        keys = _sort_keys(order_by)
        kept = arg if include_null else None
        entry = self.f.struct(*keys, arg.as_("value"))
        if kept is None:
            entry = self.if_(arg.is_(sge.null()), sge.null(), entry)
        item = sg.to_identifier("entry")
        return self.f.transform(
            self.f.array_sort(self.f.collect_list(entry)),
            sge.Lambda(
                this=sge.Dot(this=item, expression=sg.to_identifier("value")), expressions=[item]
            ),
        )

    def visit_First(  # noqa: N802
        self, op: Any, *, arg: Any, where: Any, order_by: Any, include_null: Any
    ) -> sge.Expression:
        """The first value in an order."""
        if not order_by or where is not None:
            return super().visit_First(
                op, arg=arg, where=where, order_by=order_by, include_null=include_null
            )
        order = self.f.struct(*_sort_keys(order_by))
        if not include_null:
            order = self.if_(arg.is_(sge.null()), sge.null(), order)
        return self.f.min_by(arg, order)


def _sort_keys(order_by: Any) -> list[Any]:
    """Nulls last, whatever the engine's own order of nulls within a struct is."""
    keys: list[Any] = []
    for place, key in enumerate(order_by):
        if key.args.get("desc") or key.args.get("nulls_first"):
            raise UnsupportedOperationError("an ordered list in falling order")
        keys.append(sge.Is(this=key.this.copy(), expression=sge.null()).as_(f"null{place}"))
        keys.append(key.this.copy().as_(f"key{place}"))
    return keys


class SparkEngine(Backend):
    """ibis' PySpark backend, with temporary tables and results as Arrow instead of pandas."""

    compiler = SparkCompiler()
    owned = False
    """Whether the session was started here, hence is ended here."""

    def frame(self, table: ir.Table) -> DataFrame:
        """A query as a Spark data frame, not run yet."""
        self._run_pre_execute_hooks(table)
        return self._session.sql(self.compile(table))

    def view(self, name: str, frame: DataFrame) -> ir.Table:
        """A data frame as a table of ibis."""
        frame.createOrReplaceTempView(name)
        return self.table(name)

    def _locations(self, files: Sequence[Path]) -> list[str]:
        cluster = not (self._session.sparkContext.master or "").startswith("local")
        return [location(file, cluster=cluster) for file in files]

    def open_parquet(self, files: Sequence[Path]) -> ir.Table:
        """A table over Parquet files of one schema, the first one's."""
        frame = self._session.read.parquet(*self._locations(files))
        for field in frame.schema:
            if isinstance(field.dataType, StringType):
                # Spark hands on bytes that are no UTF-8; here U+FFFD comes to stand for them.
                whole = functions.make_valid_utf8(frame[f"`{field.name.replace('`', '``')}`"])
                frame = frame.withColumn(field.name, whole)
        for field in pq.read_schema(files[0]):
            # Spark reads nanoseconds as integers, where it is told to; DuckDB rounds them.
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
                micros = functions.timestamp_micros(
                    functions.expr(f"(`{field.name.replace('`', '``')}` + 500) DIV 1000")
                )
                frame = frame.withColumn(field.name, micros)
        return self.view(gen_name("parquet"), frame)

    def open_csv(
        self,
        files: Sequence[Path],
        separator: str,
        names: Sequence[str],
        *,
        skip_first: bool,
        malformed: str,
    ) -> ir.Table:
        """A table over CSV files, every column as text.

        The column `malformed` comes after the named ones: a line of another number of fields than
        theirs, or null.
        """
        reader = self._session.read.options(
            sep=separator,
            quote='"',
            escape='"',
            header=skip_first,
            mode="PERMISSIVE",
            columnNameOfCorruptRecord=malformed,
        )
        quoted = (f"`{name.replace('`', '``')}` STRING" for name in (*names, malformed))
        frame = reader.schema(", ".join(quoted)).csv(self._locations(files))
        return self.view(gen_name("csv"), frame)

    def create_table(self, name: str, /, obj: Any = None, **options: Any) -> ir.Table:
        """With `temp=True`, runs a query now and keeps its rows in memory, or on disk.

        The rows are cut off from the query that made them, which would otherwise be planned again
        by each query over them. They live with the executors, and outlive one only where
        `spark.checkpoint.dir` is set.
        """
        if not options.pop("temp", None):
            return super().create_table(name, obj, **options)
        if isinstance(obj, ir.Table):
            frame = self.frame(obj)
            # ibis leaves out a cast where its own type is right but Spark's is wider.
            frame = frame.to(PySparkSchema.from_ibis(obj.schema()))
        else:
            frame = self._session.createDataFrame(obj)
        lasting = self._session.conf.get("spark.checkpoint.dir", None) is not None
        return self.view(name, frame.checkpoint() if lasting else frame.localCheckpoint())

    def to_pyarrow(self, expr: ir.Expr, /, **_: Any) -> Any:
        """A result whole; a null never turns an integer into a float on the way."""
        table = expr.as_table()
        result = self.frame(table).toArrow()
        return expr.__pyarrow_result__(_as_declared(result, table))

    def stream(self, table: ir.Table, rows: int) -> Iterator[pa.RecordBatch]:
        """A result in order, in the memory of one of Spark's partitions at a time."""
        packed = self.frame(table).mapInArrow(pack, f"{COLUMN} binary")
        for row in packed.toLocalIterator():
            for batch in unpack(row[COLUMN]):
                yield from _as_declared(pa.Table.from_batches([batch]), table).to_batches(rows)

    def disconnect(self) -> None:
        """Ends the session if it was started here."""
        if self.owned:
            super().disconnect()


def _as_declared(result: pa.Table, table: ir.Table) -> pa.Table:
    return result.cast(table.schema().to_pyarrow())


def connect(windows: Windows, runtime: Runtime, scratch: Path) -> SparkEngine:
    """Spark as `spark-submit` set it up, or else within this process, spilling into `scratch`.

    Raises:
        ConfigError: Java is missing, or a setting that Spark refuses.
    """
    running = SparkSession.getActiveSession()
    settings = {
        "spark.app.name": "thawline",
        "spark.sql.session.timeZone": "UTC",
        # Without it, a CSV line that is too short passes where its last columns are not needed.
        "spark.sql.csv.parser.columnPruning.enabled": "false",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
    }
    # The variable by which spark-submit tells PySpark of the JVM that it started.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if running is None and not submitted:
        threads = runtime.threads or len(os.sched_getaffinity(0))
        settings |= {
            "spark.master": f"local[{threads}]",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": java_size(windows.memory_limit),
            "spark.local.dir": str(scratch.absolute()),
            "spark.sql.warehouse.dir": str(scratch.absolute() / "warehouse"),
            "spark.sql.shuffle.partitions": str(4 * threads),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
    settings |= windows.spark
    try:
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        if (session.sparkContext.master or "").startswith("local"):
            # Else the workers are whatever `python3` is on the PATH.
            session.sparkContext.pythonExec = sys.executable
        engine = SparkEngine()
        engine.register_options()
        engine.do_connect(session)
    except Exception as error:
        raise ConfigError(
            f"windows.engine: Spark does not start: {str(error).partition(chr(10))[0]}",
            "install Java 17 and check windows.spark, or set windows.engine to duckdb",
        ) from error
    engine.owned = running is None
    return engine


def reason(error: Exception) -> str:
    """What lies at the bottom of an error of Spark, in a line."""
    lines = str(error).splitlines()
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return causes[-1].removeprefix("Caused by: ") if causes else (lines or [""])[0]


def location(file: Path, *, cluster: bool) -> str:
    """Where Spark finds a file, whatever its own default file system is.

    On a cluster, the executors read what was fetched here from where it came.
    """
    url = origin(file) if cluster else None
    return url.replace("s3://", "s3a://", 1) if url else f"file://{file.absolute()}"


def java_size(size: str) -> str:
    """A size such as `4GB` or `1.5 GiB` as Java writes it, in MiB.

    Raises:
        ConfigError: Text that is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt])(i?)b?\s*", size.lower())
    if match is None:
        raise ConfigError(
            f"windows.memory_limit: {size!r} is not a size", "write a size such as 4GB"
        )
    base = 1024 if match[3] else 1000
    return f"{max(512, int(float(match[1]) * base ** UNITS[match[2]] / 2**20))}m"
