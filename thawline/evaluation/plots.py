"""Plots of scores and of the dataset: ROC, reliability, requests a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from thawline.evaluation.drawing import ACCENT, MUTED, drawing, svg


def roc(
    curve: Mapping[str, Sequence[float]],
    value: float | None,
    oracle_curve: Mapping[str, Sequence[float]] | None,
    oracle_value: float | None,
    label: str,
) -> Markup:
    """ROC of the model, and the oracle's where known, with their AUCs."""
    with drawing(3.6) as figure:
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
        return svg(figure, label)


def reliability(bins: Sequence[Mapping[str, float]], label: str) -> Markup:
    """Observed against predicted rates, with 95 % Wilson intervals."""
    predicted = np.array([item["predicted"] for item in bins], float)
    observed = np.array([item["observed"] for item in bins], float)
    count = np.array([item["candidates"] for item in bins], float)
    z = 1.96
    center = (observed + z**2 / (2 * count)) / (1 + z**2 / count)
    half = np.sqrt(observed * (1 - observed) / count + (z / (2 * count)) ** 2)
    half *= z / (1 + z**2 / count)
    with drawing(3.6) as figure:
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
        return svg(figure, label)


def requests_by_day(counts: Mapping[str, int], test: Sequence[str]) -> Markup:
    """Requests of each day; the days of the test window in the accent colour."""
    days = sorted(counts)
    colors = [ACCENT if day in test else MUTED for day in days]
    with drawing(1.9) as figure:
        axes = figure.subplots()
        axes.bar(range(len(days)), [counts[day] for day in days], color=colors, width=0.72)
        step = max(1, -(-len(days) // 6))
        shown = list(range(len(days) - 1, -1, -step))[::-1]
        axes.set_xticks(shown, [days[index][5:] for index in shown])
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(axis="x", visible=False)
        axes.spines["left"].set_visible(False)
        return svg(figure, "Requests of each day")


def _figure(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
