"""The learning rates and optimizers of item rows at which experiments are run."""

from __future__ import annotations

from thawline.config import Config
from thawline.study.experiments.base import Changes

HIGH = 10.0
"""The high rate over the config's own."""
AT_HIGH = f" at {HIGH:g} x the rate"

ONE_PASS: Changes = {"finetune.epochs": 1, "finetune.recipe": "co-train"}
"""What makes a run a single epoch in which everything trains."""


def rates_of(config: Config) -> dict[str, Changes]:
    """What sets each rate, by what it adds to an arm's name; all ID tables are scaled alike.

    Where the grid varies a table's rate, the arms leave it alone.
    """
    tables = {"item": config.tables.item, **config.tables.others}
    keys = {f"tables.{name}.learning_rate": own.learning_rate for name, own in tables.items()}
    if any(key in keys for key in config.study.grid):
        return {"": {}}
    return {"": {}, AT_HIGH: {key: HIGH * rate for key, rate in keys.items()}}


def arms_step_rows(config: Config) -> str | None:
    """Arms that choose how the item rows are stepped leave nothing of it to the grid."""
    for key in ("tables.item.learning_rate", "tables.item.optimizer"):
        if key in config.study.grid:
            return f"the grid varies {key}, which the arms set; set {key} for all of them instead"
    return None


def not_cross_fitted(config: Config) -> str | None:
    """Cross-fitted tables take one micro-batch a step, and their lookups are never stale."""
    if config.finetune.cross_fit:
        return "finetune.cross_fit is on, with which lookups are never stale; set it to false"
    return None
