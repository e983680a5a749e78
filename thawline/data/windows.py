"""From a log to a dataset folder: windows, hold-outs, and everything that `manifest` describes."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.duckdb import Backend

from thawline.config import Config
from thawline.data.catalog import TIMESTAMP, build_catalog, write_catalog, write_popularity
from thawline.data.engine import DAY_US, open_engine, stream
from thawline.data.events import EventLog, is_positive, read_events
from thawline.data.manifest import SCHEMA_VERSION, Manifest, Split, Window
from thawline.data.parts import PartWriter
from thawline.data.pieces import cut_sequences
from thawline.data.requests import (
    count_earlier,
    grouped_requests,
    make_blocks,
    number_positives,
    single_requests,
    with_histories,
)
from thawline.data.simulate import simulate
from thawline.data.sources import find_files, fingerprints
from thawline.data.spans import EPOCH, Spans, span_of
from thawline.data.truth import join_truth, require_complete
from thawline.data.vocabularies import build_vocabularies, encode_context
from thawline.errors import DataError

NEUTRAL = {
    "events": {"path", "truth"},
    "windows": {"engine", "spark", "memory_limit", "max_rejected"},
}
"""Config keys that change nothing in a dataset: of an input file, the content counts."""


def build_dataset(
    config: Config, root: Path, on_step: Callable[[str], None] = lambda _: None
) -> Manifest:
    """Builds the dataset of a log into a folder.

    The same files and config give the same manifest and the same rows in the same order, whatever
    the number of threads and the memory.

    Args:
        config: Uses `simulate`, `events`, `windows`, `negatives.bucket_minutes` and
            `runtime.threads`. With `simulate`, the log is made first, into `root/source`.
        root: An empty folder.
        on_step: Told what is being done, in a few words.

    Raises:
        DataError: A log that cannot be read or used, or a window without data.
    """
    if config.simulate is not None:
        on_step("simulating a feed")
        log = simulate(config.simulate, root / "source")
        source = {"path": str(log.events), "truth": str(log.truth)}
        config = config.model_copy(update={"events": config.events.model_copy(update=source)})
    scratch = root / ".scratch"
    try:
        with open_engine(config.windows, config.runtime, scratch) as engine:
            manifest = _build(config, root, engine, on_step)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    text = manifest.model_dump_json(indent=2) + "\n"
    (root / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


def _build(config: Config, root: Path, engine: Backend, on_step: Callable[[str], None]) -> Manifest:
    settings, actions = config.windows, list(config.events.actions)
    bucket_minutes = config.negatives.bucket_minutes

    on_step("reading the log")
    log = read_events(engine, config.events, settings)
    first, last = _days_of(log.events)
    spans = Spans.ending(settings.end or last, settings)
    events = log.events.filter(log.events.timestamp < span_of(spans.test)[1])

    on_step("numbering items and positives")
    catalog = build_catalog(
        engine,
        events,
        positive=is_positive(events, actions),
        pretrain=span_of(spans.pretrain),
        finetune=span_of(spans.finetune),
        tiers=settings.tiers,
    )
    placed = events.join(catalog.select("item_id", "row"), "item_id")
    positives = number_positives(engine, placed, actions)

    on_step("grouping requests")
    context = _vocabularies(engine, events, spans, config)
    requests = _requests(engine, placed, spans, config, log)
    requests = encode_context(engine, requests, list(context))
    counts, by_day = _count(requests, spans)
    for name, key, split, window in (
        ("fine-tune", "finetune_days", "train", spans.finetune),
        ("test", "test_days", "next", spans.test),
    ):
        if not counts[split]:  # type: ignore[index]
            raise _empty(f"the {name} window", "requests", key, window, first, last)

    on_step("writing the catalog")
    num_items = write_catalog(catalog, root / "catalog.parquet")
    write_popularity(positives, bucket_minutes, root / "popularity.parquet")
    _write_rejected(engine, log, root / "rejected", config)

    on_step("writing sequences")
    sequences = _write_sequences(engine, positives, root / "sequences", spans, config)
    if not sequences["train"]:
        raise _empty(
            "the pretraining window",
            "training user with two positives",
            "pretrain_days or windows.pretrain_overlap",
            spans.pretrain,
            first,
            last,
        )
    _write_requests(engine, requests, positives, root / "requests", spans, config, on_step)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        data_version=data_version(config, log.files),
        impressions=config.events.impressions,
        actions=actions,
        context=context,
        history_length=settings.history_length,
        bucket_minutes=bucket_minutes,
        pretrain=spans.pretrain,
        finetune=spans.finetune,
        test=spans.test,
        num_items=num_items,
        requests=counts,
        requests_by_day=by_day,
        sequences=sequences,
        rejected=log.counts,
        has_oracle=config.events.truth is not None,
    )


def _vocabularies(
    engine: Backend, events: ir.Table, spans: Spans, config: Config
) -> dict[str, list[str]]:
    start, stop = span_of(spans.finetune)
    training = events.filter(events.timestamp >= start, events.timestamp < stop, ~events.held_out)
    return build_vocabularies(engine, training, list(config.events.context))


def _requests(
    engine: Backend, placed: ir.Table, spans: Spans, config: Config, log: EventLog
) -> ir.Table:
    actions, truth = list(config.events.actions), config.events.truth
    span = (span_of(spans.finetune)[0], span_of(spans.test)[1])
    if truth is not None:
        placed = join_truth(engine, placed, truth, actions, hashed_requests=log.hashed_requests)
    if not config.events.impressions:
        return single_requests(engine, placed, span, actions)
    requests = grouped_requests(engine, placed, span, actions, with_truth=truth is not None)
    if truth is not None:
        require_complete(requests, actions, truth)
    return requests


def _count(requests: ir.Table, spans: Spans) -> tuple[dict[Split, int], dict[str, int]]:
    keyed = requests.select("held_out", day=requests.timestamp // DAY_US)
    table = keyed.group_by(["day", "held_out"]).aggregate(rows=keyed.count()).to_pyarrow()
    found = {
        (EPOCH + datetime.timedelta(days=row["day"]), row["held_out"]): row["rows"]
        for row in table.to_pylist()
    }

    def total(window: Window, held_out: bool) -> int:
        return sum(found.get((day, held_out), 0) for day in window.days())

    counts: dict[Split, int] = {
        "train": total(spans.finetune, False),
        "in_window": total(spans.finetune, True),
        "next": total(spans.test, False),
    }
    days = [*spans.finetune.days(), *spans.test.days()]
    by_day = {str(day): found.get((day, False), 0) + found.get((day, True), 0) for day in days}
    return counts, by_day


def _write_rejected(engine: Backend, log: EventLog, folder: Path, config: Config) -> None:
    schema = pa.schema([(name, pa.string()) for name in log.rejected.columns])
    _writer(folder, schema, config).write_all(
        stream(engine, log.rejected.order_by(log.rejected.columns))
    )


def _write_sequences(
    engine: Backend, positives: ir.Table, folder: Path, spans: Spans, config: Config
) -> dict:
    table = cut_sequences(positives, span_of(spans.pretrain), config.windows.sequence_length)
    schema = pa.schema(
        [
            ("user_id", _id_type(table.user_id)),
            ("held_out", pa.bool_()),
            ("item_row", pa.list_(pa.int64())),
        ]
    )
    held_out = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal held_out
        for batch in stream(engine, table):
            held_out += batch.column("held_out").true_count
            yield batch

    writer = _writer(folder, schema, config)
    writer.write_all(counted())
    return {"train": writer.rows - held_out, "held_out": held_out}


def _write_requests(
    engine: Backend,
    requests: ir.Table,
    positives: ir.Table,
    folder: Path,
    spans: Spans,
    config: Config,
    on_step: Callable[[str], None],
) -> None:
    length, actions = config.windows.history_length, config.events.actions
    earlier = count_earlier(engine, requests, positives)
    blocks = make_blocks(engine, positives, length)
    fields = [
        ("request_id", pa.int64()),
        ("user_id", _id_type(requests.user_id)),
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
    for day in [*spans.finetune.days(), *spans.test.days()]:
        on_step(f"writing the requests of {day}")
        start, stop = span_of(Window(start=day, end=day))
        of_day = requests.filter(requests.timestamp >= start, requests.timestamp < stop)
        rows = with_histories(of_day, earlier, blocks, length)
        rows = rows.order_by(["timestamp", "request_id"]).select([name for name, _ in fields])
        _writer(folder / f"day={day}", pa.schema(fields), config).write_all(stream(engine, rows))


def _writer(folder: Path, schema: pa.Schema, config: Config) -> PartWriter:
    return PartWriter(
        folder,
        schema,
        rows_per_file=config.windows.rows_per_file,
        rows_per_group=config.windows.rows_per_group,
    )


def data_version(config: Config, files: Sequence[Path]) -> str:
    """A hash of all that decides a dataset: the config's part in it and the files' content."""
    truth = config.events.truth
    made_from = {
        "schema_version": SCHEMA_VERSION,
        "events": config.events.model_dump(mode="json", exclude=NEUTRAL["events"]),
        "windows": config.windows.model_dump(mode="json", exclude=NEUTRAL["windows"]),
        "bucket_minutes": config.negatives.bucket_minutes,
        "simulate": config.simulate and config.simulate.model_dump(mode="json"),
        "files": fingerprints(files),
        "truth": fingerprints(find_files(truth, "events.truth")) if truth else [],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _empty(
    where: str, what: str, keys: str, window: Window, first: datetime.date, last: datetime.date
) -> DataError:
    return DataError(
        f"{where} ({window.start} to {window.end}) has no {what}; "
        f"the log runs from {first} to {last}",
        f"change windows.end or windows.{keys}",
    )


def _days_of(events: ir.Table) -> tuple[datetime.date, datetime.date]:
    bounds = events.aggregate(first=events.timestamp.min(), last=events.timestamp.max())
    row = bounds.to_pyarrow().to_pylist()[0]
    first, last = (EPOCH + datetime.timedelta(microseconds=row[name]) for name in ("first", "last"))
    return first, last


def _id_type(column: ir.Column) -> pa.DataType:
    return pa.string() if column.type().is_string() else pa.int64()
