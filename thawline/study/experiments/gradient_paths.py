"""Gradient paths: which losses may write into the item rows, and on which way."""

from __future__ import annotations

from collections.abc import Mapping

from thawline.config import GRADIENT_PATHS, Config
from thawline.study.experiments import parts
from thawline.study.experiments.base import (
    Changes,
    Experiment,
    Section,
    arms_of,
    changed,
    recipes_reach_tables,
    several_epochs,
    unless,
)
from thawline.study.experiments.reading import SLICES, Reading, each, said

TIERS = SLICES[1:]
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


def _sections(one: Reading) -> list[Section]:
    metric = one.facts["metric"]
    arms = [CO_TRAIN, FROZEN, *PATHS]
    words = [
        f"{arm}: {said(one.difference(arm, ONE_EPOCH), metric)} against one epoch; in its last "
        f"epoch {said(one.last_change(arm), metric)}."
        for arm in arms
    ]
    words.append(
        "Here the rows of the history have a path of their own, open in co-training alone, so that "
        "contrastive + both is less than co-training. By the contrastive path the loss of the next "
        "item reaches that item's row."
    )
    against = {arm: (arm, ONE_EPOCH) for arm in arms}
    rows = [[arm, *cells] for arm, *cells in zip(arms, *_columns(one, against), strict=True)]
    more = [
        [arm, parts.mean_sd(one.last_change(arm)), *(parts.drift(one, arm, tier) for tier in TIERS)]
        for arm in arms
    ]
    plot = parts.lines_by_epoch(
        {arm: one.by_epoch(arm) for arm in arms},
        f"{one.figure} after each epoch, by open path",
        one.figure,
    )
    return [
        Section(
            "Against one epoch of co-training",
            words,
            parts.beside(
                parts.figure(
                    f"{one.facts['action']} {one.figure} after each epoch, pooled",
                    plot,
                    "Means over the seeds, on the requests that are scored after an epoch.",
                ),
                parts.dots({arm: one.difference(arm, ONE_EPOCH) for arm in arms}, "Pooled"),
            )
            + parts.table(["against one epoch", *one.slices], rows)
            + parts.table(["open paths", "last epoch", *(f"{tier} drift" for tier in TIERS)], more),
        )
    ]


def _columns(one: Reading, against: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """A column a slice, of the differences of each pair."""
    return [cells for _, *cells in parts.by_slice(one, against)]


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
    page=each(_sections),
)
