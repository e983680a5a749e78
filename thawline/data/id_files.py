"""Writes the vocabularies of ids, and adds the ids of requests to them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ibis.expr.types as ir
import pyarrow as pa
from ibis.util import gen_name

from thawline.config import Config
from thawline.data.engine import Backend, DuckDB, hash63, keep, open_engine, stream
from thawline.data.ids import MISSING, USER_ID, Owner, stored_as, vocabulary_path
from thawline.data.parts import write_file

SCHEMA = pa.schema([("hash", pa.int64()), ("support", pa.int64()), ("id", pa.string())])
ROWS_PER_GROUP = 1 << 17


def hash_request_ids(requests: ir.Table, columns: Sequence[str]) -> ir.Table:
    """Replaces the texts `id_<column>` of requests by their hashes, int64; 0 is missing."""
    hashes = {
        stored_as(column): hash63(_text(requests, column)).fill_null(MISSING) for column in columns
    }
    return requests.mutate(**hashes) if hashes else requests


def _text(table: ir.Table, column: str) -> ir.StringValue:
    return table.user_id.cast("string") if column == USER_ID else table[stored_as(column)]


def write_request_ids(
    engine: Backend,
    events: ir.Table,
    files: Sequence[Path],
    columns: Sequence[str],
    root: Path,
    config: Config,
) -> dict[str, int]:
    """Writes the vocabularies of columns of the log.

    Args:
        engine: Holds the events.
        events: Of the fine-tune window, with the ids as text.
        files: Part files of its days, some of which may come from another dataset.
        columns: Of the log.
        root: The dataset's folder.
        config: Uses `windows` and `runtime`.

    Returns:
        How many ids each column has in training requests.
    """
    counts = {}
    for column in columns:
        texts = events.select(id=_text(events, column)).distinct()
        texts = texts.filter(texts.id.notnull())
        texts = texts.select(hash=hash63(texts.id), id=texts.id)
        with (
            _beside(engine, root, config) as local,
            tempfile.TemporaryDirectory(dir=root) as folder,
        ):
            path = Path(folder) / "texts.parquet"
            schema = pa.schema([SCHEMA.field("hash"), SCHEMA.field("id")])
            write_file(path, schema, stream(engine, texts), ROWS_PER_GROUP)
            requests = local.read_parquet([str(file) for file in files], hive_partitioning=False)
            trained = requests.filter(~requests.held_out, requests[stored_as(column)] != MISSING)
            counted = trained.group_by(hash=trained[stored_as(column)]).aggregate(
                support=trained.count()
            )
            named = local.read_parquet(str(path)).rename(text_hash="hash")
            found = counted.left_join(named, counted["hash"] == named.text_hash)
            counts[column] = _write(local, found, "request", column, root)
    return counts


@contextmanager
def _beside(engine: Backend, root: Path, config: Config) -> Iterator[DuckDB]:
    """An engine that reads files of this machine."""
    if isinstance(engine, DuckDB):
        yield engine
        return
    windows = config.windows.model_copy(update={"engine": "duckdb"})
    with (
        tempfile.TemporaryDirectory(dir=root) as scratch,
        open_engine(windows, config.runtime, Path(scratch)) as local,
    ):
        yield local


def write_item_ids(
    engine: Backend, named: ir.Table, columns: Sequence[str], root: Path
) -> dict[str, int]:
    """Writes the vocabularies of columns of the items.

    Args:
        engine: Runs the query.
        named: support and id_<column> (text) of the catalog's items.
        columns: Of the items.
        root: The dataset's folder.

    Returns:
        How many ids of each column have a positive in training.
    """
    counts = {}
    for column in columns:
        with_id = named.filter(named.support > 0, named[stored_as(column)].notnull())
        found = with_id.group_by(id=with_id[stored_as(column)]).aggregate(
            support=with_id.support.sum().cast("int64")
        )
        found = found.mutate(hash=hash63(found.id))
        counts[column] = _write(engine, found, "item", column, root)
    return counts


def _write(engine: Backend, found: ir.Table, of: Owner, column: str, root: Path) -> int:
    found = keep(engine, gen_name("ids"), found.select("hash", "support", "id"))
    path = vocabulary_path(root, of, column)
    path.parent.mkdir(exist_ok=True)
    ordered = found.order_by([found.support.desc(), found["hash"]])
    write_file(path, SCHEMA, stream(engine, ordered), ROWS_PER_GROUP)
    return int(found.count().to_pyarrow().as_py())
