"""Pretraining sequences: each user's positives in time order, cut to a bounded length."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir


def cut_sequences(
    positives: ir.Table, span: tuple[int, int], length: int, *, by_request: bool = False
) -> ir.Table:
    """Sequences of at least two items.

    A longer one is cut into pieces that share the item at the cut, so that each step from one
    item to the next is in exactly one piece.

    Args:
        positives: user_id, held_out, number (of the user's positives, in time order), timestamp
            and row.
        span: First microsecond of the window and of what follows it.
        length: Most items of a piece, at least 2.
        by_request: Whether some of a user's positives may be held out and others not. Sequences
            that are not held out then leave these out; those that are end with one of them.

    Returns:
        user_id, held_out, item_row, ordered by user and time.
    """
    inside = positives.filter(positives.timestamp >= span[0], positives.timestamp < span[1])
    if not by_request:
        items = _place(inside, length)
        pieces = _collect(items, items.held_out.any())
        return pieces.order_by(["user_id", "piece"]).drop("piece")
    trained = _collect(_place(inside.filter(~inside.held_out), length), ibis.literal(False))
    items = _place(inside, length)
    place = items.held_out.ifelse(items.place, ibis.null("int64"))
    items = items.mutate(last=place.max().over(group_by=["user_id", "piece"]))
    held_out = _collect(items.filter(items.place <= items["last"]), ibis.literal(True))
    pieces = trained.union(held_out)
    return pieces.order_by(["user_id", "held_out", "piece"]).drop("piece")


def _place(positives: ir.Table, length: int) -> ir.Table:
    """Each positive with its piece; the first of a piece is also the last of the one before."""
    place = ibis.row_number().over(group_by=positives.user_id, order_by=positives.number)
    placed = positives.select("user_id", "held_out", "row", place=place.cast("int64"))
    starts = placed.mutate(piece=placed.place // (length - 1))
    shared = starts.filter(starts.place % (length - 1) == 0, starts.place > 0)
    return starts.union(shared.mutate(piece=shared.piece - 1))


def _collect(items: ir.Table, held_out: ir.BooleanScalar) -> ir.Table:
    pieces = items.group_by(["user_id", "piece"]).aggregate(
        held_out=held_out, item_row=items.row.collect(order_by=items.place)
    )
    return pieces.filter(pieces.item_row.length() >= 2)
