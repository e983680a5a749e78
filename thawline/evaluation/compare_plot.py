"""A picture of a comparison: each figure's difference with its interval, slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from thawline.errors import ConfigError
from thawline.evaluation.report_verdict import judge

SUFFIXES = (".svg", ".png", ".html")
COLORS = {"better": "#1a7f37", "worse": "#b3261e", "undecided": "#6e7781"}
PANEL = (3.6, 0.3, 0.9)
"""Inches: width, height a line, height beside the lines."""


def write_plot(path: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """Draws B minus A: a line of panels a hold-out and action, a panel a figure.

    Args:
        path: Its suffix says the format, one of `SUFFIXES`; a page holds the picture as SVG.
        rows: By hold-out, as in `compare.comparison`.
        title: Above it.

    Raises:
        ConfigError: Another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"--plot {path} is no picture that can be written",
            f"name a file that ends in {', '.join(SUFFIXES)}",
        )
    figure = _draw(rows, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        if path.suffix == ".html":
            svg = path.with_suffix(".part.svg")
            figure.savefig(svg, metadata={"Date": None})
            drawn = svg.read_text(encoding="utf-8")
            svg.unlink()
            path.write_text(_page(drawn[drawn.index("<svg") :], title), encoding="utf-8")
        elif path.suffix == ".svg":
            figure.savefig(path, metadata={"Date": None})
        else:
            figure.savefig(path, dpi=150)


def _draw(rows: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Figure:
    lines = {(holdout, row["action"]): None for holdout, own in rows.items() for row in own}
    names = list(dict.fromkeys(row["figure"] for own in rows.values() for row in own))
    slices = list(dict.fromkeys(row["slice"] for own in rows.values() for row in own))
    width, line, beside = PANEL
    height = len(lines) * (beside + line * len(slices)) + 0.5
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context({**style, "text.parse_math": False}):
        figure = Figure(figsize=(width * len(names) + 0.6, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(lines), len(names), squeeze=False)
        for across, (holdout, action) in zip(panels, lines, strict=True):
            for axes, name in zip(across, names, strict=True):
                axes.axvline(0, color="#6e7781", linewidth=0.8)
                found = {
                    row["slice"]: row
                    for row in rows[holdout]
                    if (row["action"], row["figure"]) == (action, name)
                }
                for place, piece in enumerate(slices):
                    _mark(axes, len(slices) - 1 - place, found.get(piece))
                axes.set_yticks(range(len(slices)), slices[::-1])
                axes.set_ylim(-0.6, len(slices) - 0.4)
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
                axes.grid(axis="x", color="#d0d7de", linewidth=0.5)
                axes.set_axisbelow(True)
                axes.set_title(f"{holdout}: {action} {name}", fontsize=9, loc="left")
        figure.suptitle(title, fontsize=10)
        figure.supxlabel("B minus A, with 95 % intervals", fontsize=9)
    return figure


def _mark(axes: Any, place: int, row: Mapping[str, Any] | None) -> None:
    if row is None or row["difference"] is None:
        axes.annotate(
            "undefined", (0, place), xytext=(4, 0), textcoords="offset points", va="center",
            color=COLORS["undecided"], fontsize=8,
        )  # fmt: skip
        return
    color = COLORS[judge({**row, "challenger": row["b"], "champion": row["a"]})]
    if row["low"] is not None:
        axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=2)
    axes.plot(row["difference"], place, color=color, marker="o", markersize=5)


def _page(svg: str, title: str) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>"
        "<style>body{margin:1rem;font-family:sans-serif;background:#fff}svg{max-width:100%;"
        "height:auto}</style>"
        f"<figure>{svg}</figure></html>\n"
    )
