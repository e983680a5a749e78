"""Pretraining sequences: each user's positives in time order, cut to a bounded length."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir


def cut_sequences(positives: ir.Table, span: tuple[int, int], length: int) -> ir.Table:
    """Sequences of at least two items.

    A longer one is cut into pieces that share the item at the cut, so that each step from one
    item to the next is in exactly one piece.

    Args:
        positives: user_id, held_out, number (of the user's positives, in time order), timestamp
            and row.
        span: First microsecond of the window and of what follows it.
        length: Most items of a piece, at least 2.

    Returns:
        user_id, held_out, item_row, ordered by user and time.
    """
    inside = positives.filter(positives.timestamp >= span[0], positives.timestamp < span[1])
    place = ibis.row_number().over(group_by=inside.user_id, order_by=inside.number)
    placed = inside.select("user_id", "held_out", "row", place=place)
    piece = placed.place // (length - 1)
    starts = placed.mutate(piece=piece)
    # The first item of a piece is also the last one of the piece before.
    shared = starts.filter(starts.place % (length - 1) == 0, starts.place > 0)
    items = starts.union(shared.mutate(piece=shared.piece - 1))
    pieces = items.group_by(["user_id", "piece"]).aggregate(
        held_out=items.held_out.any(),
        item_row=items.row.collect(order_by=items.place),
    )
    pieces = pieces.filter(pieces.item_row.length() >= 2)
    return pieces.order_by(["user_id", "piece"]).drop("piece")
