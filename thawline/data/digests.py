"""What a day of requests is made from, as digests of events: sums of hashes, day by day.

A sum does not depend on the order of the events, and the sum over many days is the sum of theirs.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ibis
import ibis.expr.types as ir

from thawline.data.engine import DAY_US, hash63
from thawline.data.manifest import Digest
from thawline.data.spans import EPOCH

HALF = 1 << 32
FRACTION = 2.0**62
MISSING = "\0"


@dataclass(frozen=True)
class Digests:
    """Digests of a log's events up to the end of the test window."""

    own: Mapping[datetime.date, Digest]
    """By the day on which a request starts: its events up to midnight."""
    spill: Mapping[datetime.date, Digest]
    """The same: its events from midnight to the end of its window."""
    first: datetime.date
    """The first day with events."""

    def past(self, day: datetime.date) -> Digest:
        """Of all events before a day, up to the midnights of their requests."""
        return sum((self.own[other] for other in self.own if other < day), Digest())


def digest_events(events: ir.Table, ends: Sequence[int]) -> Digests:
    """Sums the hashes of events.

    Args:
        events: Canonical events.
        ends: First microsecond after each window, in order.
    """
    others = {"user_id", "item_id", "timestamp", "held_out"}
    columns = ["user_id", "item_id", "timestamp", *sorted(set(events.columns) - others)]
    hashed = hash63(ibis.literal("|").join(_texts(events, columns)))
    start = events.timestamp
    if "request_id" in events.columns:
        # An event without a request id is one of its own day.
        known = events.filter(events.request_id.notnull())
        starts = known.group_by("request_id").aggregate(start=known.timestamp.min())
        starts = starts.rename(started="request_id")
        keyed = events.mutate(hashed=hashed).left_join(starts, events.request_id == starts.started)
        start = keyed.start.fill_null(keyed.timestamp)
        keyed = keyed.select("timestamp", "hashed", start=start)
    else:
        keyed = events.select("timestamp", hashed=hashed, start=start)
    stop = ibis.cases(*((keyed.start < end, end) for end in ends), else_=ends[-1])
    keyed = keyed.mutate(
        day=keyed.start // DAY_US, spilt=keyed.timestamp // DAY_US > keyed.start // DAY_US
    ).filter(keyed.timestamp < stop)
    sums = keyed.group_by(["day", "spilt"]).aggregate(
        events=keyed.count(),
        high=(keyed.hashed // HALF).sum().cast("int64"),
        low=(keyed.hashed % HALF).sum().cast("int64"),
    )
    own: dict[datetime.date, Digest] = {}
    spill: dict[datetime.date, Digest] = {}
    for row in sums.to_pyarrow().to_pylist():
        day = EPOCH + datetime.timedelta(days=row.pop("day"))
        side = spill if row.pop("spilt") else own
        side[day] = Digest(**row)
    return Digests(own, spill, min(own))


def _texts(events: ir.Table, columns: Iterable[str]) -> list[ir.StringValue]:
    texts = []
    for name in columns:
        column = events[name]
        if column.type().is_boolean():
            column = column.ifelse(1, 0)
        if column.type().is_floating():
            # Engines write fractions in ways of their own; these whole numbers tell it too.
            whole = column.floor().cast("int64")
            texts.append(whole.cast("string").fill_null(MISSING))
            column = ((column - whole) * FRACTION).floor().cast("int64")
        texts.append(column.cast("string").fill_null(MISSING))
    return texts
