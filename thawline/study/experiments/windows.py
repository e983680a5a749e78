"""Windows: do more epochs over fewer days replace one pass over many?"""

from __future__ import annotations

import re

from thawline.config import Config
from thawline.study.experiments import parts
from thawline.study.experiments.base import (
    Changes,
    Experiment,
    Section,
    arms_of,
    difference,
    recipes_reach_tables,
    unless,
)
from thawline.study.experiments.reading import Reading, each, said

EPOCHS = (1, 2, 3)
RECIPES = ("co-train", "frozen", "freeze-until-last", "train-first")


def days_of(config: Config) -> tuple[int, int]:
    """The config's fine-tune window, and half of it."""
    days = config.windows.finetune_days
    return days, days // 2


def arm_name(days: int, epochs: int, recipe: str = "") -> str:
    """Of the arm with so many days and epochs; with one epoch, the table trains in it."""
    words = f"{days} day{'s' * (days > 1)}, {epochs} epoch{'s' * (epochs > 1)}"
    return f"{words}, {recipe}" if recipe else words


def _lay_out(config: Config) -> Config:
    arms: dict[str, Changes] = {}
    contrasts = {}
    for days in days_of(config):
        for epochs in EPOCHS:
            keys = {"windows.finetune_days": days, "finetune.epochs": epochs}
            if epochs == 1:
                arms[arm_name(days, 1)] = {**keys, "finetune.recipe": "co-train"}
                continue
            for recipe in RECIPES:
                arms[arm_name(days, epochs, recipe)] = {**keys, "finetune.recipe": recipe}
            contrasts[f"late minus early, {arm_name(days, epochs)}"] = difference(
                arm_name(days, epochs, "freeze-until-last"), arm_name(days, epochs, "train-first")
            )
    return arms_of(config, arms, baseline=arm_name(days_of(config)[0], 1), contrasts=contrasts)


def _sections(one: Reading) -> list[Section]:
    metric = one.facts["metric"]
    lengths = sorted({int(re.split(r"\D", arm)[0]) for arm in one.arms}, reverse=True)
    control = arm_name(lengths[0], 1)
    words, rows, plots = [], [], []
    for days in lengths:
        for epochs in EPOCHS[1:]:
            late, first = (
                arm_name(days, epochs, recipe) for recipe in ("freeze-until-last", "train-first")
            )
            words.append(
                f"{arm_name(days, epochs)}: freezing until the last epoch "
                f"{said(one.difference(late, control), metric)} against {control}, "
                f"{said(one.difference(late, first), metric)} against training the table first."
            )
        series = {
            recipe: [
                one.mean(arm_name(days, epochs, recipe if epochs > 1 else "")) for epochs in EPOCHS
            ]
            for recipe in RECIPES
        }
        plots.append(
            parts.figure(
                f"{arm_name(days, 1).partition(',')[0]}: {one.figure} of runs of so many epochs",
                parts.lines_by_epoch(series, f"{one.figure} with {days} days", one.figure),
                "Each point is a run of its own; with one epoch the table trains in it.",
            )
        )
        for recipe in RECIPES:
            runs = [arm_name(days, epochs, recipe if epochs > 1 else "") for epochs in EPOCHS]
            gains = [
                "the control" if run == control else parts.mean_sd(one.difference(run, control))
                for run in runs
            ]
            rows.append([f"{days} days, {recipe}", *gains])
    words.append(
        "The test days are the same in all arms. Tiers are those of each arm's own window, so that "
        "figures by tier are of other items where the days differ: compare them within a window."
    )
    columns = [f"pooled, against {control}", *(f"{n} epoch{'s' * (n > 1)}" for n in EPOCHS)]
    return [
        Section("Days against epochs", words, parts.beside(*plots) + parts.table(columns, rows))
    ]


def _can_halve(config: Config) -> str | None:
    if config.windows.finetune_days < 2:
        return "windows.finetune_days is 1, of which there is no half; set 2 or more"
    return None


WINDOWS = Experiment(
    name="windows",
    title="Days and epochs",
    question="Do several passes over a shorter fine-tune window replace one pass over a longer "
    "one? The config's window and half of it, with one, two and three epochs; the pretraining "
    "window ends where the fine-tune window starts, so that the shorter one starts from fresher "
    "rows (unless windows.pretrain_overlap).",
    reported=(
        "The article, against one epoch of co-training on 20 days: with 10 days and the table "
        "frozen, two epochs are near it and three slightly above.",
        "The article: freezing until the last epoch gains 0.49 %, training the table first and "
        "freezing it then loses 0.80 %; gains level off at about three epochs.",
        "The article: on 20 days the same recipe gains 1.16 %.",
    ),
    lay_out=_lay_out,
    needs=unless(recipes_reach_tables, _can_halve),
    page=each(_sections),
)
