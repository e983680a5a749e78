"""From a log's own columns to the canonical ones, and whether they are what they are taken for."""

from __future__ import annotations

import datetime
from typing import Any

import ibis
import ibis.expr.types as ir

from thawline.config import Events
from thawline.data.engine import epoch_us, hash63, hashed_below, text_epoch_us, text_float
from thawline.errors import DataError

EARLIEST = datetime.datetime(1990, 1, 1, tzinfo=datetime.UTC)
LATEST = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
"""Timestamps outside are impossible: no log of people's clicks is that old or that new."""

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Text that reads back the same from an int64. `007` does not, and stays text."""


def needed_columns(settings: Events) -> dict[str, str]:
    """The log's columns that a config names, by config key."""
    columns = settings.columns.model_dump()
    needed = {f"events.columns.{key}": name for key, name in columns.items() if name is not None}
    for name, action in settings.actions.items():
        if action.column is not None:
            needed[f"events.actions.{name}.column"] = action.column
    for name, column in settings.context.items():
        needed[f"events.context.{name}"] = column
    return needed


class ColumnMapping:
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
        """Looks at every row once, for what a single row cannot tell.

        Raises:
            DataError: A column that is not what the config takes it for.
        """
        raw, facts = self.raw, {}
        for key, name in self.ids.items():
            text = self._text(name)
            if self.textual[key]:
                facts[f"{key}:other"] = (~text.re_search(CANONICAL_INTEGER)).sum()
            elif raw[name].type().is_floating():
                facts[f"{key}:other"] = (raw[name] != raw[name].floor()).sum()
            facts[f"{key}:some"] = text.count()
        time = raw[self.settings.columns.timestamp]
        if time.type().is_boolean() or time.type().is_nested() or time.type().is_binary():
            raise DataError(
                f"{self.where}: column {time.get_name()!r} (events.columns.timestamp) is of type "
                f"{time.type()}",
                "use a column of times or numbers",
            )
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
            return text_float(column).fill_null(flag)
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
            return text_epoch_us(column)
        return epoch_us(column.cast("timestamp"))

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
        if scale <= 10**6:
            return column * (10**6 // scale)
        # Engines divide in double precision, which is exact for whole microseconds alone.
        step = scale // 10**6
        return ((column - column % step) / step).round().cast("int64")


def _plausible(seconds: float) -> bool:
    return EARLIEST.timestamp() <= seconds < LATEST.timestamp()


def _date(seconds: float) -> str:
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    try:
        return f"{moment + datetime.timedelta(seconds=seconds):%Y-%m-%d}"
    except OverflowError:
        return "beyond the calendar"
