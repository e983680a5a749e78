"""The part files of a dataset: which columns they have, and from which tables they are written."""

from __future__ import annotations

import datetime
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import ibis.expr.types as ir
import pyarrow as pa

from thawline.config import Config
from thawline.data.background import Cancelled, run_ahead
from thawline.data.catalog import TIMESTAMP
from thawline.data.engine import Backend, stream
from thawline.data.ids import columns_of, stored_as
from thawline.data.manifest import Window
from thawline.data.parts import PartWriter
from thawline.data.pieces import cut_sequences
from thawline.data.requests import with_histories
from thawline.data.spans import Spans, span_of

AHEAD = 16
"""Batches of rows that a thread fetches from the engine while others are written."""

Batches = Iterator[pa.RecordBatch]


def write_rejected(engine: Backend, rejected: ir.Table, folder: Path, config: Config) -> None:
    """Writes the rows of the log that could not be used."""
    schema = pa.schema([(name, pa.string()) for name in rejected.columns])
    _writer(folder, schema, config).write_all(stream(engine, rejected.order_by(rejected.columns)))


def write_sequences(
    engine: Backend, positives: ir.Table, folder: Path, spans: Spans, config: Config
) -> dict[Literal["train", "held_out"], int]:
    """Writes the sequences of the pretraining window and counts them."""
    table = cut_sequences(
        positives,
        span_of(spans.pretrain),
        config.windows.sequence_length,
        by_request=config.windows.holdout_by == "request",
    )
    schema = pa.schema(
        [
            ("user_id", id_type(table.user_id)),
            ("held_out", pa.bool_()),
            ("item_row", pa.list_(pa.int64())),
        ]
    )
    held_out = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal held_out
        for batch in run_ahead(lambda _: stream(engine, table), AHEAD):
            held_out += batch.column("held_out").true_count
            yield batch

    writer = _writer(folder, schema, config)
    writer.write_all(counted())
    return {"train": writer.rows - held_out, "held_out": held_out}


def stream_days(
    engine: Backend,
    requests: ir.Table,
    blocks: ir.Table,
    days: Sequence[datetime.date],
    config: Config,
) -> Generator[tuple[datetime.date, Batches]]:
    """The requests of some days with their histories, in order of (timestamp, request_id).

    A thread fetches them, so that a day is computed while the one before is written. The engine is
    in use until the iterator is exhausted or closed.

    Args:
        engine: Runs the queries.
        requests: Of those days and maybe of others, with `earlier` (`count_earlier`).
        blocks: `make_blocks` of their users' positives.
        days: In order.
        config: Uses `windows`, `events` and the columns of `tables`.

    Yields:
        Each day and its rows, which must be taken before the next day.
    """
    names = request_schema(requests, config).names

    def fetch(cancelled: Cancelled) -> Iterator[tuple[datetime.date, pa.RecordBatch | None]]:
        for day in days:
            # A day without requests is a day too.
            yield day, None
            start, stop = span_of(Window(start=day, end=day))
            of_day = requests.filter(requests.timestamp >= start, requests.timestamp < stop)
            rows = with_histories(of_day, blocks, config.windows.history_length)
            for batch in stream(engine, rows.order_by(["timestamp", "request_id"]).select(names)):
                if cancelled():
                    return
                yield day, batch

    with closing(run_ahead(fetch, AHEAD)) as fetched:
        for day, rows in groupby(fetched, itemgetter(0)):
            yield day, (batch for _, batch in rows if batch is not None)


def write_day(batches: Batches, schema: pa.Schema, folder: Path, config: Config) -> None:
    """Writes the requests of a day."""
    _writer(folder, schema, config).write_all(batches)


def request_schema(requests: ir.Table, config: Config) -> pa.Schema:
    """The columns of a part file of requests."""
    actions = config.events.actions
    fields = [
        ("request_id", pa.int64()),
        ("user_id", id_type(requests.user_id)),
        ("timestamp", TIMESTAMP),
        ("held_out", pa.bool_()),
        ("history_row", pa.list_(pa.int64())),
        ("history_action", pa.list_(pa.int8())),
        ("history_age", pa.list_(pa.float32())),
        ("candidate_row", pa.list_(pa.int64())),
        *((f"label_{name}", pa.list_(pa.int8())) for name in actions),
    ]
    if config.events.truth is not None:
        fields += [(f"oracle_{name}", pa.list_(pa.float32())) for name in actions]
    fields += [(f"ctx_{name}", pa.int32()) for name in config.events.context]
    ids = columns_of(config.tables.others, "request").values()
    fields += [(stored_as(column), pa.int64()) for column in ids]
    if config.events.weight is not None:
        fields.append(("weight", pa.float64()))
    return pa.schema(fields)


def id_type(column: ir.Column) -> pa.DataType:
    """The type in part files of a column of ids."""
    return pa.string() if column.type().is_string() else pa.int64()


def _writer(folder: Path, schema: pa.Schema, config: Config) -> PartWriter:
    return PartWriter(
        folder,
        schema,
        rows_per_file=config.windows.rows_per_file,
        rows_per_group=config.windows.rows_per_group,
    )
