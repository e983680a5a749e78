"""What a designed experiment is, and what all of them share.

An experiment is a study whose arms and contrasts are chosen to answer one question, with a page
that says what others have reported of it. What it varies is its own; seeds, metric and everything
else come from the user's config. The registry is the package itself; running one is
`thawline.stages.experiment`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import yaml
from markupsafe import Markup

from thawline.config import Config, parse_config

Tree = Mapping[str, Any]
Changes = Mapping[str, Any]
"""Config keys and their values, as `--set` has them."""

CHEAP: Changes = {"evaluation.bootstrap": 0, "evaluation.retrieval_requests": 0}
"""What no trial of an experiment computes, since no comparison of arms reads it."""

NOTHING = Markup()


@dataclass(frozen=True)
class Section:
    """A part of an experiment's page."""

    title: str
    words: Sequence[str] = ()
    """Sentences: what is to be seen."""
    html: Markup = NOTHING
    """Drawings and tables (`parts`), made of escaped texts."""


Page = Callable[[Tree, pa.Table, Sequence[Tree]], list[Section]]
"""From `study.json`, `trials.parquet` and the rows of `compare_arms`."""


def never(config: Config) -> str | None:
    """No config is unfit."""
    return None


@dataclass(frozen=True)
class Experiment:
    """A question, and the study that answers it."""

    name: str
    """Its subcommand."""
    title: str
    question: str
    """One or two sentences."""
    reported: Sequence[str]
    """What the article and the reproduction found, a sentence each."""
    lay_out: Callable[[Config], Config] = lambda config: config
    """The config with its study: arms, contrasts, baseline; may set what all arms share."""
    needs: Callable[[Config], str | None] = never
    """Why a config cannot answer the question; None: it can."""
    page: Page | None = None
    """Sections of its own, before those of every study."""
    measure: Callable[[Config], dict[str, Any]] | None = None
    """What is measured where nothing is trained; the page finds it as `measured` in `study.json`.
    None: a study is run."""
    answers: Callable[[str], bool] = lambda error: False
    """Whether the error of a trial is an answer to the question, and no failure."""


def arms_of(
    config: Config,
    arms: Mapping[str, Changes],
    *,
    baseline: str,
    against: Mapping[str, str] | None = None,
    contrasts: Mapping[str, Mapping[str, float]] | None = None,
) -> Config:
    """The config with a study of these arms.

    Args:
        config: Its `study.grid` stays: each arm is crossed with it.
        arms: By name, what an arm changes; no change is the config itself.
        baseline: The arm that the others are compared with.
        against: By arm, another one to compare it with.
        contrasts: By name, weights of arms.

    Raises:
        ConfigError: An arm or a contrast that cannot be.
    """
    against = against or {}
    study = {
        "arms": {
            name: {"set": dict(own), "baseline": against.get(name)} for name, own in arms.items()
        },
        "baseline": baseline,
        "contrasts": {name: dict(weights) for name, weights in (contrasts or {}).items()},
        # A short round would judge a recipe that is not the experiment's.
        "halving": None,
        # Of many trials, what the experiment's page says is read.
        "pages": False,
    }
    tree = config.model_dump(mode="json")
    tree["study"] |= study
    return parse_config(
        yaml.safe_dump(tree, sort_keys=False), overrides(CHEAP), source="the experiment"
    )


def changed(config: Config, changes: Changes) -> Config:
    """The config with some keys set, for all arms.

    Raises:
        ConfigError: A key or a value that cannot be.
    """
    tree = config.model_dump(mode="json")
    return parse_config(
        yaml.safe_dump(tree, sort_keys=False), overrides(changes), source="the experiment"
    )


def overrides(changes: Changes) -> list[str]:
    """As `--set` has them."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def recipes(names: Iterable[str]) -> dict[str, Changes]:
    """An arm for each recipe, by its name."""
    return {name: {"finetune.recipe": name} for name in names}


def difference(first: str, second: str) -> dict[str, float]:
    """The weights of one arm minus another."""
    return {first: 1.0, second: -1.0}


def unless(*rules: Callable[[Config], str | None]) -> Callable[[Config], str | None]:
    """The first reason that one of several rules gives."""

    def reason(config: Config) -> str | None:
        return next((why for rule in rules if (why := rule(config)) is not None), None)

    return reason


def recipes_reach_tables(config: Config) -> str | None:
    """A table with a schedule of its own follows no recipe of an arm."""
    for name in ("item", *config.tables.others):
        own = config.finetune.schedule.get(name)
        if own is not None and (own.recipe is not None or own.windows is not None):
            return (
                f"finetune.schedule.{name} says when the table trains, so that the recipes of the "
                "arms would not reach it; drop it"
            )
    return None


def several_epochs(config: Config) -> str | None:
    """In one epoch, recipes that freeze for a time are all alike."""
    if config.finetune.epochs < 2:
        return "finetune.epochs is 1, in which the recipes are all the same; set 2 or more"
    return None
