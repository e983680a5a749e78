"""Requests: the candidates with their labels, the context, and the history before them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import ibis
import ibis.expr.types as ir
from ibis.backends.duckdb import Backend

from thawline.data.attribution import attribute, number_impressions
from thawline.data.engine import HOUR_US, hash63, keep
from thawline.data.events import is_positive

CONTEXT = ("ctx_", "id_")
"""How the names of columns begin that are the request's; its `weight` is another one."""


def number_positives(engine: Backend, events: ir.Table, actions: list[str]) -> ir.Table:
    """Numbers each user's positives in time order, from 0.

    Args:
        engine: Keeps the result.
        events: Canonical events with their `row`.
        actions: Bit `a` of the result's `action` is `actions[a]`.

    Returns:
        user_id, held_out, timestamp, row, action, number.
    """
    bits = [events[name].cast("int8") * (1 << bit) for bit, name in enumerate(actions)]
    table = events.mutate(action=reduce(lambda one, other: one + other, bits).cast("int8"))
    table = table.filter(table.action > 0)
    ties = [name for name in ("request_id", "position", "row", "item_id") if name in table.columns]
    number = ibis.row_number().over(group_by="user_id", order_by=["timestamp", *ties])
    columns = ["user_id", "held_out", "timestamp", "row", "action"]
    return keep(engine, "positives", table.select(*columns, number=number.cast("int64")))


def single_requests(
    engine: Backend, events: ir.Table, span: tuple[int, int], actions: list[str]
) -> ir.Table:
    """One request a positive, of a log without impressions; its item is the only candidate.

    Args:
        engine: Keeps the result.
        events: Canonical events with their `row`.
        span: First microsecond of the span of the requests and of what follows it.
        actions: Names of the boolean columns.

    Returns:
        request_id (hashed from user, time and item), user_id, timestamp, held_out, candidate_row,
        label_<action>, and the events' ctx_<name>, id_<column> and weight.
    """
    found = events.filter(
        is_positive(events, actions), events.timestamp >= span[0], events.timestamp < span[1]
    )
    text = ibis.literal("|").join(
        [found[name].cast("string") for name in ("user_id", "timestamp", "item_id")]
    )
    labels = {
        f"label_{name}": ibis.array([found[name].cast("int8")]).cast("array<int8>")
        for name in actions
    }
    context = _of_requests(found)
    return keep(
        engine,
        "requests",
        found.select(
            "user_id",
            "timestamp",
            "held_out",
            *context,
            request_id=hash63(text),
            candidate_row=ibis.array([found.row]),
            **labels,
        ),
    )


def grouped_requests(
    engine: Backend,
    events: ir.Table,
    span: tuple[int, int],
    actions: list[str],
    *,
    with_truth: bool,
    ends: Sequence[int] = (),
    attribution_hours: float = 0.0,
) -> ir.Table:
    """Groups impressions that share a request id into requests that start within a span.

    A request's time is that of its first event, its user, context and weight are those of its first
    impression; candidates are in order of position. Of what comes after the end of the window in
    which a request starts, nothing is in it: no impression, and no action as a label.

    Args:
        engine: Keeps the result.
        events: Canonical events with their `row` and, if known, `oracle_<action>`.
        span: First microsecond of the span and of what follows it.
        actions: Names of the boolean columns.
        with_truth: Whether the events hold `oracle_<action>`.
        ends: First microsecond after each window, in order. Empty: the span is one window.
        attribution_hours: How long after its impression an action still counts, where the events
            have the column `impression`.

    Returns:
        As `single_requests`, with oracle_<action> beside.
    """
    # An action that names a request counts: it may have come first if a clock went back.
    known = events.filter(events.request_id.notnull())
    starts = known.group_by("request_id").aggregate(start=known.timestamp.min())
    starts = starts.filter(starts.start >= span[0], starts.start < span[1])
    ends = list(ends) or [span[1]]
    stop = ibis.cases(*((starts.start < end, end) for end in ends), else_=ends[-1])
    starts = starts.mutate(stop=stop.cast("int64"))
    delayed = "impression" in events.columns
    if delayed:
        events = number_impressions(events.filter(events.timestamp >= span[0]))
        inside = events.filter(events.impression).join(starts, "request_id")
    else:
        inside = events.join(starts, "request_id")
    inside = inside.filter(inside.timestamp < inside.stop)
    if delayed:
        inside = attribute(events, inside, actions, attribution_hours)
    order = [inside.timestamp, inside.row, inside.item_id]
    if "position" in inside.columns:
        order = [inside.position.asc(nulls_first=False), *order]
    first = [inside.timestamp, *order]
    lists = {"candidate_row": inside.row}
    lists |= {f"label_{name}": inside[name].cast("int8") for name in actions}
    if with_truth:
        lists |= {f"oracle_{name}": inside[f"oracle_{name}"] for name in actions}
    context = _of_requests(inside)
    return keep(
        engine,
        "requests",
        inside.group_by("request_id").aggregate(
            user_id=inside.user_id.min(),
            timestamp=inside.start.min(),
            held_out=inside.held_out.any(),
            **{
                name: column.collect(order_by=order, include_null=True)
                for name, column in lists.items()
            },
            **{name: inside[name].first(order_by=first, include_null=True) for name in context},
        ),
    )


def _of_requests(events: ir.Table) -> list[str]:
    return [name for name in events.columns if name.startswith(CONTEXT) or name == "weight"]


def count_earlier(engine: Backend, requests: ir.Table, positives: ir.Table) -> ir.Table:
    """Counts the user's positives strictly before each request.

    Requests and positives are put in one line a user, requests before positives of the same time,
    and the positives counted along it: one sort, however many ties there are.

    Returns:
        request_id, earlier.
    """
    one, none = ibis.literal(1, "int64"), ibis.literal(0, "int64")
    line = requests.select("user_id", "timestamp", "request_id", weight=none).union(
        positives.select("user_id", "timestamp", request_id=none, weight=one)
    )
    along = ibis.window(
        group_by="user_id", order_by=["timestamp", "weight"], preceding=None, following=0
    )
    line = line.mutate(earlier=line.weight.sum().over(along))
    line = line.filter(line.weight == 0)
    return keep(engine, "earlier", line.select("request_id", earlier=line.earlier.cast("int64")))


def make_blocks(engine: Backend, positives: ir.Table, length: int) -> ir.Table:
    """Puts each user's positives into blocks of `length`, in time order, with the block before.

    Any `length` positives in a row lie in two neighbouring blocks, so a request reads one line
    however long its user's log is.

    Returns:
        user_id, block, rows, actions, times (lists): positives `(block - 1) * length` (from 0 on)
        up to `(block + 1) * length`.
    """
    keyed = positives.mutate(block=(positives.number // length).cast("int64"))
    event = ibis.struct(
        {
            "number": keyed.number,
            "row": keyed.row,
            "action": keyed.action,
            "time": keyed.timestamp,
        }
    )
    blocks = keyed.group_by(["user_id", "block"]).aggregate(events=event.collect())
    # Sorting the lists, by their first field, takes half the time of an ordered collection.
    events = blocks.events.sort()
    blocks = blocks.select(
        "user_id",
        "block",
        rows=events.map(lambda event: event.row),
        actions=events.map(lambda event: event.action),
        times=events.map(lambda event: event.time),
    )
    along = ibis.window(group_by="user_id", order_by="block")

    def with_before(name: str) -> ir.ArrayValue:
        lists = blocks[name]
        before = lists.lag().over(along).fill_null(ibis.literal([], lists.type()))
        return before.concat(lists)

    blocks = blocks.mutate(**{name: with_before(name) for name in ("rows", "actions", "times")})
    return keep(engine, "blocks", blocks)


def with_histories(requests: ir.Table, blocks: ir.Table, length: int) -> ir.Table:
    """Adds the last `length` positives before each request.

    Args:
        requests: With their `earlier` (`count_earlier`).
        blocks: `make_blocks` of their users' positives.
        length: That of the blocks.

    Returns:
        The requests with history_row, history_action and history_age (hours), oldest first.
    """
    last = requests.earlier - 1
    counted = requests.mutate(block=ibis.ifelse(requests.earlier > 0, last // length, -1))
    blocks = blocks.rename(block_user="user_id", number="block")
    joined = counted.left_join(
        blocks, [counted.user_id == blocks.block_user, counted.block == blocks.number]
    )
    first = ibis.greatest(joined.block - 1, 0) * length
    stop = joined.earlier - first
    start = ibis.greatest(stop - length, 0)

    def last_of(name: str) -> ir.ArrayValue:
        return joined[name].fill_null(ibis.literal([], joined[name].type()))[start:stop]

    joined = joined.mutate(
        history_row=last_of("rows"), history_action=last_of("actions"), times=last_of("times")
    )
    now = joined.timestamp
    return joined.mutate(
        history_age=joined.times.map(lambda time: ((now - time) / HOUR_US).cast("float32"))
    )
