"""A log as canonical events, and the rows of it that cannot be used.

Canonical columns: `user_id` and `item_id` (int64 or string, as in the log), `timestamp` (int64,
microseconds since 1970 UTC), `request_id` (int64) and `position` (int64) in logs with impressions,
a boolean column an action, `ctx_<name>` strings, and `held_out`.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
from ibis.backends.duckdb import Backend

from thawline.config import Events, Windows
from thawline.data.engine import epoch_us, hash63, hashed_below, keep
from thawline.data.sources import decide_format, find_files, open_csv, open_parquet, reading
from thawline.errors import DataError

EARLIEST = datetime.datetime(1990, 1, 1, tzinfo=datetime.UTC)
LATEST = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
"""Timestamps outside are impossible: no log of people's clicks is that old or that new."""

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Text that reads back the same from an int64. `007` does not, and stays text."""


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
        DataError: A file that cannot be read, a missing column, a column of the wrong kind, a
            timestamp in the wrong unit, or too many rejected rows.
    """
    if settings.path is None:
        raise DataError("events.path is not set", "set it to a file, a folder or a glob")
    files = find_files(settings.path)
    kind = decide_format(settings, files)
    needed = _needed_columns(settings)
    if kind == "parquet":
        raw = open_parquet(engine, files, needed)
    else:
        raw = open_csv(engine, files, settings, needed)
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    with reading(files, kind, needed):
        mapping = _Mapping(raw, settings, where)
        mapping.check()
        staged = keep(engine, "staged", mapping.canonical(windows.holdout_users))
    staged, rejected, counts = _reject(engine, staged, settings, windows, where)
    hashed = mapping.textual.get("request_id", False)
    return EventLog(staged, rejected, counts, files, hashed)


def _needed_columns(settings: Events) -> dict[str, str]:
    columns = settings.columns.model_dump()
    needed = {f"events.columns.{key}": name for key, name in columns.items() if name is not None}
    for name, action in settings.actions.items():
        if action.column is not None:
            needed[f"events.actions.{name}.column"] = action.column
    for name, column in settings.context.items():
        needed[f"events.context.{name}"] = column
    return needed


class _Mapping:
    """Expressions from a log's own columns to the canonical ones."""

    def __init__(self, raw: ir.Table, settings: Events, where: str) -> None:
        self.raw = raw
        self.settings = settings
        self.where = where
        columns = settings.columns
        self.ids = {"user_id": columns.user_id, "item_id": columns.item_id}
        if columns.request_id is not None:
            self.ids["request_id"] = columns.request_id
        self.textual = {key: self._kind(key, name) == "text" for key, name in self.ids.items()}

    def _kind(self, key: str, name: str) -> str:
        kind = self.raw[name].type()
        if kind.is_string() or kind.is_uuid():
            return "text"
        if kind.is_integer() or kind.is_floating():
            return "number"
        raise DataError(
            f"{self.where}: column {name!r} (events.columns.{key}) is of type {kind}",
            "use a column of integers or strings",
        )

    def check(self) -> None:
        """Looks at every row once, for what a single row cannot tell."""
        raw, facts = self.raw, {}
        for key, name in self.ids.items():
            text = self._text(name)
            if self.textual[key]:
                facts[f"{key}:other"] = (~text.re_search(CANONICAL_INTEGER)).sum()
            elif raw[name].type().is_floating():
                facts[f"{key}:other"] = (raw[name] != raw[name].floor()).sum()
            facts[f"{key}:some"] = text.count()
        time = raw[self.settings.columns.timestamp]
        facts["time:some"] = time.count()
        if time.type().is_numeric() or time.type().is_string():
            facts["time:median"] = self._number(time).approx_median()
        if not time.type().is_numeric():
            facts["time:instant"] = self._instant(time).approx_median()
            facts["time:example"] = time.cast("string").max()
        for name, action in self.settings.actions.items():
            if action.column is not None and raw[action.column].type().is_string():
                bad = raw[action.column].nullif("")
                bad = self._number(bad).isnull().ifelse(bad, ibis.null("string"))
                facts[f"action:{name}"] = bad.max()
        row = raw.aggregate(**facts).to_pyarrow()
        self._judge({key: row[key][0].as_py() for key in facts})

    def _judge(self, facts: dict[str, Any]) -> None:
        for key, name in self.ids.items():
            other = facts.get(f"{key}:other")
            if self.textual[key]:
                # Numbers written as text (every CSV file) become numbers if all of them can.
                self.textual[key] = bool(other) or not facts[f"{key}:some"]
            elif other:
                raise DataError(
                    f"{self.where}: column {name!r} (events.columns.{key}) holds {other} numbers "
                    "with a fraction",
                    "use a column of integers or strings",
                )
        for name, action in self.settings.actions.items():
            if (example := facts.get(f"action:{name}")) is not None:
                raise DataError(
                    f"{self.where}: column {action.column!r} (events.actions.{name}.column) holds "
                    f"{example!r}, which is neither a number nor true or false",
                    "name another column, or clean this one",
                )
        self._judge_time(facts)

    def _judge_time(self, facts: dict[str, Any]) -> None:
        name, unit = self.settings.columns.timestamp, self.settings.timestamp_unit
        place = f"{self.where}: column {name!r} (events.columns.timestamp)"
        if not facts["time:some"]:
            return
        median, instant = facts.get("time:median"), facts.get("time:instant")
        if median is None and instant is not None:
            if not _plausible(instant / 1e6):
                raise DataError(
                    f"{place}: its median is {_date(instant / 1e6)}, outside {EARLIEST.year} to "
                    f"{LATEST.year}",
                    "it was made from a number of another unit: write it again, or give the "
                    "number with events.timestamp_unit",
                )
            return
        if median is None:
            raise DataError(
                f"{place} holds {facts.get('time:example')!r}, which is not a time",
                "write times as 2026-01-31 12:00:00, or as numbers with events.timestamp_unit",
            )
        fitting = [key for key, scale in PER_SECOND.items() if _plausible(median / scale)]
        fits = f"events.timestamp_unit: {fitting[0]} would fit" if fitting else "no unit fits them"
        if unit == "auto":
            raise DataError(
                f"{place} holds numbers (median {median:.0f}), whose unit is not declared",
                f"set events.timestamp_unit to s, ms, us or ns; {fits}",
            )
        if not _plausible(median / PER_SECOND[unit]):
            raise DataError(
                f"{place}: the median {median:.0f} is not a time between {EARLIEST.year} and "
                f"{LATEST.year} in the declared unit ({unit})",
                fits,
            )

    def canonical(self, holdout: float) -> ir.Table:
        """The canonical columns, the log's own ids and time as text, and why a row is rejected."""
        raw, settings = self.raw, self.settings
        user_text, time_text = (
            self._text(self.ids["user_id"]),
            self._text(settings.columns.timestamp),
        )
        columns: dict[str, ir.Value] = {key: self._id(key) for key in self.ids}
        columns["timestamp"] = self._microseconds()
        if settings.columns.position is not None:
            columns["position"] = self._number(raw[settings.columns.position]).cast("int64")
        for name, action in settings.actions.items():
            columns[name] = self._happened(action.column, action.at_least)
        for name, column in settings.context.items():
            columns[f"ctx_{name}"] = self._text(column)
        columns["held_out"] = hashed_below(user_text.fill_null(""), "holdout", holdout)
        for key, name in self.ids.items():
            columns[f"raw_{key}"] = self._text(name)
        columns["raw_timestamp"] = time_text
        table = raw
        if settings.sample_users < 1.0:
            # Rows without a user are sampled one by one, so that their share stays what it is.
            rest = self._text(self.ids["item_id"]).fill_null("") + time_text.fill_null("")
            key = user_text.fill_null(ibis.literal("?") + rest)
            table = table.filter(hashed_below(key, "sample", settings.sample_users))
        table = table.select(**columns)
        reasons = [(table[key].isnull(), f"null {key}") for key in self.ids]
        reasons += [
            (table.raw_timestamp.isnull(), "null timestamp"),
            (table.timestamp.isnull(), "impossible timestamp"),
        ]
        return table.mutate(reason=ibis.cases(*reasons))

    def _text(self, name: str) -> ir.StringValue:
        column = self.raw[name]
        if column.type().is_string():
            return column.nullif("")
        if column.type().is_floating():
            column = column.isnan().ifelse(ibis.null(column.type()), column)
            whole = (column == column.floor()) & (column.abs() < 2.0**53)
            return whole.ifelse(column.try_cast("int64").cast("string"), column.cast("string"))
        return column.cast("string")

    def _id(self, key: str) -> ir.Value:
        text = self._text(self.ids[key])
        if not self.textual[key]:
            return text.try_cast("int64")
        return hash63(text) if key == "request_id" else text

    def _number(self, column: ir.Value) -> ir.FloatingValue:
        kind = column.type()
        if kind.is_boolean():
            return column.cast("int8").cast("float64")
        if kind.is_string():
            flag = column.try_cast("boolean").cast("int8").cast("float64")
            return column.try_cast("float64").fill_null(flag)
        if kind.is_numeric():
            return column.cast("float64")
        return ibis.null("float64")

    def _happened(self, column: str | None, at_least: float | None) -> ir.BooleanValue:
        if column is None:
            return ibis.literal(True)
        number = self._number(self.raw[column])
        number = number.isnan().ifelse(ibis.null("float64"), number)
        happened = number > 0 if at_least is None else number >= at_least
        return happened.fill_null(False)

    def _instant(self, column: ir.Value) -> ir.IntegerValue:
        if column.type().is_string():
            return epoch_us(column.try_cast("timestamp('UTC')"))
        return epoch_us(column)

    def _microseconds(self) -> ir.IntegerValue:
        column = self.raw[self.settings.columns.timestamp]
        low, high = int(EARLIEST.timestamp()), int(LATEST.timestamp())
        unit = self.settings.timestamp_unit
        if unit == "auto" or not (column.type().is_numeric() or column.type().is_string()):
            instant = self._instant(column)
            return instant.between(low * 10**6, high * 10**6).ifelse(instant, ibis.null("int64"))
        scale = PER_SECOND[unit]
        if not column.type().is_integer():
            column = self._number(column)
        # What is impossible becomes null before the multiplication, which could overflow.
        possible = column.between(low * scale, high * scale)
        column = possible.ifelse(column, ibis.null(column.type()))
        if not column.type().is_integer():
            return (column * (10**6 / scale)).round().cast("int64")
        column = column.cast("int64")
        return column * (10**6 // scale) if scale <= 10**6 else column // (scale // 10**6)


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
    rest = [staged[name] for name in staged.columns if name not in keys]
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


def _plausible(seconds: float) -> bool:
    return EARLIEST.timestamp() <= seconds < LATEST.timestamp()


def _date(seconds: float) -> str:
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    try:
        return f"{moment + datetime.timedelta(seconds=seconds):%Y-%m-%d}"
    except OverflowError:
        return "beyond the calendar"
