"""The timing law: which examples are written into a table and then seen again.

An example is *written* when a step on it updates the table's rows, and *replayed* when a later
epoch shows it again. What a row remembers of an example can flatter the loss only on its replay,
so this share is the most that memorised rows can touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from thawline.errors import ConfigError


def replayed_by_epoch(windows: Iterable[tuple[float, float]], epochs: int) -> list[float]:
    """Share of each epoch's examples that an earlier epoch wrote into the table.

    Every epoch shows every example once, in an order drawn anew. So in epoch e (from 0) an
    example comes at e + u, with u uniform on [0, 1) and independent of the other epochs'. The
    table trains then with probability

        c_e = length of (windows within [e, e + 1)),

    and none of the epochs before e writes the example with probability (1 - c_0) ... (1 - c_{e-1}):

        share_e = 1 - product over j < e of (1 - c_j),   share_0 = 0.

    Assumptions: a fresh shuffle each epoch (with the same order every time the draws of u would
    be one), every example once an epoch, and steps that are short beside an epoch, since a
    schedule rounds a window's ends to whole steps. Overlapping windows count once.

    Args:
        windows: (start, end) in epochs from the start of the run: the table trains from `start`
            up to, not including, `end`. Any number, in any order.
        epochs: Epochs of the run.

    Returns:
        `epochs` shares within [0, 1], never falling.

    Raises:
        ConfigError: No epoch, or a window that ends before it starts or lies outside the run.

    >>> replayed_by_epoch([(0.5, 1.5)], epochs=3)
    [0.0, 0.5, 0.75]
    """
    spans = _merge(windows, epochs)
    shares, unwritten = [], 1.0
    for epoch in range(epochs):
        shares.append(1.0 - unwritten)
        trained = sum(max(0.0, min(end, epoch + 1) - max(start, epoch)) for start, end in spans)
        # Pieces of an epoch may add up to a little more than 1.
        unwritten *= max(0.0, 1.0 - trained)
    return shares


def written_then_replayed(windows: Iterable[tuple[float, float]], epochs: int) -> float:
    """Fraction of examples that are written into the table and shown again afterwards.

    A write in any epoch but the last is followed by a replay, and a write in the last one never
    is, so this is the last epoch's share in `replayed_by_epoch`, with its assumptions. For a
    one-epoch window from s in a run of two epochs, only c_0 = 1 - s counts, and the fraction is

        1 - s,

    linear in the window's start and zero only where the window is the last epoch. This is the
    timing law of the multi-epoch reproduction (docs/theory.md), here for any list of windows.

    Args:
        windows: (start, end) in epochs, as in `replayed_by_epoch`.
        epochs: Epochs of the run.

    Raises:
        ConfigError: No epoch, or a window that ends before it starts or lies outside the run.

    >>> [written_then_replayed([(s, s + 1)], epochs=2) for s in (0, 0.25, 0.5, 0.75, 1)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return replayed_by_epoch(windows, epochs)[-1]


def _merge(windows: Iterable[tuple[float, float]], epochs: int) -> list[tuple[float, float]]:
    """The windows as disjoint spans in order."""
    if epochs < 1:
        raise ConfigError(f"a run of {epochs} epochs shows nothing", "give at least one epoch")
    merged: list[tuple[float, float]] = []
    for start, end in sorted(windows):
        where = f"window [{start:g}, {end:g})"
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ConfigError(f"{where} ends before it starts", "give start and end, in epochs")
        if start < 0 or end > epochs:
            raise ConfigError(
                f"{where} lies outside a run of {epochs} epochs", "move it, or add epochs"
            )
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
