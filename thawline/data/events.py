"""A log as canonical events, and the rows of it that cannot be used.

Canonical columns: `user_id` and `item_id` (int64 or string, as in the log), `timestamp` (int64,
microseconds since 1970 UTC), `request_id` (int64) and `position` (int64) in logs with impressions,
a boolean column an action, `ctx_<name>` strings, and `held_out`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import ibis
import ibis.expr.types as ir
from ibis.backends.duckdb import Backend

from thawline.config import Events, Windows
from thawline.data.engine import keep
from thawline.data.mapping import ColumnMapping, needed_columns
from thawline.data.sources import decide_format, find_files, open_csv, open_parquet, reading
from thawline.errors import ConfigError, DataError

RESERVED = {
    *("user_id", "item_id", "timestamp", "request_id", "position", "held_out", "reason", "row"),
    *("action", "number", "weight", "start", "copy"),
}
RESERVED_PREFIXES = ("ctx_", "label_", "oracle_", "raw_")


@dataclass(frozen=True)
class EventLog:
    """Events that passed every check, kept in the engine."""

    events: ir.Table
    """Canonical columns; no two rows with the same user, item, timestamp and request."""
    rejected: ir.Table
    """The other rows as text: user_id, item_id, timestamp, request_id, reason."""
    counts: dict[str, int]
    """Rejected rows by reason; a reason without rows is left out."""
    files: list[Path]
    hashed_requests: bool
    """Whether request ids are text in the log, hence hashed in the events."""


def is_positive(events: ir.Table, actions: Iterable[str]) -> ir.BooleanValue:
    """Whether an event has any of the actions."""
    return reduce(operator.or_, [events[name] for name in actions])


def read_events(engine: Backend, settings: Events, windows: Windows) -> EventLog:
    """Reads a log, checks it and keeps its events in the engine.

    Args:
        engine: Holds the result.
        settings: Where the log is and what its columns mean.
        windows: Uses `holdout_users` and `max_rejected`.

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
    needed = needed_columns(settings)
    if kind == "parquet":
        raw = open_parquet(engine, files, needed)
    else:
        raw = open_csv(engine, files, settings, needed)
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    with reading(files, kind, needed):
        mapping = ColumnMapping(raw, settings, where)
        mapping.check()
        staged = keep(engine, "staged", mapping.canonical(windows.holdout_users))
    staged, rejected, counts = _reject(engine, staged, settings, windows, where)
    hashed = mapping.textual.get("request_id", False)
    return EventLog(staged, rejected, counts, files, hashed)


def _reject(
    engine: Backend,
    staged: ir.Table,
    settings: Events,
    windows: Windows,
    where: str,
) -> tuple[ir.Table, ir.Table, dict[str, int]]:
    """Splits the staged rows, and fails if too many are rejected."""
    staged = _find_duplicates(engine, staged, settings)
    if settings.impressions:
        staged = _find_mixed_requests(engine, staged)
    raw = [name for name in staged.columns if name.startswith("raw_")]
    rejected = staged.filter(staged.reason.notnull())
    rejected = rejected.select(
        **{name.removeprefix("raw_"): rejected[name] for name in raw}, reason=rejected.reason
    )
    rejected = keep(engine, "rejected", rejected.order_by(rejected.columns))
    by_reason = rejected.group_by("reason").aggregate(rows=rejected.count()).to_pyarrow()
    counts = dict(sorted(zip(*(column.to_pylist() for column in by_reason.columns), strict=True)))
    total = staged.count().to_pyarrow().as_py()
    if total == 0:
        raise DataError(f"{where} holds no rows", "check events.path and events.sample_users")
    if sum(counts.values()) > windows.max_rejected * total:
        listed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        sample = "\n".join(f"    {row}" for row in rejected.limit(3).to_pyarrow().to_pylist())
        raise DataError(
            f"{where}: {sum(counts.values())} of {total} rows cannot be used: {listed}; such as\n"
            f"{sample}",
            "clean the log, correct events.columns, or raise windows.max_rejected "
            f"(now {windows.max_rejected})",
        )
    events = staged.filter(staged.reason.isnull()).drop(*raw, "reason")
    return events, rejected, counts


def _find_duplicates(engine: Backend, staged: ir.Table, settings: Events) -> ir.Table:
    keys = ["user_id", "item_id", "timestamp"] + ["request_id"] * settings.impressions
    good = staged.filter(staged.reason.isnull())
    groups = good.group_by(keys).aggregate(copies=good.count())
    if not groups.filter(groups.copies > 1).count().to_pyarrow().as_py():
        return staged
    # The copy with the most actions stays; the order of the rest only makes the choice stable.
    first = [staged[name].desc() for name in settings.actions]
    rest = [staged[name] for name in staged.columns if name not in {*keys, *settings.actions}]
    copy = ibis.row_number().over(group_by=[*keys, "reason"], order_by=first + rest)
    numbered = staged.mutate(copy=copy)
    reason = numbered.reason.isnull() & (numbered.copy > 0)
    return keep(
        engine,
        "unique",
        numbered.mutate(reason=reason.ifelse("duplicate", numbered.reason)).drop("copy"),
    )


def _find_mixed_requests(engine: Backend, staged: ir.Table) -> ir.Table:
    good = staged.filter(staged.reason.isnull())
    users = good.group_by("request_id").aggregate(
        first_user=good.user_id.min(), last_user=good.user_id.max()
    )
    mixed = users.filter(users.first_user != users.last_user).select("request_id")
    if not mixed.count().to_pyarrow().as_py():
        return staged
    mixed = keep(engine, "mixed", mixed)
    inside = staged.reason.isnull() & staged.request_id.isin(mixed.request_id)
    reason = inside.ifelse("several users in one request", staged.reason)
    return keep(engine, "unmixed", staged.mutate(reason=reason))
