"""Dot plots of the report: a line a slice, its figure as a dot and its interval as a bar.

They are laid out here and drawn by the page itself, so that their texts keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thawline.evaluation import formatting

THIN = 50
"""A slice with fewer positives is drawn hollow and does not set the scale."""

LEAST_SPAN = 0.002
"""Of a scale, so that differences of rounding do not look like any."""

MARGIN = 0.04
"""Of the scale's span, on either side."""


@dataclass(frozen=True)
class Dot:
    """A line of a dot plot."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    kind: str = ""
    """The tier whose colour it has, or `good` or `bad`."""
    note: str = ""
    """Said beneath it."""
    hint: str = ""
    """Said where the pointer rests."""
    thin: bool = False
    """Too little data for its value to set the scale."""


@dataclass(frozen=True)
class Scale:
    """What a dot plot spans."""

    low: float
    high: float

    @classmethod
    def over(
        cls,
        dots: Sequence[Dot],
        reference: float | None,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Scale:
        """Holds every dot that is not thin, with its interval, and the reference."""
        chosen = [dot for dot in dots if not dot.thin] or list(dots)
        values = [reference, *(v for dot in chosen for v in (dot.value, dot.low, dot.high))]
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return cls(0.0, 1.0)
        low, high = min(known), max(known)
        short = max(0.0, LEAST_SPAN - (high - low))
        low, high = low - short / 2, high + short / 2
        step = _step(high - low)
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        return cls(max(low, bounds[0]), min(high, bounds[1]))

    def place(self, value: float) -> float:
        """Where a value stands, in per cent of the width; beyond the scale, at its end."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * (MARGIN + (1 - 2 * MARGIN) * min(max(share, 0.0), 1.0)), 2)


def dot_plot(
    dots: Sequence[Dot], reference: float | None, scale: Scale, *, signed: bool = False
) -> dict[str, Any]:
    """What the page draws.

    Args:
        dots: The lines, in order.
        reference: Where a line crosses all of them, such as the pooled figure or zero.
        scale: What the plot spans; several plots may share one.
        signed: The values are differences.
    """
    write = formatting.signed if signed else formatting.figure
    return {
        "reference": None if reference is None else scale.place(reference),
        "low": write(scale.low, _digits(scale)),
        "high": write(scale.high, _digits(scale)),
        "rows": [_row(dot, scale, signed) for dot in dots],
    }


def _row(dot: Dot, scale: Scale, signed: bool) -> dict[str, Any]:
    known = dot.value is not None and math.isfinite(dot.value)
    bounds = None
    if dot.low is not None and dot.high is not None:
        start, end = scale.place(dot.low), scale.place(dot.high)
        bounds = (start, round(end - start, 2))
    return {
        "name": dot.name,
        "kind": dot.kind,
        "note": dot.note,
        "hint": dot.hint,
        "thin": dot.thin,
        "at": scale.place(dot.value) if known and dot.value is not None else None,
        "bounds": bounds,
        "text": (formatting.signed if signed else formatting.figure)(dot.value),
    }


def _step(span: float) -> float:
    """A round step, of which four to ten make up the span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 10)


def _digits(scale: Scale) -> int:
    return max(1, -math.floor(math.log10(_step(scale.high - scale.low))))
