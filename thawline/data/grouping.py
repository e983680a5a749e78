"""Rows of a log that belong together: of one event, and of one request."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir
from ibis.backends.sql import SQLBackend as Backend

from thawline.config import Events
from thawline.data.engine import hash63, keep


def merge_rows(engine: Backend, events: ir.Table, settings: Events) -> ir.Table:
    """Joins the rows of a user, an item and a time: one for each action, in some logs."""
    flags = [name for name in ("impression", *settings.actions) if name in events.columns]
    keys = [
        name for name in ("user_id", "item_id", "timestamp", "request_id") if name in events.columns
    ]
    rest = [name for name in events.columns if name not in {*flags, *keys}]
    # Of what differs between the rows, the impression's counts. (Not every engine collects in
    # falling order.)
    order = [~events[name] for name in flags] + [events[name] for name in rest]
    merged = events.group_by(keys).aggregate(
        **{name: events[name].any() for name in flags},
        **{name: events[name].first(order_by=order, include_null=True) for name in rest},
    )
    return keep(engine, "merged", merged.select(events.columns))


def group_by_gap(engine: Backend, events: ir.Table, gap: int) -> ir.Table:
    """Gives the impressions of a user that are at most `gap` microseconds apart one request id.

    The id is hashed from the user and the time of the first of them, so it does not depend on what
    else is in the log.
    """
    shown = events.filter(events.impression) if "impression" in events.columns else events
    moments = shown.select("user_id", "timestamp").distinct()
    by_user = ibis.window(group_by="user_id", order_by="timestamp")
    before = moments.timestamp.lag().over(by_user)
    moments = moments.mutate(first=before.isnull() | (moments.timestamp - before > gap))
    begun = moments.first.ifelse(moments.timestamp, ibis.null("int64"))
    along = ibis.window(group_by="user_id", order_by="timestamp", preceding=None, following=0)
    moments = moments.mutate(begun=begun.max().over(along))
    text = moments.user_id.cast("string") + "|" + moments.begun.cast("string")
    moments = moments.select(
        user="user_id", moment="timestamp", request_id=hash63(text).cast("int64")
    )
    joined = events.left_join(
        moments, [events.user_id == moments.user, events.timestamp == moments.moment]
    ).drop("user", "moment")
    if "impression" in events.columns:
        known = joined.impression.ifelse(joined.request_id, ibis.null("int64"))
        joined = joined.mutate(request_id=known)
    return keep(engine, "grouped", joined)
