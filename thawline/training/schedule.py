"""When each component trains: windows in fractional epochs, tiers of rows, learning-rate curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from thawline.errors import ConfigError


@dataclass(frozen=True)
class TrainingWindow:
    """A span of epochs in which a component trains: from `start` up to, not including, `end`."""

    start: float
    end: float

    def steps(self, steps_per_epoch: int) -> range:
        """The window in whole steps, counted from 0 over the whole run."""
        return range(round(self.start * steps_per_epoch), round(self.end * steps_per_epoch))


@dataclass(frozen=True)
class Curve:
    """The learning rate along a window, as a factor on the component's own."""

    kind: Literal["constant", "cosine"] = "constant"
    """cosine: `(1 + cos(pi * t)) / 2`, with t from 0 after the warm-up to 1 at the end."""
    warm_up: float = 0.0
    """Epochs of training in which the factor grows linearly up to 1."""
    restart: bool = False
    """True: anew in each window. False: one curve over all trained steps."""

    def factor(self, done: int, total: int, warm_up: int) -> float:
        """The factor of a step.

        Args:
            done: Trained steps of the curve before this one.
            total: Trained steps of the curve.
            warm_up: How many of them warm up: step i (from 0) has the factor (i + 1) / warm_up.
        """
        if done < warm_up:
            return (done + 1) / warm_up
        if self.kind == "constant":
            return 1.0
        return (1 + math.cos(math.pi * (done - warm_up) / (total - warm_up))) / 2


Windows = tuple[TrainingWindow, ...]


@dataclass(frozen=True)
class Plan:
    """When and how fast one component trains."""

    windows: Windows = ()
    """In order, without overlap."""
    tiers: tuple[tuple[str, Windows], ...] = ()
    """Windows of the rows of each tier, within `windows`; () trains all rows alike."""
    renewal: Literal["first", "random"] | None = None
    """What an ID table's rows are set to when an epoch starts, from the second on: the rows that
    the run started with, or new random ones."""
    curve: Curve = Curve()
    reset_state: bool = True
    """Whether a thaw makes the optimizer forget."""

    @classmethod
    def by_tier(cls, tiers: Mapping[str, Iterable[TrainingWindow]]) -> Plan:
        """A plan of a table whose tiers train in windows of their own."""
        named = tuple((name, tuple(windows)) for name, windows in tiers.items())
        return cls(_union(window for _, windows in named for window in windows), named)

    def trains(self, step: int, steps_per_epoch: int) -> bool:
        """Whether the component trains in a step (counted from 0 over the whole run)."""
        return any(step in window.steps(steps_per_epoch) for window in self.windows)

    def open_tiers(self, step: int, steps_per_epoch: int) -> frozenset[str]:
        """The tiers that train in a step; empty where the plan has none."""
        return frozenset(
            name
            for name, windows in self.tiers
            if any(step in window.steps(steps_per_epoch) for window in windows)
        )

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """The factor on the learning rate in a step in which the component trains."""
        spans = [window.steps(steps_per_epoch) for window in self.windows]
        current = next(index for index, span in enumerate(spans) if step in span)
        if self.curve.restart:
            spans, current = [spans[current]], 0
        done = sum(len(span) for span in spans[:current]) + step - spans[current].start
        total = sum(len(span) for span in spans)
        warm_up = min(round(self.curve.warm_up * steps_per_epoch), total)
        return self.curve.factor(done, total, warm_up)

    def share(self, epoch: int) -> float:
        """Share of an epoch (counted from 0) in which the component trains."""
        return sum(
            max(0.0, min(window.end, epoch + 1) - max(window.start, epoch))
            for window in self.windows
        )


@dataclass(frozen=True)
class Schedule:
    """The plans of a run's components; one without a plan always trains."""

    epochs: int
    plans: Mapping[str, Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the windows.

        Raises:
            ConfigError: A window that ends before it starts, lies outside the run, or overlaps;
                a warm-up that is longer than the training; a span in which nothing trains.
        """
        for name, plan in self.plans.items():
            for windows in (plan.windows, *(windows for _, windows in plan.tiers)):
                _check(name, windows, self.epochs)
            trained = sum(window.end - window.start for window in plan.windows)
            if plan.windows and plan.curve.warm_up > trained:
                raise ConfigError(
                    f"`{name}` warms up for {plan.curve.warm_up:g} epochs but trains for "
                    f"{trained:g}",
                    "shorten the warm-up",
                )

    def of(self, component: str) -> Plan:
        """The plan of a component."""
        always = Plan((TrainingWindow(0, self.epochs),))
        return self.plans.get(component, always)

    def require_training(self, components: Iterable[str]) -> None:
        """Checks that at any time something trains.

        Raises:
            ConfigError: A span of epochs in which none of the components does.
        """
        plans = [self.of(component) for component in components]
        edges = {0.0, float(self.epochs)}
        edges.update(edge for plan in plans for w in plan.windows for edge in (w.start, w.end))
        ordered = sorted(edges)
        for start, end in itertools.pairwise(ordered):
            middle = (start + end) / 2
            if not any(w.start <= middle < w.end for plan in plans for w in plan.windows):
                raise ConfigError(
                    f"nothing trains from epoch {start:g} to {end:g}",
                    "let a component train there, or run fewer epochs",
                )

    def require_steps(self, steps_per_epoch: int) -> None:
        """Checks that every window holds a step.

        Raises:
            ConfigError: One that rounds to none.
        """
        for name, plan in self.plans.items():
            for window in (*plan.windows, *(w for _, windows in plan.tiers for w in windows)):
                if not window.steps(steps_per_epoch):
                    raise ConfigError(
                        f"window [{window.start:g}, {window.end:g}) of `{name}` holds no step: "
                        f"an epoch has {steps_per_epoch}",
                        "widen it, or make batches smaller",
                    )


def _check(name: str, windows: Windows, epochs: int) -> None:
    before = 0.0
    for window in sorted(windows, key=lambda window: window.start):
        where = f"window [{window.start:g}, {window.end:g}) of `{name}`"
        if not window.end > window.start:
            raise ConfigError(f"{where} ends before it starts", "give it a positive length")
        if window.start < 0 or window.end > epochs:
            raise ConfigError(
                f"{where} lies outside a run of {epochs} epochs",
                "move it, shorten it, or raise finetune.epochs",
            )
        if window.start < before:
            raise ConfigError(f"{where} overlaps the one before", "join the two windows")
        before = window.end


def _union(windows: Iterable[TrainingWindow]) -> Windows:
    """The same spans as disjoint windows in order."""
    merged: list[TrainingWindow] = []
    for window in sorted(windows, key=lambda window: window.start):
        if merged and window.start <= merged[-1].end:
            merged[-1] = TrainingWindow(merged[-1].start, max(merged[-1].end, window.end))
        else:
            merged.append(window)
    return tuple(merged)
