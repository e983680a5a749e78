"""Timing: a one-epoch window in which the tables train, slid through a run of two epochs."""

from __future__ import annotations

from thawline.config import Config
from thawline.study.experiments.base import (
    Experiment,
    arms_of,
    changed,
    recipes_reach_tables,
)

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
)
