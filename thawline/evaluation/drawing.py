"""How the report's plots are drawn: matplotlib figures as inline SVG in the page's own colours.

Every figure is drawn in placeholder colours, which become CSS variables (and the page's text
colour) in the SVG, so that one drawing serves light mode, dark mode and paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, LINE, PAPER, ACCENT = "#010101", "#010102", "#010103", "#010104", "#010105"
SLICES = {
    "pooled": INK,
    "head": "#010201",
    "torso": "#010202",
    "tail": "#010203",
    "cold": "#010204",
}
"""Colour of each slice; the page's `--head` and so on."""

WIDTH = 4.4
"""Inches, which the page stretches to its columns."""

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


@contextmanager
def drawing(height: float) -> Iterator[Figure]:
    """A figure of so many inches in the page's style, to be drawn on while the block runs."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def svg(figure: Figure, label: str) -> Markup:
    """The figure as an SVG element: no size of its own, no address, colours from the page.

    Args:
        figure: What was drawn; to be called within its `drawing`.
        label: What a reader who cannot see the plot is told.
    """
    with mpl.rc_context({"svg.hashsalt": label}):
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
