"""What an experiment's page reads of a study: figures by arm and seed, paired."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from thawline.evaluation import formatting
from thawline.study.comparison import words
from thawline.study.experiments.base import Page, Section, Tree
from thawline.study.grid import ARM, name_of
from thawline.study.statistics import Paired, paired

SLICES = ("pooled", "head", "torso", "tail", "cold")
WARM = ("head", "torso", "tail")
TRAINING = "training"
"""The hold-out that holds figures of the training itself, such as the drift of rows."""

BySeed = dict[int, float]


@dataclass(frozen=True)
class Reading:
    """A study's arms with one combination of its grid, by the names that the experiment gave."""

    facts: Tree
    label: str
    """The combination of the grid; empty where there is one."""
    arms: Mapping[str, str]
    """The name in the table by that of the experiment."""
    _final: Mapping[tuple[str, str, str, str, str], BySeed]
    _epochs: Mapping[tuple[str, str, str, str, str], Mapping[int, Mapping[int, float]]]

    @property
    def figure(self) -> str:
        """The study's metric, for a reader."""
        return formatting.label(self.facts["metric"])

    @property
    def slices(self) -> list[str]:
        """The slices of which there is a figure."""
        return [piece for piece in SLICES if any(self.final(arm, piece) for arm in self.arms)]

    def of(self, figure: str) -> Reading:
        """The same arms, read by another figure than the study's metric."""
        return replace(self, facts={**self.facts, "metric": figure})

    def final(self, arm: str, piece: str = "pooled") -> BySeed:
        """The study's metric of the exported models, by seed; empty where there is none."""
        return self._final.get(self._key(arm, piece), {})

    def mean(self, arm: str, piece: str = "pooled") -> float | None:
        """The mean of `final`."""
        return mean(self.final(arm, piece).values())

    def sum_of(self, weights: Mapping[str, float], piece: str = "pooled") -> BySeed:
        """A weighted sum of arms by seed, of the seeds that all of them have."""
        columns = [self.final(arm, piece) for arm in weights]
        shared = [seed for seed in columns[0] if all(seed in own for own in columns)]
        return {
            seed: math.fsum(
                weight * own[seed] for weight, own in zip(weights.values(), columns, strict=True)
            )
            for seed in shared
        }

    def difference(self, first: str, second: str, piece: str = "pooled") -> Paired | None:
        """One arm minus another, paired by seed; None where no seed has both."""
        own, other = self.final(first, piece), self.final(second, piece)
        return pairs({seed: own[seed] - other[seed] for seed in own if seed in other})

    def by_epoch(self, arm: str, piece: str = "pooled") -> list[float | None]:
        """The mean of the metric after each epoch."""
        seeds = self._epochs.get(self._key(arm, piece), {})
        last = max((max(own) for own in seeds.values()), default=0)
        return [
            mean(own[number] for own in seeds.values() if number in own)
            for number in range(1, last + 1)
        ]

    def last_change(self, arm: str, piece: str = "pooled") -> Paired | None:
        """The metric after the last epoch minus that after the one before."""
        changes = {
            seed: own[max(own)] - own[max(own) - 1]
            for seed, own in self._epochs.get(self._key(arm, piece), {}).items()
            if max(own) - 1 in own
        }
        return pairs(changes)

    def drift(self, arm: str, tier: str, table: str = "item") -> float | None:
        """How far a tier's rows went in training, in norms of their first values."""
        key = (self.arms.get(arm, ""), TRAINING, table, tier, "drift")
        return mean(self._final.get(key, {}).values())

    def _key(self, arm: str, piece: str) -> tuple[str, str, str, str, str]:
        facts = self.facts
        name = self.arms.get(arm, "")
        return (name, facts["holdout"], facts["action"], piece, facts["metric"])


def readings(facts: Tree, table: pa.Table) -> list[Reading]:
    """One for each combination of the grid.

    Args:
        facts: `study.json`.
        table: `trials.parquet`.
    """
    rounds = {arm["name"]: arm["epochs"] for arm in facts["arms"]}
    final: dict[tuple[str, str, str, str, str], BySeed] = {}
    epochs: dict[tuple[str, str, str, str, str], dict[int, dict[int, float]]] = {}
    for row in table.to_pylist():
        if row["round"] != rounds.get(row["arm"]) or row["value"] is None:
            continue
        key = (row["arm"], row["holdout"], row["action"], row["slice"], row["figure"])
        if row["final"]:
            final.setdefault(key, {})[row["seed"]] = row["value"]
        else:
            own = epochs.setdefault(key, {}).setdefault(row["seed"], {})
            own[row["epoch"]] = row["value"]
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for arm in facts["arms"]:
        own_values = {key: value for key, value in arm["values"].items() if key != ARM}
        label = name_of(facts["grid"], own_values) if own_values else ""
        group = found.setdefault(json.dumps(own_values), (label, {}))
        group[1][arm["values"][ARM]] = arm["name"]
    return [
        Reading(facts, label if len(found) > 1 else "", arms, final, epochs)
        for label, arms in found.values()
    ]


def each(make: Callable[[Reading], Sequence[Section]]) -> Page:
    """A page whose sections are made anew for each combination of the grid."""

    def page(facts: Tree, table: pa.Table, rows: Sequence[Tree]) -> list[Section]:
        return [
            Section(f"{own.title}, {one.label}" if one.label else own.title, own.words, own.html)
            for one in readings(facts, table)
            for own in make(one)
        ]

    return page


def mean(values: Iterable[float]) -> float | None:
    """None of none."""
    known = list(values)
    return float(np.mean(known)) if known else None


def pairs(by_seed: BySeed) -> Paired | None:
    """The statistics of differences by seed; None of none."""
    return paired(list(by_seed.values())) if by_seed else None


def said(found: Paired | None, figure: str, *, contrast: bool = False) -> str:
    """A mean of pairs in words: `+0.0012 (sd 0.0004; undecided with 3 seeds, ...)`."""
    if found is None:
        return "not known yet"
    spread = f"sd {formatting.figure(found.sd)}; " if found.sd is not None else ""
    # Brackets within brackets are hard to read.
    verdict = words(found, figure, contrast=contrast).replace(" (", ", ").replace(")", "")
    return f"{formatting.signed(found.mean)} ({spread}{verdict})"
