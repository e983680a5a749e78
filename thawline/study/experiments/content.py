"""Content: a tower over content vectors that gets more epochs than the ID tables."""

from __future__ import annotations

from typing import Any

from thawline.config import Config
from thawline.study.experiments import parts
from thawline.study.experiments.base import (
    Changes,
    Experiment,
    Section,
    arms_of,
    changed,
    recipes_reach_tables,
    unless,
)
from thawline.study.experiments.reading import Reading, each, said

EPOCHS = 3
ONE_EPOCH = "one epoch, co-train"
CO_TRAIN, FROZEN = f"{EPOCHS} epochs, co-train", f"{EPOCHS} epochs, table frozen"
LAST = f"{EPOCHS} epochs, table in the last alone"
WITHOUT = f"{LAST}, no tower"
WIDTH, TOWER = 16, [64]
"""Of the content vectors of a simulated feed that has none, and of a tower where there is none."""


def _lay_out(config: Config) -> Config:
    shared: dict[str, Any] = {"finetune.epochs": EPOCHS, "finetune.recipe": "co-train"}
    if config.model.content_tower is None:
        shared["model.content_tower"] = TOWER
    if config.simulate is not None and not config.simulate.content_dim:
        shared["simulate.content_dim"] = WIDTH
    late = {"finetune.recipe": "freeze-until-last"}
    arms: dict[str, Changes] = {
        ONE_EPOCH: {"finetune.epochs": 1},
        CO_TRAIN: {},
        FROZEN: {"finetune.recipe": "frozen"},
        LAST: late,
        WITHOUT: late | {"model.content_tower": None},
    }
    return arms_of(changed(config, shared), arms, baseline=ONE_EPOCH, against={WITHOUT: LAST})


def _sections(one: Reading) -> list[Section]:
    metric = one.facts["metric"]
    towered = [CO_TRAIN, FROZEN, LAST]
    words = [
        f"{arm}, against one epoch: {said(one.difference(arm, ONE_EPOCH), metric)}."
        for arm in towered
    ]
    words.append(
        f"What the tower adds where it has {EPOCHS} epochs and the table one: "
        f"{said(one.difference(LAST, WITHOUT), metric)} pooled, "
        f"{said(one.difference(LAST, WITHOUT, 'cold'), metric)} on cold items."
    )
    against = {arm: (arm, ONE_EPOCH) for arm in towered} | {"the tower": (LAST, WITHOUT)}
    plot = parts.lines_by_epoch(
        {arm: one.by_epoch(arm) for arm in towered},
        f"{one.figure} after each epoch, by when the table trains",
        one.figure,
    )
    return [
        Section(
            "The tower's epochs and the table's",
            words,
            parts.beside(
                parts.figure(
                    f"{one.facts['action']} {one.figure} after each epoch, pooled",
                    plot,
                    "Means over the seeds, on the requests that are scored after an epoch.",
                ),
                parts.dots(
                    {arm: one.difference(arm, ONE_EPOCH) for arm in towered},
                    "Against one epoch, pooled",
                ),
            )
            + parts.table(
                [f"{one.figure}, gain over one epoch", *against], parts.by_slice(one, against)
            ),
        )
    ]


def _has_content(config: Config) -> str | None:
    if config.simulate is None and config.items.content is None:
        return (
            "items.content names no column of content vectors; set items.path and items.content, "
            "or simulate a feed"
        )
    return None


CONTENT = Experiment(
    name="content",
    title="A content tower with more time than the tables",
    question="A new tower over content vectors learns more slowly than the rest. Can it get "
    f"{EPOCHS} epochs while the ID tables get one, and which one? Against one epoch in which all "
    "train. A simulated feed gets content vectors where it has none.",
    reported=(
        "The article, of a model with a new vision-language model: more epochs with everything "
        "training overfit, and the best plan was to let the tables train late, as without it.",
        "The reproduction has no content vectors.",
    ),
    lay_out=_lay_out,
    needs=unless(recipes_reach_tables, _has_content),
    page=each(_sections),
)
