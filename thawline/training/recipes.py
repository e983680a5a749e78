"""Recipes: named plans of the ID tables, and the schedule that a config asks for."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thawline.config import ComponentSchedule, Config
from thawline.errors import ConfigError
from thawline.training.schedule import Curve, Plan, Schedule, TrainingWindow


@dataclass(frozen=True)
class Recipe:
    """A named plan of an ID table."""

    name: str
    about: str
    plan: Callable[..., Plan]
    """From the number of epochs and the recipe's parameters."""
    parameters: tuple[str, ...] = ()
    example: tuple[float, ...] = ()
    """Values of the parameters with which it fits a run of two epochs or more."""

    @property
    def usage(self) -> str:
        """How it is written in the config."""
        return f"{self.name}({', '.join(self.parameters)})" if self.parameters else self.name


SWITCHED_ON_BY = {
    "adapter": "set model.adapter to bias, diagonal or full",
    "content_tower": "set model.content_tower, for example to [64]",
}
"""What to do for a component that a model need not have."""


def _whole(start: float, end: float) -> Plan:
    return Plan((TrainingWindow(start, end),))


def _stratified(epochs: int) -> Plan:
    run, last = TrainingWindow(0, epochs), TrainingWindow(epochs - 1, epochs)
    middle = TrainingWindow((epochs - 1) / 2, epochs)
    return Plan.by_tier({"head": [run], "torso": [middle], "tail": [last], "cold": [last]})


def _alternate(epochs: int) -> Plan:
    return Plan(tuple(TrainingWindow(epoch + 0.5, epoch + 1) for epoch in range(epochs)))


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "co-train",
            "the table trains in every epoch, beside the network",
            lambda epochs: _whole(0, epochs),
        ),
        Recipe("frozen", "the table keeps its pretrained rows", lambda epochs: Plan()),
        Recipe(
            "freeze-until-last",
            "the network trains alone; the table joins for the last epoch",
            lambda epochs: _whole(epochs - 1, epochs),
        ),
        Recipe(
            "train-first",
            "the table trains in the first epoch and is frozen after it",
            lambda epochs: _whole(0, 1),
        ),
        Recipe(
            "window",
            "the table trains from `start` for `length` epochs",
            lambda epochs, start, length: _whole(start, start + length),
            parameters=("start", "length"),
            example=(0.5, 1.0),
        ),
        Recipe(
            "stratified",
            "head rows train from the start, torso rows from the middle, rare ones in the last "
            "epoch",
            _stratified,
        ),
        Recipe(
            "re-anchor",
            "the table trains, but goes back to its pretrained rows when an epoch starts",
            lambda epochs: replace(_whole(0, epochs), renewal="first"),
        ),
        Recipe(
            "re-init",
            "the table trains, but gets new random rows when an epoch starts (MEDA)",
            lambda epochs: replace(_whole(0, epochs), renewal="random"),
        ),
        Recipe(
            "alternate",
            "the table trains in the second half of each epoch",
            _alternate,
        ),
    )
}


def make_plan(recipe: str, epochs: int, key: str = "finetune.recipe") -> Plan:
    """The plan of a recipe: a name, or a name with numbers, as in `window(0.5, 1)`.

    Args:
        recipe: What the config says.
        epochs: Epochs of the run.
        key: The config's key, for errors.

    Raises:
        ConfigError: An unknown recipe, or wrong parameters.
    """
    match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(\(.*\))?\s*", recipe)
    name = match.group(1) if match else recipe
    known = RECIPES.get(name)
    if match is None or known is None:
        raise ConfigError(f"{key}: no recipe {recipe!r}", _nearest(name, RECIPES))
    values = _numbers(match.group(2) or "()")
    if values is None or len(values) != len(known.parameters):
        raise ConfigError(f"{key}: {recipe!r} cannot be read", f"write {known.usage}")
    return known.plan(epochs, *values)


def components_of(config: Config, context: Iterable[str]) -> list[str]:
    """Names of what can have a schedule of its own; `context` are the dataset's context columns."""
    model = config.model
    return [
        "item",
        *config.tables.others,
        *(["adapter"] if model.adapter != "off" else []),
        *(["content_tower"] if model.content_tower is not None else []),
        "history_action",
        *(f"ctx_{name}" for name in context),
        "dense",
    ]


def make_schedule(config: Config, context: Sequence[str]) -> Schedule:
    """The schedule that a config asks for.

    Every ID table follows `finetune.recipe` and every other component always trains, unless
    `finetune.schedule` says otherwise.

    Args:
        config: Its `finetune`, `tables` and `model` sections are used.
        context: Names of the dataset's context columns.

    Raises:
        ConfigError: An unknown recipe or component, windows that cannot be, rules that contradict
            a recipe, a time at which nothing trains.
    """
    settings, components = config.finetune, components_of(config, context)
    tables = {"item": config.tables.item, **config.tables.others}
    plans = {}
    for name, table in tables.items():
        plan = make_plan(settings.recipe, settings.epochs)
        plans[name] = replace(plan, reset_state=table.reset_state_at_thaw)
    for name, own in settings.schedule.items():
        if name not in components:
            raise ConfigError(
                f"finetune.schedule: there is no component `{name}`",
                SWITCHED_ON_BY.get(name) or _nearest(name, components),
            )
        if own.learning_rate is not None and name in tables:
            raise ConfigError(
                f"finetune.schedule.{name}.learning_rate is for parts of the network",
                f"set tables.{name}.learning_rate",
            )
        plans[name] = _own_plan(name, own, plans.get(name), settings.epochs)
    for name, table in tables.items():
        if plans[name].renewal == "random" and (table.pull or table.drift_cap is not None):
            raise ConfigError(
                f"tables.{name}: new random rows would be pulled back to the first ones",
                f"drop pull and drift_cap of tables.{name}, or choose another recipe",
            )
    schedule = Schedule(settings.epochs, plans)
    # Without a path for gradients to its rows, the item table stands still.
    paths = config.model.gradient_paths
    schedule.require_training(name for name in components if name != "item" or paths)
    return schedule


def _own_plan(name: str, own: ComponentSchedule, plan: Plan | None, epochs: int) -> Plan:
    """The plan of a component, from its own section and that of the recipe."""
    key = f"finetune.schedule.{name}"
    reset_state = plan.reset_state if plan is not None else True
    if own.windows is not None:
        plan = Plan(tuple(TrainingWindow(*window) for window in sorted(own.windows)))
    elif own.recipe is not None:
        of_network = plan is None
        plan = make_plan(own.recipe, epochs, f"{key}.recipe")
        if of_network and (plan.tiers or plan.renewal):
            raise ConfigError(f"{key}.recipe: {own.recipe} is for ID tables", "set windows instead")
    elif plan is None:
        plan = _whole(0, epochs)
    curve = Curve(own.curve, own.warm_up, own.restart)
    return replace(plan, curve=curve, reset_state=reset_state)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"


def _numbers(text: str) -> list[float] | None:
    try:
        parsed: Any = ast.literal_eval(f"[{text[1:-1]}]")
    except (SyntaxError, ValueError):
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in parsed):
        return None
    return [float(value) for value in parsed]
