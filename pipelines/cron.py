"""Cron expressions as Kubeflow Pipelines reads them: six fields, seconds first, in UTC.

Its API and its controller read them by the Go package `robfig/cron`, version 1.2.0.
The cron libraries of Python accept what that refuses (Sunday as 7, `L`, `#`), and it takes the five
fields of a crontab for the first five of six. So these are its own rules, and nothing else passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import islice, product
from typing import NoReturn

from thawline.errors import ConfigError

HORIZON = timedelta(days=5 * 366)
"""How far the controller looks ahead for the next run."""

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Days of each month, of February in a leap year."""

SHORTHANDS = {
    "@hourly": "0 0 * * * *",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@weekly": "0 0 0 * * 0",
    "@monthly": "0 0 0 1 * *",
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
}


@dataclass(frozen=True)
class Field:
    """One of the six, and what it may hold."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """Of the values, from `low` on."""


FIELDS = (
    Field("seconds", 0, 59),
    Field("minutes", 0, 59),
    Field("hours", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of week", 0, 6, DAYS),
)


@dataclass(frozen=True)
class Cron:
    """A checked expression."""

    text: str
    """The six fields, as Kubeflow gets them."""
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Both kinds of day are restricted: then either suffices, as in a crontab."""

    def following(self, after: datetime) -> Iterator[datetime]:
        """The moments of the next runs, in UTC, strictly after a moment."""
        start = after.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1)
        clock = [sorted(self.hours), sorted(self.minutes), sorted(self.seconds)]
        for offset in range(HORIZON.days):
            day = start.date() + timedelta(days=offset)
            if not self._runs_on(day):
                continue
            for hour, minute, second in product(*clock):
                moment = datetime(day.year, day.month, day.day, hour, minute, second, tzinfo=UTC)
                if moment >= start:
                    yield moment

    def next_runs(
        self, count: int, after: datetime, until: datetime | None = None
    ) -> list[datetime]:
        """The next `count` of them, fewer where they end before."""
        moments = islice(self.following(after), count)
        return [moment for moment in moments if until is None or moment <= until]

    def _runs_on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return of_month or of_week if self.either_day else of_month and of_week


def parse(text: str, where: str = "cron") -> Cron:
    """Checks an expression of five fields (a crontab's) or six (seconds first).

    >>> parse("30 3 * * MON").text
    '0 30 3 * * MON'

    Args:
        text: The expression, or `@daily` and the like.
        where: What names the key in an error.

    Raises:
        ConfigError: Kubeflow would refuse it, misread it or never run it; the field is named.
    """
    parts = SHORTHANDS.get(text.strip().lower(), text).split()
    if parts and parts[0].upper().startswith(("TZ=", "CRON_TZ=")):
        _refuse(where, text, "a time zone has no place in it", "Kubeflow counts in UTC")
    if parts and parts[0].startswith("@"):
        known = ", ".join(SHORTHANDS)
        _refuse(where, text, f"{parts[0]} is unknown", f"write five or six fields, or {known}")
    if len(parts) == 5:
        parts = ["0", *parts]
    if len(parts) != 6:
        order = "minute hour day-of-month month day-of-week, with seconds before them or without"
        _refuse(where, text, f"{len(parts)} fields", f"write {order}")
    values = [_values(part, each, where, text) for part, each in zip(parts, FIELDS, strict=True)]
    restricted = [not _starred(part) for part in (parts[3], parts[5])]
    seconds, minutes, hours, days, months, weekdays = values
    both = all(restricted)
    cron = Cron(" ".join(parts), seconds, minutes, hours, days, months, weekdays, both)
    longest = max(LONGEST[month - 1] for month in cron.months)
    if not restricted[1] and min(cron.days) > longest:
        _refuse(
            where,
            text,
            f"day of month {parts[3]} is never in month {parts[4]}",
            "name a day that the month has",
        )
    return cron


def _starred(part: str) -> bool:
    """Whether a field leaves the day to the other kind; a star with a step does, too."""
    return any(each[0] in "*?" for each in part.split(","))


def _values(part: str, field: Field, where: str, text: str) -> frozenset[int]:
    found: set[int] = set()
    for each in part.split(","):
        span, slash, step = each.partition("/")
        first, dash, last = span.partition("-")
        if span in ("*", "?"):
            low, high = field.low, field.high
        else:
            low = _number(first, field, where, text)
            high = _number(last, field, where, text) if dash else field.high if slash else low
        if low > high:
            _refuse(where, text, f"{field.name} {each!r} ends before it starts", _hint(field))
        if slash and not (step.isdecimal() and 1 <= int(step) <= field.high - field.low):
            reason = f"{field.name} {each!r}: the step has to be 1 to {field.high - field.low}"
            _refuse(where, text, reason, _hint(field))
        found.update(range(low, high + 1, int(step) if slash else 1))
    return frozenset(found)


def _number(word: str, field: Field, where: str, text: str) -> int:
    if word.upper() in field.names:
        return field.low + field.names.index(word.upper())
    if not re.fullmatch(r"[0-9]{1,4}", word) or not field.low <= int(word) <= field.high:
        _refuse(where, text, f"{field.name} {word!r} is not {_range(field)}", _hint(field))
    return int(word)


def _range(field: Field) -> str:
    names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    return f"{field.low} to {field.high}{names}"


def _hint(field: Field) -> str:
    forms = "*, a value, a list (a,b), a range (a-b) or a step (*/n, a-b/n)"
    sunday = "; Sunday is 0" if field.names == DAYS else ""
    return f"write the {field.name} as {forms} of {_range(field)}{sunday}"


def _refuse(where: str, text: str, reason: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{where}: {text!r}: {reason}", remedy)
