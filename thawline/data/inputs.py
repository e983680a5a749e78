"""The inputs of a dataset on this machine: fetched from a remote storage, or out of a table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from thawline.config import Config, Events
from thawline.data.engine import DuckDB, first_line, stream
from thawline.data.ids import log_columns
from thawline.data.mapping import needed_columns
from thawline.data.parts import PartWriter
from thawline.data.sources import require_columns
from thawline.data.storage import fetch_files, fetch_folder, is_remote
from thawline.errors import ConfigError, DataError

ROWS_PER_FILE = 4_000_000
ROWS_PER_GROUP = 131_072


@contextmanager
def local_inputs(config: Config, out: Path) -> Iterator[Config]:
    """Gives the config with every input as a local path.

    What is remote is copied beside `out` while the block runs; after a failure it stays there, and
    the next block for the same `out` fetches only what is missing or has changed.

    Args:
        config: Its `events.path`, `events.truth`, `items.path` and `windows.previous` may be URLs,
            and `events.table` may name a table.
        out: The folder that will be built.

    Raises:
        ConfigError: A backend or a storage that cannot be used, or a URL with a password.
        DataError: Something that is not there, or cannot be fetched.
    """
    cache = out.absolute().with_name(f".{out.name}.inputs")
    events, items, windows = config.events, config.items, config.windows
    if events.table is not None:
        files = export_table(events, cache / "table", log_columns(config.tables.others))
        events = events.model_copy(
            update={"path": files, "table": None, "connect": None, "format": "parquet"}
        )
    if events.path is not None:
        path = _local(events.path, cache, "events.path")
        events = events.model_copy(update={"path": path})
    if items.path is not None:
        items = items.model_copy(update={"path": _local(items.path, cache, "items.path")})
    if events.truth is not None and is_remote(events.truth):
        (truth,) = fetch_files(events.truth, cache, "events.truth")
        events = events.model_copy(update={"truth": str(truth)})
    if windows.previous is not None and is_remote(windows.previous):
        folder = fetch_folder(windows.previous, cache)
        windows = windows.model_copy(update={"previous": str(folder)})
    yield config.model_copy(update={"events": events, "items": items, "windows": windows})
    shutil.rmtree(cache, ignore_errors=True)


def _local(path: str | list[str], cache: Path, key: str) -> list[str]:
    files: list[str] = []
    for one in [path] if isinstance(path, str) else path:
        files += map(str, fetch_files(one, cache, key)) if is_remote(one) else [one]
    return files


def export_table(events: Events, folder: Path, ids: Mapping[str, str]) -> list[str]:
    """Writes the columns of `events.table` that the config names as Parquet files.

    The rows are in an order that they decide themselves, so that the same table gives the same
    files, and what the backend does not have to send stays there.

    Raises:
        ConfigError: ibis cannot connect to `events.connect`.
        DataError: There is no such table or column.
    """
    needed, url = needed_columns(events, ids), str(events.connect)
    try:
        backend = ibis.connect(os.path.expandvars(url))
    except Exception as error:  # Each backend has errors of its own.
        raise ConfigError(
            f"events.connect: {url} cannot be opened: {_safe(error, url)}",
            "check the URL and the variables that it names, and install the backend: "
            "pip install 'ibis-framework[<backend>]'",
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    try:
        table = _find_table(backend, events)
        require_columns(table.columns, needed, Path(str(events.table)))
        columns = list(dict.fromkeys(needed.values()))
        order = dict.fromkeys([events.columns.timestamp, *columns])
        rows = table.select(columns).order_by(list(order))
        schema = rows.schema().to_pyarrow()
        writer = PartWriter(
            folder, schema, rows_per_file=ROWS_PER_FILE, rows_per_group=ROWS_PER_GROUP
        )
        try:
            writer.write_all(_batches(backend, rows))
        except Exception as error:
            raise DataError(
                f"events.table: {events.table} cannot be read: {_safe(error, url)}",
                "check the table in the backend that events.connect names",
            ) from error
    finally:
        backend.disconnect()
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        raise DataError(f"events.table: {events.table} holds no rows", "check the table's name")
    return [str(file) for file in files]


def _find_table(backend: ibis.BaseBackend, events: Events) -> ir.Table:
    *place, name = str(events.table).split(".")
    database = (tuple(place) if len(place) > 1 else place[0]) if place else None
    try:
        return backend.table(name, database=database)
    except Exception as error:
        raise DataError(
            f"events.table: there is no {events.table}: {_safe(error, str(events.connect))}",
            "write it as table, schema.table or catalog.schema.table",
        ) from error


def _batches(backend: ibis.BaseBackend, rows: ir.Table) -> Iterator[pa.RecordBatch]:
    if isinstance(backend, DuckDB):
        yield from stream(backend, rows, ROWS_PER_GROUP)
    else:
        yield from rows.to_pyarrow_batches(chunk_size=ROWS_PER_GROUP)


def _safe(error: Exception, url: str) -> str:
    """The first line of an error, without what the environment put into the URL."""
    return first_line(error).replace(os.path.expandvars(url), url)
