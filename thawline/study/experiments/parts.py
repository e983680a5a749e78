"""What the pages of experiments are made of: tables, dot plots and lines in the report's style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from thawline.evaluation import formatting
from thawline.evaluation.dots import Dot, Scale, dot_plot
from thawline.evaluation.drawing import INK, MUTED, SLICES, drawing, svg
from thawline.evaluation.epoch_plots import label_ends, with_gaps
from thawline.study.experiments.reading import Reading
from thawline.study.statistics import Paired

LEAST_PAIRS = 3
"""Fewer make an interval that says nothing and hides the rest of a plot."""
_COLORS = (INK, *(SLICES[name] for name in ("head", "tail", "torso", "cold")), MUTED)
_DASHES = ("-", (0, (5, 2)))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Markup:
    """A table of texts, of which the first of each row names it."""
    lines = ['<div class="scroll below"><table>']
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines.append(f"<thead><tr>{heads}</tr></thead><tbody>")
    for name, *cells in rows:
        texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{texts}</tr>')
    lines.append("</tbody></table></div>")
    # Safe: every text is escaped above.
    return Markup("\n".join(lines))  # noqa: S704


def figure(name: str, drawn: Markup, caption: str = "") -> Markup:
    """A drawing with its name, and a word on it."""
    below = Markup("<figcaption>{}</figcaption>").format(caption) if caption else ""
    return Markup('<figure><p class="name">{}</p>{}{}</figure>').format(name, drawn, below)


def beside(*drawn: Markup) -> Markup:
    """Drawings beside each other, where there is room."""
    return Markup('<div class="grid">{}</div>').format(Markup("\n").join(drawn))


def dots(lines: Mapping[str, Paired | None], title: str = "") -> Markup:
    """Differences about a line of none, with their intervals."""
    plotted = [
        Dot(
            name,
            found.mean,
            found.low if found.n >= LEAST_PAIRS else None,
            found.high if found.n >= LEAST_PAIRS else None,
        )
        for name, found in lines.items()
        if found is not None
    ]
    if not plotted:
        return Markup()
    plot = dot_plot(plotted, 0.0, Scale.over(plotted, 0.0), signed=True)
    heading = Markup("<h4>{}</h4>").format(title) if title else Markup()
    # Safe: the macro escapes its texts.
    return Markup("<div>{}{}</div>").format(heading, Markup(_macros().dots(plot)))  # noqa: S704


def lines_by_epoch(series: Mapping[str, Sequence[float | None]], label: str, y: str) -> Markup:
    """A line an arm over the epochs that it has trained.

    Args:
        series: By arm, one value an epoch; None leaves a gap.
        label: What a reader who cannot see the plot is told.
        y: What is drawn.
    """
    longest = max((len(values) for values in series.values()), default=0)
    with drawing(3.0) as drawn:
        axes = drawn.subplots()
        ends = []
        for place, (name, values) in enumerate(series.items()):
            heights = with_gaps(values)
            known = np.flatnonzero(~np.isnan(heights))
            if not len(known):
                continue
            color, dashes = _look(place)
            axes.plot(
                np.arange(1, len(heights) + 1),
                heights,
                color=color,
                linestyle=dashes,
                marker="o",
                clip_on=False,
            )
            ends.append((float(heights[known[-1]]), name, color))
        axes.set_xlim(0.8, max(longest, 1) + 0.05)
        finish(axes, "epochs trained", y)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
        label_ends(axes, max(longest, 1), ends)
        return svg(drawn, label)


def finish(axes: Axes, x: str, y: str) -> None:
    """The axes in the report's style, with what they show."""
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(y=0.08)
    axes.grid(axis="x", visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def by_slice(
    one: Reading, pairs: Mapping[str, tuple[str, str]], *, digits: int = 4
) -> list[list[str]]:
    """Rows of a table: a slice, and in it the mean difference and its sd of each pair of arms.

    Args:
        one: What is read.
        pairs: By column, an arm and the one to take from it.
        digits: Of the figures.
    """
    return [
        [
            piece,
            *(
                mean_sd(one.difference(first, second, piece), digits)
                for first, second in pairs.values()
            ),
        ]
        for piece in one.slices
    ]


def mean_sd(found: Paired | None, digits: int = 4) -> str:
    """`+0.0012 ± 0.0004`: a mean difference, and the standard deviation over its pairs."""
    if found is None:
        return formatting.DASH
    text = formatting.signed(found.mean, digits)
    if found.sd is None:
        return text
    return f"{text} \N{PLUS-MINUS SIGN} {formatting.figure(found.sd, digits)}"


def drift(one: Reading, arm: str, tier: str) -> str:
    """How far an arm's item rows of a tier went, in norms of their first values."""
    return formatting.figure(one.drift(arm, tier), 2)


def _look(place: int) -> tuple[str, Any]:
    """Colour and dashes of the line at a place, none of which come twice in twelve."""
    turn, which = divmod(place, len(_COLORS))
    return _COLORS[which], _DASHES[turn % len(_DASHES)]


@cache
def _macros() -> Any:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.PackageLoader("thawline", "evaluation"),
    )
    environment.filters["figure"] = formatting.figure
    return environment.get_template("report.macros.j2").module
