"""Holding requests out of training, whoever's they are: their positives are no targets."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir

from thawline.data.attribution import number_impressions
from thawline.data.engine import Backend, hashed_below, keep

SALT = "holdout"


def hold_requests_out(engine: Backend, events: ir.Table, share: float) -> ir.Table:
    """Sets `held_out` of every event of a hashed share of the requests.

    An action that names no request is of the request whose impression it joins; which one that is,
    is decided as in `attribution`, but however late it comes.

    Args:
        engine: Keeps the result.
        events: Canonical events; without request ids, each is a request of its own.
        share: Of the requests.
    """
    if "request_id" not in events.columns:
        parts = [events[name].cast("string") for name in ("user_id", "timestamp", "item_id")]
        held_out = hashed_below(ibis.literal("|").join(parts), SALT, share)
    else:
        text = events.request_id.cast("string")
        held_out = hashed_below(text, SALT, share).fill_null(False)
    events = events.mutate(held_out=held_out)
    if "impression" in events.columns:
        events = _join_actions(events)
    return keep(engine, "held", events)


def _join_actions(events: ir.Table) -> ir.Table:
    numbered = number_impressions(events)
    line = numbered.mutate(
        after=(~numbered.impression).cast("int8"),
        # The number of an impression and whether it is held out, in one.
        mark=numbered.number * 2 + numbered.held_out.cast("int64"),
    )
    along = ibis.window(
        group_by=["user_id", "item_id"],
        order_by=["timestamp", "after", "number"],
        preceding=None,
        following=0,
    )
    line = line.mutate(latest=line.mark.max().over(along))
    joined = (line.latest % 2 == 1).fill_null(False)
    held_out = line.request_id.isnull().ifelse(joined, line.held_out)
    return line.mutate(held_out=held_out).select(events.columns)
