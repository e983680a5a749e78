"""Timing: a one-epoch window in which the tables train, slid through a run of two epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from thawline.config import Config
from thawline.evaluation import formatting
from thawline.evaluation.drawing import ACCENT, INK, MUTED, SLICES, drawing, svg
from thawline.evaluation.epoch_plots import label_ends
from thawline.study.comparison import words
from thawline.study.experiments import parts
from thawline.study.experiments.base import (
    Experiment,
    Section,
    arms_of,
    changed,
    recipes_reach_tables,
)
from thawline.study.experiments.reading import BySeed, Reading, each, mean, pairs, said
from thawline.theory.timing import written_then_replayed

STARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the window starts, in epochs."""
EPOCHS = 2
SLOPE = "slope per epoch of delay"

_SAME = {0.0: "train-first", 1.0: "freeze-until-last"}
"""Recipes that are the same in two epochs; other experiments have run them under these names."""


def arm_name(start: float) -> str:
    """Of the arm whose window starts there."""
    return f"window({start:g}, 1)"


def slope_weights() -> dict[str, float]:
    """Weights of the arms whose sum is the least-squares slope of a figure over the starts."""
    mean = sum(STARTS) / len(STARTS)
    spread = sum((start - mean) ** 2 for start in STARTS)
    weights = {arm_name(start): (start - mean) / spread for start in STARTS}
    return {name: weight for name, weight in weights.items() if weight}


def _lay_out(config: Config) -> Config:
    return arms_of(
        changed(config, {"finetune.epochs": EPOCHS}),
        {
            arm_name(start): {"finetune.recipe": _SAME.get(start, arm_name(start))}
            for start in STARTS
        },
        baseline=arm_name(0.0),
        contrasts={SLOPE: slope_weights()},
    )


@dataclass(frozen=True)
class Fit:
    """A straight line by least squares."""

    slope: float
    intercept: float
    r_squared: float | None
    """Share of the variance that the line explains; None where there is none."""

    @classmethod
    def of(cls, starts: Sequence[float], values: Sequence[float]) -> Fit:
        """Through points, of which two at least differ in their start."""
        slope, intercept = np.polyfit(starts, values, 1)
        left = np.array(values) - (slope * np.array(starts) + intercept)
        total = float(((np.array(values) - np.mean(values)) ** 2).sum())
        explained = 1 - float((left**2).sum()) / total if total > 0 else None
        return cls(float(slope), float(intercept), explained)


def _sections(one: Reading) -> list[Section]:
    slopes = {piece: one.sum_of(slope_weights(), piece) for piece in one.slices}
    fits = {piece: _fit(one, piece) for piece in one.slices}
    fit = fits.get("pooled")
    if fit is None:
        return [Section("The trend", ("No seed has finished with every start yet.",))]
    way = "rises" if fit.slope > 0 else "falls"
    unit = f"{one.facts['action']} {one.figure} on {one.facts['holdout']}"
    told = [
        f"{unit} {way} with the start; per epoch of delay "
        f"{said(pairs(slopes['pooled']), one.facts['metric'], contrast=True)}. "
        f"A straight line explains {_percent(fit.r_squared)} of the variance of the five means.",
        "By the timing law the share of examples that are written into the rows and seen again "
        "falls from 1 to 0 over the same starts. If that is what counts, the figure is a straight "
        "line in the start, and the slope is what a whole replay costs.",
    ]
    rows = [
        [
            piece,
            parts.mean_sd(pairs(slopes[piece])),
            _percent(own.r_squared),
            words(pairs(slopes[piece]), one.facts["metric"], contrast=True),
        ]
        for piece, own in fits.items()
        if own is not None
    ]
    drawn = parts.beside(
        parts.figure(
            f"{unit}, pooled",
            _scatter(one, fit),
            "Points: seeds. Dots: their mean. Line: least squares.",
        ),
        parts.figure(
            "The timing law", _law(), "Share of examples written into the rows and seen again."
        ),
        parts.figure("By tier, against the earliest start", _tiers(one), "Means over the seeds."),
    )
    table = parts.table(["slice", "slope per epoch of delay", "R²", "in words"], rows)
    return [Section("The trend", told, drawn + table)]


def _by_start(one: Reading, piece: str) -> dict[float, BySeed]:
    """The figure by start, of the seeds that all starts have."""
    own = {start: one.final(arm_name(start), piece) for start in STARTS}
    shared = set.intersection(*(set(values) for values in own.values()))
    return {start: {seed: values[seed] for seed in sorted(shared)} for start, values in own.items()}


def _means(values: Mapping[float, BySeed]) -> list[float]:
    return [found for own in values.values() if (found := mean(own.values())) is not None]


def _fit(one: Reading, piece: str) -> Fit | None:
    means = _means(_by_start(one, piece))
    return Fit.of(STARTS, means) if means else None


def _scatter(one: Reading, fit: Fit) -> Markup:
    values = _by_start(one, "pooled")
    with drawing(2.8) as drawn:
        axes = drawn.subplots()
        for start, own in values.items():
            axes.plot([start] * len(own), list(own.values()), "o", color=MUTED, alpha=0.45)
        ends = [fit.intercept + fit.slope * start for start in (STARTS[0], STARTS[-1])]
        axes.plot((STARTS[0], STARTS[-1]), ends, color=ACCENT)
        axes.plot(STARTS, _means(values), "o", color=INK, markersize=6)
        parts.finish(axes, "start of the window, in epochs", one.figure)
        axes.set_xticks(STARTS)
        text = f"{formatting.signed(fit.slope)} per epoch, R² {_percent(fit.r_squared)}"
        return svg(drawn, f"{one.figure} over the start of the window: {text}")


def _law() -> Markup:
    shares = [written_then_replayed([(start, start + 1)], EPOCHS) for start in STARTS]
    with drawing(2.8) as drawn:
        axes = drawn.subplots()
        axes.plot(STARTS, shares, "o-", color=ACCENT, clip_on=False)
        axes.set_ylim(0, 1)
        parts.finish(axes, "start of the window, in epochs", "share replayed")
        axes.set_xticks(STARTS)
        return svg(drawn, "The share replayed falls from 1 to 0 in a straight line.")


def _tiers(one: Reading) -> Markup:
    with drawing(2.8) as drawn:
        axes, ends = drawn.subplots(), []
        for piece in one.slices:
            means = _means(_by_start(one, piece))
            if not means:
                continue
            gains = [value - means[0] for value in means]
            width = 2.2 if piece == "pooled" else 1.4
            axes.plot(STARTS, gains, "o-", color=SLICES[piece], linewidth=width, clip_on=False)
            ends.append((gains[-1], piece, SLICES[piece]))
        parts.finish(axes, "start of the window, in epochs", f"{one.figure} gained")
        axes.set_xticks(STARTS)
        label_ends(axes, STARTS[-1], ends)
        return svg(drawn, f"{one.figure} of each tier against the earliest start.")


def _percent(share: float | None) -> str:
    return formatting.DASH if share is None else f"{share:.0%}"


TIMING = Experiment(
    name="timing",
    title="When the tables train",
    question="Does it matter when within a run the ID tables get their one epoch of training? "
    "A window of one epoch starts later and later in a run of two.",
    reported=(
        "The article: the later the window, the better; the trend is monotonic and about linear.",
        "The reproduction, in pooled AUC points against the earliest window: +0.02, +0.09, +0.25 "
        "and +0.26 for later and later starts.",
        "The timing law: a window that starts at s epochs leaves the share 1 \N{MINUS SIGN} s of "
        "the examples written into the rows and seen again.",
    ),
    lay_out=_lay_out,
    needs=recipes_reach_tables,
    page=each(_sections),
)
