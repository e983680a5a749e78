"""A log as canonical events, and the rows of it that cannot be used.

Canonical columns: `user_id` and `item_id` (int64 or string, as in the log), `timestamp` (int64,
microseconds since 1970 UTC), `request_id` (int64) and `position` (int64) in logs with impressions,
a boolean column an action, `ctx_<name>` and `id_<column>` strings, `held_out` and, in logs with
weights, `weight` (float64). Where actions come as rows of their own, the boolean `impression` tells
which rows are impressions, and the others may lack a `request_id` and a `weight`.
"""

from __future__ import annotations

import datetime
import operator
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import ibis
import ibis.expr.types as ir

from thawline.config import Events, Windows
from thawline.data.delimited import CsvLog, open_csv
from thawline.data.encoding import is_about_encoding, mend
from thawline.data.engine import Backend, DuckDB, hashed_below, keep
from thawline.data.grouping import group_by_gap, merge_rows
from thawline.data.mapping import LEAST_WEIGHT, MOST_WEIGHT, ColumnMapping, needed_columns
from thawline.data.sources import (
    Format,
    decide_format,
    find_files,
    open_parquet,
    reading,
)
from thawline.errors import ConfigError, DataError

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
RESERVED = {
    *("user_id", "item_id", "timestamp", "request_id", "position", "held_out", "reason", "row"),
    *("action", "number", "weight", "start", "stop", "copy", "impression"),
}
RESERVED_PREFIXES = ("ctx_", "id_", "label_", "oracle_", "raw_")

MISCOUNTED = "wrong number of fields"
"""Why a line of a CSV file is rejected as a whole."""

SEVERAL_WEIGHTS = "several weights in one request"
"""Why the rows of a request are rejected whose impressions disagree on its weight."""

HINTS = {
    "impossible timestamp": "if some times are in another unit than the rest, write them in one",
    "future timestamp": "if these times are right, set events.latest",
    "unknown action": "name these words in an action's equals or in events.ignored_actions",
    MISCOUNTED: "quote fields that hold the separator, and see events.separator",
    "duplicate": "see whether two files of events.path hold the same days",
    "bad encoding": "write the log as UTF-8",
    "bad weight": f"give events.weight numbers from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
    SEVERAL_WEIGHTS: "give the impressions of a request the weight of the request",
}
"""What to do about rejected rows, by reason."""


@dataclass(frozen=True)
class EventLog:
    """Events that passed every check, kept in the engine."""

    events: ir.Table
    """Canonical columns; no two rows with the same user, item, timestamp and request."""
    rejected: ir.Table
    """The other rows as text: user_id, item_id, timestamp, request_id, action, reason; of CSV files
    also line, where a line is no row."""
    counts: dict[str, int]
    """Rejected rows by reason; a reason without rows is left out."""
    files: list[Path]
    hashed_requests: bool
    """Whether request ids are text in the log, hence hashed in the events."""


def is_positive(events: ir.Table, actions: Iterable[str]) -> ir.BooleanValue:
    """Whether an event has any of the actions."""
    return reduce(operator.or_, [events[name] for name in actions])


def read_events(
    engine: Backend, settings: Events, windows: Windows, ids: Mapping[str, str] | None = None
) -> EventLog:
    """Reads a log, checks it and keeps its events in the engine.

    Args:
        engine: Holds the result.
        settings: Where the log is and what its columns mean.
        windows: Uses `holdout_users`, `holdout_by` (no row is `held_out` by request yet) and
            `max_rejected`.
        ids: Columns of ids for further tables, by config key; they become `id_<column>`.

    Raises:
        ConfigError: An action with the name of a column.
        DataError: A file that cannot be read, a missing column, a column of the wrong kind, a
            timestamp in the wrong unit, or too many rejected rows.
    """
    for name in settings.actions:
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ConfigError(
                f"events.actions.{name}: the name is taken by a column of the dataset",
                "call the action something else",
            )
    if settings.path is None:
        raise DataError("events.path is not set", "set it to a file, a folder or a glob")
    files = find_files(settings.path)
    kind = decide_format(settings, files)
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    try:
        staged = _stage(engine, files, kind, settings, windows, where, ids)
    except DataError as error:
        if not is_about_encoding(error):
            raise
        if isinstance(engine, DuckDB):
            # What it had read of them goes.
            engine.con.execute("DROP TABLE IF EXISTS staged")
        with tempfile.TemporaryDirectory() as folder:
            mended = mend(files, kind, Path(folder))
            staged = _stage(engine, mended, kind, settings, windows, where, ids)
    events, rejected, counts = _reject(engine, staged, settings, windows, where)
    if settings.actions_in_rows:
        events = merge_rows(engine, events, settings)
    if settings.request_gap_seconds is not None:
        events = group_by_gap(engine, events, round(settings.request_gap_seconds * 1e6))
    return EventLog(events, rejected, counts, files, staged.hashed_requests)


@dataclass(frozen=True)
class _Staged:
    rows: ir.Table
    """Every row with its canonical columns, its own text and why it is rejected."""
    lines: ir.Table | None
    """Of CSV files, the lines that are no rows."""
    hashed_requests: bool


def _stage(
    engine: Backend,
    files: Sequence[Path],
    kind: Format,
    settings: Events,
    windows: Windows,
    where: str,
    ids: Mapping[str, str] | None,
) -> _Staged:
    needed = needed_columns(settings, ids)
    log: CsvLog | None = None
    if kind == "parquet":
        raw = open_parquet(engine, files, needed)
    else:
        log = open_csv(engine, files, settings, needed)
        raw = log.table
    with reading(files, kind, needed):
        mapping = ColumnMapping(raw, settings, where, ids)
        mapping.check()
        share = windows.holdout_users if windows.holdout_by == "user" else 0.0
        rows = mapping.canonical(share, _latest(settings))
        rows = keep(engine, "staged", rows)
        lines = log.malformed(engine) if log else None
    if lines is not None:
        lines = lines.filter(hashed_below(lines.line, "sample", settings.sample_users))
    return _Staged(rows, lines, mapping.textual.get("request_id", False))


def _reject(
    engine: Backend, log: _Staged, settings: Events, windows: Windows, where: str
) -> tuple[ir.Table, ir.Table, dict[str, int]]:
    """Splits the staged rows, and fails if too many are rejected."""
    staged = _find_duplicates(engine, log.rows, settings)
    if "request_id" in staged.columns:
        staged = _find_mixed(engine, staged, "user_id", "several users in one request")
        if "weight" in staged.columns:
            staged = _find_mixed(engine, staged, "weight", SEVERAL_WEIGHTS)
    raw = [name for name in staged.columns if name.startswith("raw_")]
    rejected = staged.filter(staged.reason.notnull())
    rejected = rejected.select(
        **{name.removeprefix("raw_"): rejected[name] for name in raw}, reason=rejected.reason
    )
    total = staged.count().to_pyarrow().as_py()
    if log.lines is not None:
        total += log.lines.count().to_pyarrow().as_py()
        empty = dict.fromkeys(rejected.columns, ibis.null("string"))
        lines = log.lines.select(
            **empty | {"reason": ibis.literal(MISCOUNTED), "line": log.lines.line}
        )
        rejected = rejected.mutate(line=ibis.null("string")).union(lines)
    rejected = keep(engine, "rejected", rejected.order_by(rejected.columns))
    by_reason = rejected.group_by("reason").aggregate(rows=rejected.count()).to_pyarrow()
    counts = dict(sorted(zip(*(column.to_pylist() for column in by_reason.columns), strict=True)))
    if total == 0:
        raise DataError(f"{where} holds no rows", "check events.path and events.sample_users")
    if sum(counts.values()) > windows.max_rejected * total:
        listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        sample = _samples(rejected, counts)
        hints = [HINTS[reason] for reason in counts if reason in HINTS]
        raise DataError(
            f"{where}: {sum(counts.values())} of {total} rows cannot be used: {listed}; such as\n"
            f"{sample}",
            "; ".join(
                [
                    *hints,
                    "clean the log, correct events.columns, or raise windows.max_rejected "
                    f"(now {windows.max_rejected})",
                ]
            ),
        )
    events = staged.filter(staged.reason.isnull()).drop(*raw, "reason")
    return events, rejected, counts


def _find_duplicates(engine: Backend, staged: ir.Table, settings: Events) -> ir.Table:
    keys = [
        name for name in ("user_id", "item_id", "timestamp", "request_id") if name in staged.columns
    ]
    if settings.actions_in_rows:
        # One event may have a row for each of its actions.
        keys += [name for name in ("impression", *settings.actions) if name in staged.columns]
    good = staged.filter(staged.reason.isnull())
    groups = good.group_by(keys).aggregate(copies=good.count())
    if not groups.filter(groups.copies > 1).count().to_pyarrow().as_py():
        return staged
    # The copy with the most actions stays; the order of the rest only makes the choice stable.
    first = [staged[name].desc() for name in settings.actions if name not in keys]
    rest = [staged[name] for name in staged.columns if name not in {*keys, *settings.actions}]
    copy = ibis.row_number().over(group_by=[*keys, "reason"], order_by=first + rest)
    numbered = staged.mutate(copy=copy)
    reason = numbered.reason.isnull() & (numbered.copy > 0)
    return keep(
        engine,
        "unique",
        numbered.mutate(reason=reason.ifelse("duplicate", numbered.reason)).drop("copy"),
    )


def _find_mixed(engine: Backend, staged: ir.Table, column: str, reason: str) -> ir.Table:
    """Rejects the requests in which a column has several values."""
    good = staged.filter(staged.reason.isnull(), staged.request_id.notnull())
    if column == "weight" and "impression" in staged.columns:
        good = good.filter(good.impression)
    values = good.group_by("request_id").aggregate(
        least=good[column].min(), most=good[column].max()
    )
    mixed = values.filter(values.least != values.most).select("request_id")
    if not mixed.count().to_pyarrow().as_py():
        return staged
    mixed = keep(engine, f"mixed_{column}", mixed)
    inside = staged.reason.isnull() & staged.request_id.isin(mixed.request_id)
    found = inside.ifelse(reason, staged.reason)
    return keep(engine, f"unmixed_{column}", staged.mutate(reason=found))


def _latest(settings: Events) -> int:
    latest = settings.latest
    if latest is None:
        latest = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    elif latest.tzinfo is None:
        latest = latest.replace(tzinfo=datetime.UTC)
    return (latest - EPOCH) // datetime.timedelta(microseconds=1)


def _samples(rejected: ir.Table, counts: dict[str, int]) -> str:
    """Three rows of each reason, one a line."""
    rows = [
        row
        for reason in counts
        for row in rejected.filter(rejected.reason == reason).limit(3).to_pyarrow().to_pylist()
    ]
    return "\n".join(f"    {row}" for row in rows)
