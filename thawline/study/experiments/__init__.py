"""Designed experiments: each asks one question of the user's own data, as one study."""

from __future__ import annotations

from thawline.study.experiments.base import Experiment, Section
from thawline.study.experiments.timing import TIMING

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (TIMING,)}
"""By name, in the order in which `thawline experiment all` runs them."""

__all__ = ["EXPERIMENTS", "Experiment", "Section"]
