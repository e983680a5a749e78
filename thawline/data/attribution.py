"""Actions that come after their impression, as rows of their own, joined to it."""

from __future__ import annotations

from collections.abc import Sequence

import ibis
import ibis.expr.types as ir

from thawline.data.engine import HOUR_US
from thawline.data.events import is_positive


def number_impressions(events: ir.Table) -> ir.Table:
    """Numbers the impressions of a user and an item in time order (`number`); actions have none."""
    # At one time, the last request's impression counts as the latest.
    order = [name for name in ("timestamp", "request_id", "position") if name in events.columns]
    number = ibis.row_number().over(group_by=["user_id", "item_id", "impression"], order_by=order)
    events = events.mutate(number=number.cast("int64"))
    return events.mutate(number=events.impression.ifelse(events.number, ibis.null("int64")))


def attribute(
    events: ir.Table, impressions: ir.Table, actions: Sequence[str], hours: float
) -> ir.Table:
    """Adds to the impressions the actions that came after them.

    An action joins the latest impression of its user and item (of its request, where it names one)
    that is not after it, unless that was more than `hours` before.

    Args:
        events: Canonical events with `impression` and `number`, from the first of `impressions`
            on, those of other requests too: their impressions have actions of their own.
        impressions: Some of the impressions, with `stop` (microseconds since 1970 UTC): actions at
            or after it are not known yet.
        actions: Names of the boolean columns.
        hours: Longest time from an impression to an action.

    Returns:
        The impressions, with these actions true too.
    """
    keys = ["user_id", "item_id"]
    found = _latest(events, actions, [*keys, "request_id"], named=True)
    found = found.union(_latest(events, actions, keys, named=False))
    later = {f"later_{name}": name for name in actions}
    found = found.rename(user="user_id", item="item_id", at="number", acted="timestamp", **later)
    joined = impressions.left_join(
        found,
        [
            impressions.user_id == found.user,
            impressions.item_id == found.item,
            impressions.number == found.at,
            found.acted - impressions.timestamp <= round(hours * HOUR_US),
            found.acted < impressions.stop,
        ],
    )
    kept = [name for name in impressions.columns if name not in actions]
    happened = {name: joined[name] | joined[f"later_{name}"].fill_null(False) for name in actions}
    joined = joined.select(*kept, **happened)
    return joined.group_by(kept).aggregate(**{name: joined[name].any() for name in actions})


def _latest(events: ir.Table, actions: Sequence[str], keys: list[str], *, named: bool) -> ir.Table:
    """Actions that name their request, or do not, with the number of their latest impression.

    Impressions and actions are put in one line, an impression before the actions of its time.
    """
    mine = events.request_id.notnull() if named else events.request_id.isnull()
    line = events.filter(events.impression | (is_positive(events, actions) & mine))
    line = line.mutate(after=(~line.impression).cast("int8"))
    along = ibis.window(
        group_by=keys, order_by=["timestamp", "after", "number"], preceding=None, following=0
    )
    line = line.mutate(number=line.number.max().over(along))
    line = line.filter(~line.impression, line.number.notnull())
    return line.select("user_id", "item_id", "timestamp", "number", *actions)
