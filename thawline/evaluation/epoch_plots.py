"""Plots over a run's epochs, with the schedule beneath: AUC, losses, when what trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from thawline.evaluation.drawing import ACCENT, INK, LINE, MUTED, PAPER, SLICES, drawing, svg

BAR = 0.72
"""Height of a schedule's highest bar; its lines are 1 apart."""

LINE_INCHES = 0.22
"""Height of a schedule's line."""

NAME_LENGTH = 22
"""Longer names are cut."""

MARKERS = {"pooled": "o", "head": "o", "torso": "s", "tail": "^", "cold": "D"}
_KINDS = {"table": ACCENT, "network": MUTED, **SLICES}


@dataclass(frozen=True)
class Track:
    """A line of a schedule."""

    name: str
    kind: str
    """`table`, `network`, or the tier whose colour it has."""
    spans: Sequence[Sequence[tuple[float, float]]]
    """Where it trains: for each span its learning rate, 0 to 1, at points in epochs from 0."""
    renewals: Sequence[float]
    """When its rows are set to others."""


def auc_by_epoch(
    series: Mapping[str, Sequence[float | None]],
    epochs: Sequence[int],
    windows: Sequence[tuple[float, float]],
    label: str,
    tracks: Sequence[Track] = (),
) -> Markup:
    """AUC of each slice after so many epochs, on a ground that is shaded where the table trains.

    Args:
        series: By slice (`pooled` and the tiers), one AUC an epoch; None leaves a gap.
        epochs: Number of each epoch, from 1.
        windows: Spans in epochs, from 0, in which the item table trains.
        label: What a reader who cannot see the plot is told.
        tracks: The schedule to draw beneath.
    """
    with drawing(2.9 + LINE_INCHES * len(tracks)) as figure:
        axes, beneath = _panels(figure, tracks)
        for start, end in windows:
            axes.axvspan(start, end, color=ACCENT, alpha=0.1, linewidth=0)
        ends: list[tuple[float, str, str]] = []
        for name, values in reversed(list(series.items())):
            y = with_gaps(values)
            if np.isnan(y).all():
                continue
            axes.plot(
                epochs,
                y,
                color=SLICES[name],
                marker=MARKERS[name],
                linewidth=2.2 if name == "pooled" else 1.4,
                clip_on=False,
            )
            if not np.isnan(y[-1]):
                ends.append((float(y[-1]), name, SLICES[name]))
        from_start = bool(windows) or beneath is not None
        axes.set_xlim(epochs[0] - (1 if from_start else 0.5), epochs[-1])
        axes.set_ylabel("AUC")
        _finish(axes, beneath, tracks, epochs[-1], ends)
        return svg(figure, label)


def losses_by_epoch(
    trained: Sequence[Sequence[float | None]],
    tested: Mapping[str, Sequence[float | None]],
    windows: Sequence[tuple[float, float]],
    label: str,
    tracks: Sequence[Track] = (),
) -> Markup:
    """The training loss within each epoch, and the test losses after it.

    Args:
        trained: Mean training loss of each equal part of each epoch, in order; None leaves it out.
        tested: By hold-out, its loss after each epoch; None leaves a gap.
        windows: Spans in epochs, from 0, in which the item table trains.
        label: What a reader who cannot see the plot is told.
        tracks: The schedule to draw beneath.
    """
    epochs = len(trained)
    styles = ((ACCENT, "o", "-"), (MUTED, "s", (0, (5, 2))))
    with drawing(2.6 + LINE_INCHES * len(tracks)) as figure:
        axes, beneath = _panels(figure, tracks)
        for start, end in windows:
            axes.axvspan(start, end, color=ACCENT, alpha=0.1, linewidth=0)
        ends: list[tuple[float, str, str]] = []
        for epoch, parts in enumerate(trained):
            y = with_gaps(parts)
            known = ~np.isnan(y)
            if known.sum() > 1:
                x = epoch + (np.arange(len(y)) + 0.5) / len(y)
                axes.plot(x[known], y[known], color=INK, linewidth=2.2)
            elif known.any():
                axes.hlines(y[known], epoch, epoch + 1, color=INK, linewidth=2.2)
            if known.any() and epoch == epochs - 1:
                ends.append((float(y[known][-1]), "training", INK))
        for (name, values), (color, marker, dashes) in zip(
            tested.items(), styles * len(tested), strict=False
        ):
            y = with_gaps(values)
            axes.plot(
                range(1, epochs + 1), y, color=color, marker=marker, linestyle=dashes, clip_on=False
            )
            if not np.isnan(y[-1]):
                ends.append((float(y[-1]), name, color))
        axes.set_xlim(0, epochs)
        axes.set_ylabel("log loss")
        _finish(axes, beneath, tracks, epochs, ends)
        return svg(figure, label)


def timeline(tracks: Sequence[Track], epochs: int, label: str) -> Markup:
    """When each of several components trains: bars as high as its learning rate."""
    with drawing(0.5 + LINE_INCHES * len(tracks)) as figure:
        axes = figure.subplots()
        _draw_tracks(axes, tracks, epochs)
        return svg(figure, label)


def _panels(figure: Figure, tracks: Sequence[Track]) -> tuple[Axes, Axes | None]:
    """The place for curves, and that for a schedule beneath it, if there is one."""
    if not tracks:
        return figure.subplots(), None
    figure.set_layout_engine("constrained", h_pad=0.01, hspace=0.0)
    heights = (2.4, 0.12 + LINE_INCHES * len(tracks))
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    return upper, lower


def _finish(
    axes: Axes,
    beneath: Axes | None,
    tracks: Sequence[Track],
    last: int,
    ends: list[tuple[float, str, str]],
) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(y=0.08)
    axes.grid(axis="x", visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    label_ends(axes, last, ends)
    lowest = axes
    if beneath is not None:
        _draw_tracks(beneath, tracks, last)
        beneath.set_xlim(axes.get_xlim())
        axes.tick_params(axis="x", labelbottom=False)
        lowest = beneath
    lowest.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    lowest.xaxis.set_major_formatter(ScalarFormatter())
    lowest.set_xlabel("epochs trained")


def _draw_tracks(axes: Axes, tracks: Sequence[Track], epochs: int) -> None:
    for place, track in enumerate(tracks):
        floor = len(tracks) - 1 - place
        axes.plot([0, epochs], [floor, floor], color=LINE, linewidth=0.8)
        for span in track.spans:
            at, rate = zip(*span, strict=True)
            axes.fill_between(
                at,
                floor,
                floor + BAR * np.array(rate),
                color=_KINDS[track.kind],
                alpha=0.85,
                linewidth=0,
            )
        axes.vlines(track.renewals, floor, floor + BAR, color=PAPER, linewidth=1.6)
        axes.plot(
            track.renewals,
            [floor + BAR + 0.08] * len(track.renewals),
            color=INK,
            marker="v",
            markersize=4.5,
            linestyle="none",
        )
    for epoch in range(epochs + 1):
        axes.axvline(epoch, color=LINE, linewidth=0.6, zorder=0)
    axes.set_yticks(
        [floor + BAR / 2 for floor in range(len(tracks))],
        [_cut(track.name) for track in reversed(tracks)],
    )
    shown = range(0, epochs, max(1, -(-epochs // 10)))
    axes.set_xticks([epoch + 0.5 for epoch in shown], [str(epoch + 1) for epoch in shown])
    axes.set_xlim(0, epochs)
    axes.set_ylim(-0.15, len(tracks))
    axes.set_xlabel("epoch")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cut(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def with_gaps(values: Sequence[float | None]) -> np.ndarray:
    """Values to draw, with NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], float)


def label_ends(axes: Axes, last: float, ends: list[tuple[float, str, str]]) -> None:
    """Names lines at their right ends, pushed apart where they would overlap.

    Args:
        axes: Where they are drawn, with the limits that they will have.
        last: The x of the ends.
        ends: Of each line its last y, its name and its colour.
    """
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = 0.075 * (high - low)
    ends.sort()
    places = [value for value, _, _ in ends]
    for _ in range(50):
        for index in range(1, len(places)):
            overlap = gap - (places[index] - places[index - 1])
            if overlap > 1e-9:
                places[index - 1] -= overlap / 2
                places[index] += overlap / 2
    for place, (_, name, color) in zip(places, ends, strict=True):
        axes.annotate(
            _cut(name),
            (last, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=8.5,
            fontweight="bold" if color == INK else "normal",
            annotation_clip=False,
        )
