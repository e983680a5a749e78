"""From a log to a dataset folder: windows, hold-outs, and everything that `manifest` describes."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import ibis.expr.types as ir

from thawline import __version__
from thawline.config import Config, Items
from thawline.data.catalog import build_catalog, write_catalog, write_moved, write_popularity
from thawline.data.days import (
    Journal,
    Plan,
    Source,
    content_of,
    events_tree,
    hash_file,
    hash_of,
    plan_days,
    take_day,
)
from thawline.data.digests import digest_events
from thawline.data.engine import DAY_US, Backend, open_engine
from thawline.data.events import EventLog, is_positive, read_events
from thawline.data.holdout import hold_requests_out
from thawline.data.id_files import hash_request_ids, write_item_ids, write_request_ids
from thawline.data.ids import Owner, columns_of, log_columns
from thawline.data.item_file import ItemFile, open_items, write_items
from thawline.data.manifest import SCHEMA_VERSION, Catalog, Dataset, Day, Manifest, Split, Window
from thawline.data.outputs import (
    request_schema,
    stream_days,
    write_day,
    write_rejected,
    write_sequences,
)
from thawline.data.previous import Previous, read_previous
from thawline.data.requests import (
    count_earlier,
    grouped_requests,
    make_blocks,
    number_positives,
    single_requests,
)
from thawline.data.simulate import simulate
from thawline.data.sources import find_files, fingerprints
from thawline.data.spans import EPOCH, Spans, span_of
from thawline.data.truth import join_truth, require_complete
from thawline.data.vocabularies import build_vocabularies, encode_context
from thawline.errors import DataError

NEUTRAL = {
    "items": {"path"},
    "windows": {"engine", "spark", "memory_limit", "max_rejected", "late", "previous"},
}
"""Config keys that change nothing in a dataset: of an input file, the content counts."""


def unchanged(config: Config, out: Path, inputs: str) -> Manifest | None:
    """The manifest of a dataset that a build into `out` would make again; None if there is work.

    Args:
        config: As for `build_dataset`.
        out: A dataset folder, or none.
        inputs: `inputs_version` of the config.

    Raises:
        DataError: `windows.previous` cannot be read.
    """
    try:
        manifest = Dataset.open(out).manifest
    except DataError:
        return None
    settings = config.windows
    if manifest.inputs != inputs or (settings.late == "rebuild" and manifest.late):
        return None
    if settings.previous is None:
        return manifest if manifest.parent == "" else None
    # A dataset that was told to extend itself is its own parent.
    parents = {manifest.parent, read_previous(out).version}
    return manifest if read_previous(settings.previous).version in parents else None


def build_dataset(
    config: Config,
    root: Path,
    on_step: Callable[[str], None] = lambda _: None,
    *,
    sources: Iterable[Path] = (),
    inputs: str | None = None,
) -> Manifest:
    """Builds the dataset of a log into a folder.

    The same files and config give the same manifest and the same rows in the same order, whatever
    the number of threads and the memory. Days of requests that another dataset has built already
    are taken from it, and those that a build into `root` had finished when it was killed stay.

    Args:
        config: Uses `simulate`, `events`, `items`, the columns of `tables`, `windows`,
            `negatives.bucket_minutes` and `runtime.threads`. With `simulate`, the log is made
            first, into `root/source`.
        root: An empty folder, or one in which a build was killed.
        on_step: Told what is being done, in a few words.
        sources: Dataset folders from which days may be taken, beside `windows.previous`; one that
            does not fit is passed over.
        inputs: `inputs_version` of the config, where it is known already.

    Raises:
        DataError: A log that cannot be read or used, or a window without data.
    """
    inputs = inputs or inputs_version(config)
    previous = read_previous(config.windows.previous) if config.windows.previous else None
    built = _open_all([*sources, *([previous.path.parent] if previous else [])])
    (root / "manifest.json").unlink(missing_ok=True)
    journal = Journal(root, hash_of([inputs, previous.version if previous else ""]))
    if config.simulate is not None:
        on_step("simulating a feed")
        log = simulate(config.simulate, root / "source")
        source = {
            "path": str(log.events),
            # Read as positives alone, its negatives are drawn, whose probabilities nobody knows.
            "truth": str(log.truth) if config.events.columns.request_id is not None else None,
            # The clock of a simulated feed is its own.
            "latest": datetime.datetime.max,
        }
        items = Items(
            path=str(log.items), content="content" if config.simulate.content_dim else None
        )
        config = config.model_copy(
            update={"events": config.events.model_copy(update=source), "items": items}
        )
    scratch = root / ".scratch"
    try:
        with open_engine(config.windows, config.runtime, scratch) as engine:
            build = _Build(config, root, engine, on_step, previous, built, journal)
            manifest = build.run(inputs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    journal.close()
    text = manifest.model_dump_json(indent=2) + "\n"
    (root / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


@dataclass
class _Build:
    config: Config
    root: Path
    engine: Backend
    on_step: Callable[[str], None]
    previous: Previous | None
    sources: list[Dataset]
    journal: Journal

    def run(self, inputs: str) -> Manifest:
        config, engine, root = self.config, self.engine, self.root
        settings, actions = config.windows, list(config.events.actions)
        items = self._open_items()

        self.on_step("reading the log")
        log = read_events(engine, config.events, settings, log_columns(config.tables.others))
        first, last = _days_of(log.events)
        spans = Spans.ending(settings.end or last, settings)
        events = log.events.filter(log.events.timestamp < span_of(spans.test)[1])
        if settings.holdout_by == "request":
            events = hold_requests_out(engine, events, settings.holdout_users)

        self.on_step("numbering items and positives")
        catalog = build_catalog(
            engine,
            events,
            positive=is_positive(events, actions),
            pretrain=span_of(spans.pretrain),
            finetune=span_of(spans.finetune),
            end=span_of(spans.test)[1],
            tiers=settings.tiers,
            settings=settings.catalog,
            previous=self.previous,
        )
        write_catalog(engine, catalog, root / "catalog.parquet")
        write_moved(engine, catalog, root / "moved.parquet")
        ids, content = {}, None
        if items is not None:
            self.on_step("looking items up")
            named, content = write_items(engine, catalog.lines, items, root / "items.parquet")
            ids["item"] = write_item_ids(engine, named, items.columns, root)
        placed = events.join(catalog.rows, "item_id")
        positives = number_positives(engine, placed, actions)
        context = _vocabularies(engine, events, spans, config, self.previous)

        columns = list(columns_of(config.tables.others, "request").values())
        plan = self._plan(events, spans, context)
        todo = [day for day in plan.missing if not self._resume(day, plan)]
        self.on_step("grouping requests")
        requests = _requests(engine, placed, todo, spans, config, log) if todo else None
        if requests is not None:
            requests = hash_request_ids(requests, columns)
        by_day = _count(requests, plan)
        counts = _sum_up(by_day, spans)
        for name, key, split, window in (
            ("fine-tune", "finetune_days", "train", spans.finetune),
            ("test", "test_days", "next", spans.test),
        ):
            if not counts[split]:  # type: ignore[index]
                raise _empty(f"the {name} window", "requests", key, window, first, last)

        self.on_step("writing popularity and sequences")
        bucket_minutes = config.negatives.bucket_minutes
        write_popularity(engine, positives, bucket_minutes, root / "popularity.parquet")
        for folder in ("rejected", "sequences"):
            shutil.rmtree(root / folder, ignore_errors=True)
        write_rejected(engine, log.rejected, root / "rejected", config)
        sequences = write_sequences(engine, positives, root / "sequences", spans, config)
        if not sequences["train"]:
            raise _empty(
                "the pretraining window",
                "training user with two positives",
                "pretrain_days or windows.pretrain_overlap",
                spans.pretrain,
                first,
                last,
            )
        days = self._finish_days(requests, positives, todo, plan, by_day, list(context))
        if columns:
            ids["request"] = self._write_request_ids(events, columns, spans.finetune)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            data_version="",
            impressions=config.events.impressions,
            actions=actions,
            context=context,
            history_length=settings.history_length,
            bucket_minutes=bucket_minutes,
            pretrain=spans.pretrain,
            finetune=spans.finetune,
            test=spans.test,
            num_items=catalog.num_items,
            requests=counts,
            requests_by_day={str(day): sum(made.values()) for day, made in by_day.items()},
            sequences=sequences,
            rejected=log.counts,
            days={str(day): made for day, made in days.items()},
            late=plan.late,
            rows=catalog.facts,
            holdout_by=settings.holdout_by,
            ids=ids,
            content=content,
            inputs=inputs,
            parent=self.previous.version if self.previous else "",
            has_oracle=config.events.truth is not None,
            weighted=config.events.weight is not None,
        )
        return manifest.model_copy(update={"data_version": _data_version(manifest, root)})

    def _open_items(self) -> ItemFile | None:
        """The file of the items, if anything is needed of it."""
        (self.root / "items.parquet").unlink(missing_ok=True)
        shutil.rmtree(self.root / "ids", ignore_errors=True)
        ids = columns_of(self.config.tables.others, "item")
        if not ids and self.config.items.content is None:
            return None
        self.on_step("reading the items")
        return open_items(self.engine, self.config.items, ids)

    def _write_request_ids(
        self, events: ir.Table, columns: Sequence[str], window: Window
    ) -> dict[str, int]:
        self.on_step("counting ids")
        start, stop = span_of(window)
        inside = events.filter(events.timestamp >= start, events.timestamp < stop)
        folders = [self.root / "requests" / f"day={day}" for day in window.days()]
        files = [file for folder in folders for file in sorted(folder.glob("part-*.parquet"))]
        return write_request_ids(self.engine, inside, files, columns, self.root, self.config)

    def _plan(self, events: ir.Table, spans: Spans, context: dict[str, list[str]]) -> Plan:
        self.on_step("looking for built days")
        fitting = []
        if self.sources:
            catalog = Catalog.read(self.root / "catalog.parquet")
            fitting = [Source.of(dataset, catalog) for dataset in self.sources]
            fitting = [source for source in fitting if source.fits(catalog, context)]
        ends = [span_of(spans.finetune)[1], span_of(spans.test)[1]]
        truth = self.config.events.truth
        prints = fingerprints(find_files(truth, "events.truth")) if truth else []
        return plan_days(self.config, spans, digest_events(events, ends), fitting, prints)

    def _resume(self, day: datetime.date, plan: Plan) -> bool:
        """Whether a build that was killed had finished a day."""
        found = self.journal.find(day)
        if found is not None:
            plan.taken[day] = (self.root / "requests" / f"day={day}", found)
        return found is not None

    def _finish_days(
        self,
        requests: ir.Table | None,
        positives: ir.Table,
        todo: list[datetime.date],
        plan: Plan,
        by_day: dict[datetime.date, dict],
        context: list[str],
    ) -> dict[datetime.date, Day]:
        """Takes and writes the days of requests."""
        days = {}
        for day, (folder, made) in plan.taken.items():
            out = self.root / "requests" / f"day={day}"
            if folder != out:
                take_day(folder, out)
            days[day] = made
        if requests is not None:
            if len(todo) < len(plan.expected):
                positives = positives.semi_join(requests, "user_id")
            earlier = count_earlier(self.engine, requests, positives)
            requests = requests.join(earlier, "request_id")
            requests = encode_context(self.engine, requests, context)
            blocks = make_blocks(self.engine, positives, self.config.windows.history_length)
            schema = request_schema(requests, self.config)
            with closing(stream_days(self.engine, requests, blocks, todo, self.config)) as streamed:
                for day, batches in streamed:
                    self.on_step(f"writing the requests of {day}")
                    out = self.root / "requests" / f"day={day}"
                    shutil.rmtree(out, ignore_errors=True)
                    write_day(batches, schema, out, self.config)
                    days[day] = plan.expected[day].model_copy(
                        update={"content": content_of(out), "requests": by_day[day]}
                    )
                    self.journal.add(day, days[day])
        return {day: days[day] for day in plan.expected}


def _open_all(roots: Iterable[Path]) -> list[Dataset]:
    """The datasets that can be read; the others are as good as none."""
    datasets = []
    for root in roots:
        try:
            datasets.append(Dataset.open(root))
            _ = datasets[-1].catalog
        except DataError:
            continue
    return datasets


def _vocabularies(
    engine: Backend, events: ir.Table, spans: Spans, config: Config, previous: Previous | None
) -> dict[str, list[str]]:
    start, stop = span_of(spans.finetune)
    training = events.filter(events.timestamp >= start, events.timestamp < stop, ~events.held_out)
    known = previous.context if previous else None
    return build_vocabularies(engine, training, list(config.events.context), known)


def _requests(
    engine: Backend,
    placed: ir.Table,
    days: Sequence[datetime.date],
    spans: Spans,
    config: Config,
    log: EventLog,
) -> ir.Table:
    actions, truth = list(config.events.actions), config.events.truth
    span = span_of(Window(start=min(days), end=max(days)))
    if truth is not None:
        placed = join_truth(engine, placed, truth, actions, hashed_requests=log.hashed_requests)
    if not config.events.impressions:
        return single_requests(engine, placed, span, actions)
    requests = grouped_requests(
        engine,
        placed,
        span,
        actions,
        with_truth=truth is not None,
        ends=[span_of(spans.finetune)[1], span_of(spans.test)[1]],
        attribution_hours=config.events.attribution_hours,
    )
    if truth is not None:
        require_complete(requests, actions, truth)
    return requests


def _count(requests: ir.Table | None, plan: Plan) -> dict[datetime.date, dict]:
    """Requests of training and of held-out users of each day."""
    found = {}
    if requests is not None:
        keyed = requests.select("held_out", day=requests.timestamp // DAY_US)
        table = keyed.group_by(["day", "held_out"]).aggregate(rows=keyed.count()).to_pyarrow()
        found = {
            (EPOCH + datetime.timedelta(days=row["day"]), row["held_out"]): row["rows"]
            for row in table.to_pylist()
        }
    counts = {}
    for day in plan.expected:
        if day in plan.taken:
            counts[day] = plan.taken[day][1].requests
        else:
            counts[day] = {
                "train": found.get((day, False), 0),
                "held_out": found.get((day, True), 0),
            }
    return counts


def _sum_up(by_day: dict[datetime.date, dict], spans: Spans) -> dict[Split, int]:
    return {
        "train": sum(by_day[day]["train"] for day in spans.finetune.days()),
        "in_window": sum(by_day[day]["held_out"] for day in spans.finetune.days()),
        "next": sum(by_day[day]["train"] for day in spans.test.days()),
    }


def inputs_version(config: Config) -> str:
    """A hash of all that decides a dataset: the config's part in it and the files' content.

    Raises:
        DataError: A file that is missing or cannot be read.
    """
    events, items = config.events, config.items

    def prints(path: str | list[str] | None, key: str) -> list[str]:
        return fingerprints(find_files(path, key)) if path else []

    return hash_of(
        {
            "versions": [SCHEMA_VERSION, __version__],
            "events": events_tree(config),
            "windows": config.windows.model_dump(mode="json", exclude=NEUTRAL["windows"]),
            "bucket_minutes": config.negatives.bucket_minutes,
            "simulate": config.simulate and config.simulate.model_dump(mode="json"),
            "items": items.model_dump(mode="json", exclude=NEUTRAL["items"]),
            "ids": {
                of: sorted(columns_of(config.tables.others, of).values()) for of in get_args(Owner)
            },
            "files": prints(events.path, "events.path"),
            "item_files": prints(items.path, "items.path"),
            "truth": prints(events.truth, "events.truth"),
        }
    )


def _data_version(manifest: Manifest, root: Path) -> str:
    """A hash of what is in a dataset, wherever its days were built."""
    described = {"data_version", "inputs", "parent", "late", "days"}
    files = ["catalog.parquet", "popularity.parquet"]
    # Without them or weights, and by users, the version is what it was before there was a choice.
    if manifest.holdout_by == "user":
        described |= {"holdout_by"}
    if not manifest.weighted:
        described |= {"weighted"}
    if manifest.ids or manifest.content:
        files += ["items.parquet"] * (root / "items.parquet").exists()
    else:
        described |= {"ids", "content"}
    return hash_of(
        {
            "manifest": manifest.model_dump(mode="json", exclude=described),
            "days": {day: made.content for day, made in manifest.days.items()},
            "files": [hash_file(root / name) for name in files],
            "folders": [content_of(root / name) for name in ("sequences", "rejected")],
        }
    )


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
