"""When each component trains: windows in fractional epochs, and named recipes of them."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thawline.errors import ConfigError


@dataclass(frozen=True)
class TrainingWindow:
    """A span of epochs in which a component trains: from `start` up to, not including, `end`."""

    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The windows of the item table within a run of `epochs`; the network always trains."""

    epochs: int
    item: tuple[TrainingWindow, ...]

    def __post_init__(self) -> None:
        """Checks the windows.

        Raises:
            ConfigError: A window that ends before it starts, lies outside the run, or overlaps.
        """
        before = 0.0
        for window in sorted(self.item, key=lambda window: window.start):
            where = f"window [{window.start:g}, {window.end:g}) of `item`"
            if window.end <= window.start:
                raise ConfigError(f"{where} ends before it starts", "give it a positive length")
            if window.start < 0 or window.end > self.epochs:
                raise ConfigError(
                    f"{where} lies outside a run of {self.epochs} epochs",
                    "move it, shorten it, or raise finetune.epochs",
                )
            if window.start < before:
                raise ConfigError(f"{where} overlaps the one before", "join the two windows")
            before = window.end

    def item_trains(self, step: int, steps_per_epoch: int) -> bool:
        """Whether the item table trains in a step (counted from 0 over the whole run)."""
        return any(
            round(window.start * steps_per_epoch) <= step < round(window.end * steps_per_epoch)
            for window in self.item
        )

    def item_share(self, epoch: int) -> float:
        """Share of an epoch (counted from 0) in which the item table trains."""
        return sum(
            max(0.0, min(window.end, epoch + 1) - max(window.start, epoch)) for window in self.item
        )


@dataclass(frozen=True)
class Recipe:
    """A named schedule of the item table."""

    name: str
    about: str
    parameters: tuple[str, ...]
    windows: Callable[..., tuple[TrainingWindow, ...]]
    """From the number of epochs and the recipe's parameters to the windows."""


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "co-train",
            "the table trains in every epoch, beside the network",
            (),
            lambda epochs: (TrainingWindow(0, epochs),),
        ),
        Recipe("frozen", "the table keeps its pretrained rows", (), lambda epochs: ()),
        Recipe(
            "freeze-until-last",
            "the network trains alone; the table joins for the last epoch",
            (),
            lambda epochs: (TrainingWindow(epochs - 1, epochs),),
        ),
        Recipe(
            "train-first",
            "the table trains in the first epoch and is frozen after it",
            (),
            lambda epochs: (TrainingWindow(0, 1),),
        ),
        Recipe(
            "window",
            "the table trains from `start` for `length` epochs",
            ("start", "length"),
            lambda epochs, start, length: (TrainingWindow(start, start + length),),
        ),
    )
}


def make_schedule(recipe: str, epochs: int) -> Schedule:
    """The schedule of a recipe: a name, or a name with numbers, as in `window(0.5, 1)`.

    Raises:
        ConfigError: An unknown recipe, wrong parameters, windows that do not fit the run.
    """
    match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(\(.*\))?\s*", recipe)
    name = match.group(1) if match else recipe
    known = RECIPES.get(name)
    if match is None or known is None:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        raise ConfigError(
            f"finetune.recipe: no recipe {recipe!r}",
            f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RECIPES)}",
        )
    values = _numbers(match.group(2) or "()")
    if values is None or len(values) != len(known.parameters):
        usage = f"{name}({', '.join(known.parameters)})" if known.parameters else name
        raise ConfigError(f"finetune.recipe: {recipe!r} cannot be read", f"write {usage}")
    return Schedule(epochs, known.windows(epochs, *values))


def _numbers(text: str) -> list[float] | None:
    try:
        parsed: Any = ast.literal_eval(f"[{text[1:-1]}]")
    except (SyntaxError, ValueError):
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in parsed):
        return None
    return [float(value) for value in parsed]
