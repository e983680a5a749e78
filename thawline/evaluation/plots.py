"""Plots of the report: matplotlib figures as inline SVG that takes its colours from the page.

Every figure is drawn in placeholder colours, which become CSS variables (and the page's text
colour) in the SVG, so that one drawing serves light mode, dark mode and paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, MUTED, LINE, PAPER, ACCENT = "#010101", "#010102", "#010103", "#010104", "#010105"
SLICES = {
    "pooled": INK,
    "head": "#010201",
    "torso": "#010202",
    "tail": "#010203",
    "cold": "#010204",
}
"""Colour of each slice; the page's `--head` and so on."""

BAR = 0.72
"""Height of a timeline's highest bar; its lines are 1 apart."""

MARKERS = {"pooled": "o", "head": "o", "torso": "s", "tail": "^", "cold": "D"}

_CSS = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    ACCENT: "var(--accent)",
    **{color: f"var(--{name})" for name, color in SLICES.items() if name != "pooled"},
}

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "xtick.major.pad": 5,
    "ytick.major.pad": 5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class Track:
    """A line of a timeline."""

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
) -> Markup:
    """AUC of each slice after so many epochs, on a ground that is shaded where the table trains.

    Args:
        series: By slice (`pooled` and the tiers), one AUC an epoch; None leaves a gap.
        epochs: Number of each epoch, from 1.
        windows: Spans in epochs, from 0, in which the item table trains.
        label: What a reader who cannot see the plot is told.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.subplots()
        for start, end in windows:
            axes.axvspan(start, end, color=ACCENT, alpha=0.1, linewidth=0)
        ends: list[tuple[float, str]] = []
        for name, values in reversed(list(series.items())):
            y = np.array([np.nan if value is None else value for value in values], float)
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
                ends.append((float(y[-1]), name))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
        axes.margins(y=0.08)
        axes.set_xlim(epochs[0] - (1 if windows else 0.5), epochs[-1])
        axes.set_xlabel("epochs trained")
        axes.set_ylabel("AUC")
        axes.grid(axis="x", visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_visible(False)
        _label_ends(axes, epochs[-1], ends)
        return _svg(figure, label)


def timeline(tracks: Sequence[Track], epochs: int, label: str) -> Markup:
    """When each of several components trains: bars as high as its learning rate."""
    colors = {"table": ACCENT, "network": MUTED, **SLICES}
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 0.5 + 0.24 * len(tracks)), layout="constrained")
        axes = figure.subplots()
        for place, track in enumerate(tracks):
            floor = len(tracks) - 1 - place
            axes.plot([0, epochs], [floor, floor], color=LINE, linewidth=0.8)
            for span in track.spans:
                at, rate = zip(*span, strict=True)
                axes.fill_between(
                    at,
                    floor,
                    floor + BAR * np.array(rate),
                    color=colors[track.kind],
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
        names = [track.name for track in reversed(tracks)]
        axes.set_yticks(
            [floor + BAR / 2 for floor in range(len(tracks))],
            [name if len(name) <= 22 else f"{name[:21]}\N{HORIZONTAL ELLIPSIS}" for name in names],
        )
        shown = range(0, epochs, max(1, -(-epochs // 10)))
        axes.set_xticks([epoch + 0.5 for epoch in shown], [str(epoch + 1) for epoch in shown])
        axes.set_xlim(0, epochs)
        axes.set_ylim(-0.15, len(tracks))
        axes.set_xlabel("epoch")
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return _svg(figure, label)


def roc(
    curve: Mapping[str, Sequence[float]],
    value: float | None,
    oracle_curve: Mapping[str, Sequence[float]] | None,
    oracle_value: float | None,
    label: str,
) -> Markup:
    """ROC of the model, and the oracle's where known, with their AUCs."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        if oracle_curve is not None:
            axes.plot(
                oracle_curve["fpr"],
                oracle_curve["tpr"],
                color=MUTED,
                linewidth=1.4,
                linestyle=(0, (5, 2)),
                label=f"oracle {_figure(oracle_value)}",
            )
        axes.plot(curve["fpr"], curve["tpr"], color=ACCENT, label=f"model {_figure(value)}")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="lower right", frameon=False)
        return _svg(figure, label)


def reliability(bins: Sequence[Mapping[str, float]], label: str) -> Markup:
    """Observed against predicted rates, with 95 % Wilson intervals."""
    predicted = np.array([item["predicted"] for item in bins], float)
    observed = np.array([item["observed"] for item in bins], float)
    count = np.array([item["candidates"] for item in bins], float)
    z = 1.96
    center = (observed + z**2 / (2 * count)) / (1 + z**2 / count)
    half = np.sqrt(observed * (1 - observed) / count + (z / (2 * count)) ** 2)
    half *= z / (1 + z**2 / count)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 3.6), layout="constrained")
        axes = figure.subplots()
        top = min(1.0, 1.06 * float(max(predicted.max(), (center + half).max())))
        axes.plot([0, top], [0, top], color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        axes.vlines(predicted, center - half, center + half, color=ACCENT, linewidth=1, alpha=0.5)
        axes.plot(predicted, observed, color=ACCENT, marker="o", markersize=4)
        axes.set_xlim(0, top)
        axes.set_ylim(0, top)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("observed share")
        return _svg(figure, label)


def requests_by_day(counts: Mapping[str, int], test: Sequence[str]) -> Markup:
    """Requests of each day; the days of the test window in the accent colour."""
    days = sorted(counts)
    colors = [ACCENT if day in test else MUTED for day in days]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 1.9), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(days)), [counts[day] for day in days], color=colors, width=0.72)
        step = max(1, -(-len(days) // 6))
        shown = list(range(len(days) - 1, -1, -step))[::-1]
        axes.set_xticks(shown, [days[index][5:] for index in shown])
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="x", visible=False)
        axes.spines["left"].set_visible(False)
        return _svg(figure, "Requests of each day")


def _label_ends(axes: Axes, last: int, ends: list[tuple[float, str]]) -> None:
    """Names the lines at their right ends, pushed apart where they would overlap."""
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = 0.075 * (high - low)
    ends.sort()
    places = [value for value, _ in ends]
    for _ in range(50):
        for index in range(1, len(places)):
            overlap = gap - (places[index] - places[index - 1])
            if overlap > 1e-9:
                places[index - 1] -= overlap / 2
                places[index] += overlap / 2
    for place, (_, name) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            (last, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=SLICES[name],
            fontsize=8.5,
            fontweight="bold" if name == "pooled" else "normal",
            annotation_clip=False,
        )


def _figure(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _svg(figure: Figure, label: str) -> Markup:
    """The figure as an SVG element: no size of its own, no address, colours from the page."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": label}):
        buffer = io.StringIO()
        FigureCanvasSVG(figure)
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.S)
    text = text.replace("xlink:href=", "href=")
    view_box = re.search(r'viewBox="[^"]*"', text)
    opening = (
        f'<svg class="plot" role="img" aria-label="{escape(label)}" '
        f"{view_box.group() if view_box else ''}>"
    )
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    for color, css in _CSS.items():
        text = text.replace(color, css)
    # Safe: matplotlib escapes its texts, and the label is escaped above.
    return Markup(text)  # noqa: S704
