"""Designed experiments: each asks one question of the user's own data, as one study."""

from __future__ import annotations

from thawline.study.experiments.accumulation import ACCUMULATION
from thawline.study.experiments.adapters import ADAPTERS_EXPERIMENT
from thawline.study.experiments.base import Experiment, Section
from thawline.study.experiments.consistency import CONSISTENCY
from thawline.study.experiments.content import CONTENT
from thawline.study.experiments.gradient_paths import GRADIENT_PATHS_EXPERIMENT
from thawline.study.experiments.leak import LEAK
from thawline.study.experiments.optimizers import OPTIMIZERS_EXPERIMENT
from thawline.study.experiments.remedies import REMEDIES
from thawline.study.experiments.self_influence import SELF_INFLUENCE
from thawline.study.experiments.small_tables import SMALL_TABLES
from thawline.study.experiments.staleness import STALENESS
from thawline.study.experiments.tables import WHICH_TABLE
from thawline.study.experiments.timing import TIMING
from thawline.study.experiments.windows import WINDOWS

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TIMING,
        WHICH_TABLE,
        GRADIENT_PATHS_EXPERIMENT,
        SELF_INFLUENCE,
        CONSISTENCY,
        LEAK,
        OPTIMIZERS_EXPERIMENT,
        ADAPTERS_EXPERIMENT,
        REMEDIES,
        WINDOWS,
        CONTENT,
        STALENESS,
        ACCUMULATION,
        SMALL_TABLES,
    )
}
"""By name, in the order in which `thawline experiment all` runs them."""

__all__ = ["EXPERIMENTS", "Experiment", "Section"]
