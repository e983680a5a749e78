"""From a log's own columns to the canonical ones, and whether they are what they are taken for."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Mapping
from functools import reduce
from typing import Any

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from thawline.config import Action, Events
from thawline.data.engine import epoch_us, hash63, hashed_below, text_epoch_us, text_float
from thawline.data.ids import stored_as
from thawline.errors import DataError

EARLIEST = datetime.datetime(1990, 1, 1, tzinfo=datetime.UTC)
LATEST = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
"""Timestamps outside are impossible: no log of people's clicks is that old or that new."""

LEAST_WEIGHT, MOST_WEIGHT = 1e-9, 1e9
"""Weights outside are bad: their sums and gradients would lose the others', or overflow."""

MANGLED = "\ufffd"
"""Unicode's replacement character."""

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Text that reads back the same from an int64. `007` does not, and stays text."""


def needed_columns(settings: Events, ids: Mapping[str, str] | None = None) -> dict[str, str]:
    """The log's columns that a config names, by config key.

    Args:
        settings: Names most of them.
        ids: Columns of ids for further tables, by config key.
    """
    columns = settings.columns.model_dump()
    needed = {f"events.columns.{key}": name for key, name in columns.items() if name is not None}
    for name, action in settings.actions.items():
        if action.column is not None:
            needed[f"events.actions.{name}.column"] = action.column
    if settings.impression is not None and settings.impression.column is not None:
        needed["events.impression.column"] = settings.impression.column
    for name, column in settings.context.items():
        needed[f"events.context.{name}"] = column
    if settings.weight is not None:
        needed["events.weight"] = settings.weight
    return needed | dict(ids or {})


def as_text(column: ir.Value) -> ir.StringValue:
    """A column as text, whole numbers without a fraction; null where it is null, NaN or empty."""
    if column.type().is_string():
        return column.nullif("")
    if column.type().is_floating():
        column = _without_nan(column)
        whole = _is_whole(column) & (column.abs() < 2.0**53)
        return whole.ifelse(column.try_cast("int64").cast("string"), column.cast("string"))
    if column.type().is_timestamp():
        # Some engines write the time zone, others do not.
        column = column.cast("timestamp")
    return column.cast("string")


class ColumnMapping:
    """Expressions from a log's own columns to the canonical ones."""

    def __init__(
        self, raw: ir.Table, settings: Events, where: str, ids: Mapping[str, str] | None = None
    ) -> None:
        """Reads the columns' types.

        Args:
            raw: The log.
            settings: What its columns mean.
            where: The log's files, for errors.
            ids: Columns of ids for further tables, by config key; they become `id_<column>`.

        Raises:
            DataError: Ids that are neither text nor numbers.
        """
        self.raw = raw
        self.settings = settings
        self.further = dict(ids or {})
        self.where = where
        columns = settings.columns
        self.ids = {"user_id": columns.user_id, "item_id": columns.item_id}
        if columns.request_id is not None:
            self.ids["request_id"] = columns.request_id
        self.textual = {key: self._kind(key, name) == "text" for key, name in self.ids.items()}

    def _kind(self, key: str, name: str) -> str:
        kind = self.raw[name].type()
        if kind.is_string() or kind.is_uuid() or kind.is_uint64() or _is_long(kind):
            # Numbers that an int64 may not hold are text, unless all of them are short.
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
                facts[f"{key}:other"] = (~_is_whole(raw[name]) & text.notnull()).sum()
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
        for key, rule in self._rules().items():
            if rule.column is None:
                continue
            kind = raw[rule.column].type()
            if not (kind.is_string() or kind.is_numeric() or kind.is_boolean()):
                raise DataError(
                    f"{self.where}: column {rule.column!r} ({key}.column) is of type {kind}",
                    "name a column of words, numbers, or true and false",
                )
            if kind.is_string() and not rule.words:
                number = self._number(raw[rule.column].nullif(""))
                facts[f"{key}:some"] = number.count()
                facts[f"{key}:bad"] = (
                    number.isnull().ifelse(raw[rule.column].nullif(""), ibis.null("string")).max()
                )
            elif rule.words:
                facts[f"{key}:some"] = self._happened(rule).sum()
                facts[f"{key}:bad"] = self._text(rule.column).max()
        for name, column in self.settings.context.items():
            kind = raw[column].type()
            if kind.is_nested() or kind.is_binary():
                raise DataError(
                    f"{self.where}: column {column!r} (events.context.{name}) is of type {kind}",
                    "name a column with one value a row, or drop it from events.context",
                )
        if (weight := self.settings.weight) is not None:
            kind = raw[weight].type()
            if kind.is_boolean() or not (kind.is_numeric() or kind.is_string()):
                raise DataError(
                    f"{self.where}: column {weight!r} (events.weight) is of type {kind}",
                    "name a column of numbers",
                )
        for key, column in self.further.items():
            require_scalar(raw, column, f"{self.where}: column {column!r} ({key})")
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
        for key, rule in self._rules().items():
            example = facts.get(f"{key}:bad")
            if example is None or facts[f"{key}:some"]:
                continue
            place = f"{self.where}: column {rule.column!r} ({key}.column) "
            if rule.words:
                raise DataError(
                    f"{place}is never {' or '.join(map(repr, rule.words))}; it holds {example!r}",
                    f"correct {key}.equals",
                )
            raise DataError(
                f"{place}holds {example!r}, and no number and no true or false",
                f"name another column, or the words with {key}.equals",
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

    def _rules(self) -> dict[str, Action]:
        """Config key to the rule that tells an action, or an impression."""
        rules = {f"events.actions.{name}": rule for name, rule in self.settings.actions.items()}
        if self.settings.impression is not None:
            rules["events.impression"] = self.settings.impression
        return rules

    def canonical(self, holdout: float, latest: int) -> ir.Table:
        """The canonical columns, the log's own ids and time as text, and why a row is rejected.

        Args:
            holdout: Share of the users that are held out.
            latest: Microseconds since 1970 UTC; what is later is of the future.
        """
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
            columns[name] = self._happened(action)
        if settings.impression is not None:
            columns["impression"] = self._happened(settings.impression)
        for name, column in settings.context.items():
            columns[f"ctx_{name}"] = self._text(column)
        for column in self.further.values():
            columns[stored_as(column)] = self._text(column)
        if settings.weight is not None:
            columns["weight"] = self._weight(settings.weight)
        columns["held_out"] = hashed_below(user_text.fill_null(""), "holdout", holdout)
        for key, name in self.ids.items():
            columns[f"raw_{key}"] = self._text(name)
        columns["raw_timestamp"] = time_text
        if settings.weight is not None:
            columns["raw_weight"] = self._text(settings.weight)
        if (said := self._action_text()) is not None:
            columns["raw_action"] = said
        columns["unknown"], columns["mangled"] = self._unknown(), self._mangled()
        table = raw
        for column in settings.by_word if settings.ignored_actions else ():
            left_out = self._text(column).isin(settings.ignored_actions)
            table = table.filter(~left_out.fill_null(False))
        if settings.sample_users < 1.0:
            # Rows without a user are sampled one by one, so that their share stays what it is.
            rest = self._text(self.ids["item_id"]).fill_null("") + time_text.fill_null("")
            key = user_text.fill_null(ibis.literal("?") + rest)
            table = table.filter(hashed_below(key, "sample", settings.sample_users))
        table = table.select(**columns)
        # An action's own row need not know the request that it will join.
        every = ibis.literal(True)
        shown = table.impression if settings.impression is not None else every
        reasons = [(table.mangled, "bad encoding")]
        reasons += [
            (table[key].isnull() & (shown if key == "request_id" else every), f"null {key}")
            for key in self.ids
        ]
        reasons += [
            (table.raw_timestamp.isnull(), "null timestamp"),
            (table.timestamp.isnull(), "impossible timestamp"),
            (table.timestamp > latest, "future timestamp"),
            (table.unknown, "unknown action"),
        ]
        if settings.weight is not None:
            reasons.append((table.weight.isnull() & shown, "bad weight"))
        return table.mutate(reason=ibis.cases(*reasons)).drop("unknown", "mangled")

    def _action_text(self) -> ir.StringValue | None:
        """What the columns of words or numbers in text say, for the rejected rows."""
        names = {rule.column: None for rule in self._rules().values() if rule.column is not None}
        texts = [self._text(name) for name in names if self.raw[name].type().is_string()]
        if not texts:
            return None
        return texts[0] if len(texts) == 1 else ibis.literal(" ").join(texts)

    def _unknown(self) -> ir.BooleanValue:
        """Whether a column that tells actions holds something that tells none."""
        unknown: list[ir.BooleanValue] = []
        for column, words in self.settings.by_word.items():
            unknown.append(~self._text(column).isin(sorted(words)))
        for rule in self._rules().values():
            if rule.column is not None and not rule.words:
                value = self.raw[rule.column]
                if value.type().is_string():
                    value = value.nullif("")
                    unknown.append(value.notnull() & self._number(value).isnull())
        if self.settings.impression is not None:
            happened = [self._happened(rule) for rule in self._rules().values()]
            unknown.append(~reduce(operator.or_, happened))
        return reduce(
            operator.or_, (each.fill_null(False) for each in unknown), ibis.literal(False)
        )

    def _mangled(self) -> ir.BooleanValue:
        """Whether a text holds U+FFFD, which stands for bytes that were no text."""
        texts = [
            self.raw[name].contains(MANGLED).fill_null(False)
            for name in dict.fromkeys(needed_columns(self.settings, self.further).values())
            if self.raw[name].type().is_string()
        ]
        return reduce(operator.or_, texts, ibis.literal(False))

    def _text(self, name: str) -> ir.StringValue:
        return as_text(self.raw[name])

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
        if kind.is_floating():
            return _without_nan(column).cast("float64")
        if kind.is_numeric():
            return column.cast("float64")
        return ibis.null("float64")

    def _weight(self, name: str) -> ir.FloatingValue:
        """The weight; null where it is none, or none that can be used."""
        column = self.raw[name]
        number = text_float(column) if column.type().is_string() else self._number(column)
        number = _without_nan(number)
        usable = number.between(LEAST_WEIGHT, MOST_WEIGHT)
        return usable.ifelse(number, ibis.null("float64"))

    def _happened(self, rule: Action) -> ir.BooleanValue:
        if rule.column is None:
            return ibis.literal(True)
        if rule.words:
            return self._text(rule.column).isin(rule.words).fill_null(False)
        number = self._number(self.raw[rule.column])
        number = _without_nan(number)
        happened = number > 0 if rule.at_least is None else number >= rule.at_least
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


def _without_nan(column: ir.FloatingValue) -> ir.FloatingValue:
    """The column, null where it is NaN."""
    # DuckDB decides `isnan` by the least and the most of a Parquet column, which pass over NaN.
    nan = column.cast("string").lower().endswith("nan")
    return nan.ifelse(ibis.null(column.type()), column)


def _is_whole(column: ir.FloatingValue) -> ir.BooleanValue:
    # `floor` makes integers, which some numbers do not fit into.
    return column % 1 == 0


def _is_long(kind: dt.DataType) -> bool:
    """Whether a type is of decimal numbers without a fraction."""
    return isinstance(kind, dt.Decimal) and kind.scale == 0


def require_scalar(raw: ir.Table, column: str, where: str) -> None:
    """Checks that a column of ids holds one value a row.

    Raises:
        DataError: Lists, structs or bytes.
    """
    kind = raw[column].type()
    if kind.is_nested() or kind.is_binary():
        raise DataError(f"{where} is of type {kind}", "name a column with one id a row")


def _plausible(seconds: float) -> bool:
    return EARLIEST.timestamp() <= seconds < LATEST.timestamp()


def _date(seconds: float) -> str:
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    try:
        return f"{moment + datetime.timedelta(seconds=seconds):%Y-%m-%d}"
    except OverflowError:
        return "beyond the calendar"
