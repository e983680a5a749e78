"""Gradient paths: which losses may write into the item rows, and on which way."""

from __future__ import annotations

from thawline.config import GRADIENT_PATHS, Config
from thawline.study.experiments.base import (
    Changes,
    Experiment,
    arms_of,
    changed,
    recipes_reach_tables,
    several_epochs,
    unless,
)

ONE_EPOCH = "one epoch"
CO_TRAIN, FROZEN = "co-train", "frozen"
PATHS: dict[str, list[str]] = {
    "contrastive": ["contrastive"],
    "contrastive + transformer": ["contrastive", "transformer"],
    "contrastive + feature cross": ["contrastive", "feature_cross"],
    "contrastive + both": ["contrastive", "transformer", "feature_cross"],
}
"""By arm, the paths that are open."""


def _lay_out(config: Config) -> Config:
    arms: dict[str, Changes] = {
        ONE_EPOCH: {"finetune.epochs": 1},
        CO_TRAIN: {},
        FROZEN: {"finetune.recipe": "frozen"},
        **{name: {"model.gradient_paths": paths} for name, paths in PATHS.items()},
    }
    shared: Changes = {
        "finetune.recipe": "co-train",
        "model.gradient_paths": list(GRADIENT_PATHS),
    }
    return arms_of(changed(config, shared), arms, baseline=ONE_EPOCH)


def _has_contrastive(config: Config) -> str | None:
    if config.model.contrastive_weight == 0:
        return "model.contrastive_weight is 0, so that there is no contrastive path; set it above 0"
    return None


GRADIENT_PATHS_EXPERIMENT = Experiment(
    name="gradient-paths",
    title="By which path gradients reach the rows",
    question="Does a model that trains for several epochs keep what it gains if only some "
    "gradients reach the item rows: the contrastive loss's, and those of the other losses through "
    "the transformer, the feature cross or both? All against co-training for one epoch.",
    reported=(
        "The article: full co-training, which equals contrastive + both there, overfits badly, and "
        "contrastive + feature cross does too.",
        "The article: contrastive + transformer overfits mildly; contrastive alone does not "
        "overfit, and gains less than a frozen table, which gains most.",
    ),
    lay_out=_lay_out,
    needs=unless(several_epochs, recipes_reach_tables, _has_contrastive),
)
