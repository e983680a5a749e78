"""What a study runs: arms from names and a grid, trials from arms and seeds, and contrasts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thawline import __version__
from thawline.config import Config, Negatives, Study, dump_config, parse_config, settings_in
from thawline.errors import ConfigError
from thawline.study.grid import ARM, baseline_values, name_of

ELSEWHERE = {
    "seed": "give study.seeds (--seeds)",
    "workdir": "give study a folder with --out",
    "study": "a study is no part of itself",
    "tracking": "trials of one study are tracked in one place",
}
"""Sections that nothing may vary, and what to do instead."""

OF_DATA = ("simulate", "events", "items", "windows")
"""Sections that decide the dataset: named arms may vary them, a grid may not."""

UNREAD = ("workdir", "tracking", "runtime", "study", "simulate", "events", "audit")
"""Sections that decide no figure of a trial; the log is known by the version of the dataset."""

PRETRAINED_BY = ("dim", "layers", "heads", "ffn", "dropout", "checkpoint_activations")
"""Keys of `model` that pretraining reads."""


@dataclass(frozen=True)
class Arm:
    """A named arm with one combination of the grid's values; either may be missing."""

    name: str
    values: Mapping[str, Any]
    """By dimension (`study.grid`): the name in `study.arms` first, then the grid's keys."""
    baseline: str
    """Name of the arm that it is compared with; its own where it is one."""
    changes: Mapping[str, Any]
    """What it sets, by config key."""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of arms within a seed."""

    name: str
    weights: Mapping[str, float]
    """By name of the arm."""


@dataclass(frozen=True)
class Trial:
    """An arm with one seed, run for so many epochs."""

    arm: Arm
    seed: int
    epochs: int
    config: Config
    table_seed: int
    """Of the pretrained rows."""

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.arm.name}, seed {self.seed}"

    def table_key(self, data_version: str) -> str:
        """Names the pretrained rows by all that decides them."""
        tree = self.config.model_dump(
            mode="json",
            include={
                "pretrain": True,
                "model": set(PRETRAINED_BY),
                "windows": {"sequence_length"},
            },
        )
        return _hash([__version__, tree, self.table_seed, data_version])

    def key(self, data_version: str) -> str:
        """Names the trial by all that decides its figures; where it runs is left out."""
        tree = self.config.model_dump(mode="json", exclude=set(UNREAD))
        tree["gate"] = self.config.gate.holdout
        for name in ("checkpoint", "prefetch_batches"):
            del tree["finetune"][name]
        return _hash([__version__, tree, self.table_key(data_version), data_version])


@dataclass(frozen=True)
class Design:
    """A study, laid out."""

    study: Study
    arms: Sequence[Arm]
    contrasts: Sequence[Contrast]
    rounds: Sequence[int]
    """Epochs of each round; the last is the one that counts. More than one with halving."""
    _config: Config

    @classmethod
    def of(cls, config: Config) -> Design:
        """Lays out the study that a config asks for.

        Raises:
            ConfigError: A key or a value that cannot be, or a baseline or contrast of an arm that
                the study does not have; the message names the key.
        """
        study = config.study
        _check_keys(study)
        dimensions = dimensions_of(study)
        baseline = baseline_values(dimensions, study.baseline)
        arms = []
        for chosen in itertools.product(*dimensions.values()):
            values = dict(zip(dimensions, chosen, strict=True))
            changes = {key: value for key, value in values.items() if key != ARM}
            compared = values | baseline
            if ARM in values:
                named = study.arms[values[ARM]]
                changes |= named.set
                compared |= {ARM: named.baseline} if named.baseline is not None else {}
            name = name_of(dimensions, values)
            arms.append(Arm(name, values, name_of(dimensions, compared), settings_in(changes)))
        names = [arm.name for arm in arms]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"study: two arms are called {name}", "name or spell their values apart"
                )
        return cls(study, arms, _contrasts(study, arms), _rounds(config), config)

    def arm(self, name: str) -> Arm:
        """The arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    def trials(self, epochs: int | None = None, arms: Sequence[Arm] | None = None) -> list[Trial]:
        """The trials of one round, seed by seed, so that pairs are complete early.

        Args:
            epochs: Of the round. None: the last one, with each arm's own epochs.
            arms: None: all of them.

        Raises:
            ConfigError: An arm whose config cannot be; the message names the key.
        """
        text = dump_config(self._config.model_copy(update={"study": Study()}))
        own = [self._config_of(text, arm, epochs) for arm in arms or self.arms]
        once = self.study.pretrain == "once"
        return [
            Trial(
                arm,
                seed,
                config.finetune.epochs,
                config.model_copy(update={"seed": seed}),
                self._config.seed if once else seed,
            )
            for seed in self.study.seeds
            for arm, config in zip(arms or self.arms, own, strict=True)
        ]

    def require_one_dataset(self, why: str) -> None:
        """Fails where an arm has another dataset than the config itself.

        Args:
            why: There can be but one.

        Raises:
            ConfigError: Names the arm and what it sets.
        """
        own = data_key(self._config)
        for trial in self.trials():
            if data_key(trial.config) != own:
                keys = ", ".join(key for key in trial.arm.changes if _section(key) in OF_DATA)
                raise ConfigError(
                    f"{self.where(trial.arm)} varies the data{f' ({keys})' if keys else ''}; {why}",
                    "let `thawline study` build the datasets, or drop the arm",
                )

    def where(self, arm: Arm) -> str:
        """The arm as an error names it, with the key that made it."""
        return f"study.{'arms' if ARM in arm.values else 'grid'}: the arm {arm.name}"

    def _config_of(self, text: str, arm: Arm, epochs: int | None) -> Config:
        changes = [f"{key}={json.dumps(value)}" for key, value in arm.changes.items()]
        if epochs is not None and len(self.rounds) > 1:
            changes.append(f"finetune.epochs={epochs}")
        # The study compares the arms with each other, whatever is registered.
        return parse_config(text, [*changes, "gate.champion=none"], source=self.where(arm))


def dimensions_of(study: Study) -> dict[str, list[Any]]:
    """What varies, and all its values: the names of arms first, then the grid."""
    return ({ARM: list(study.arms)} if study.arms else {}) | study.grid


def data_key(config: Config) -> str:
    """Names a dataset by what a config says of it; what the log holds is known when it is built."""
    tree = config.model_dump(
        mode="json", include={*OF_DATA} | {"negatives"}, exclude={"negatives": _BUT_BUCKETS}
    )
    ids = sorted((table.of, table.column) for table in config.tables.others.values())
    return _hash([__version__, tree, ids])


_BUT_BUCKETS = {name for name in Negatives.model_fields if name != "bucket_minutes"}


def _check_keys(study: Study) -> None:
    """Refuses what no grid or arm may set, and what both set."""
    for key in study.grid:
        if _section(key) in ELSEWHERE:
            raise ConfigError(f"study.grid: {key} cannot vary", ELSEWHERE[_section(key)])
        if _section(key) in OF_DATA:
            raise ConfigError(
                f"study.grid: {key} cannot vary: a grid has one dataset",
                "set it in study.arms, each of which may have its own",
            )
    for name, arm in study.arms.items():
        for key in settings_in(arm.set):
            where = f"study.arms.{name}.set: {key}"
            if _section(key) in ELSEWHERE:
                raise ConfigError(f"{where} cannot vary", ELSEWHERE[_section(key)])
            for other in study.grid:
                if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                    raise ConfigError(f"{where} is set by the grid's {other} too", "drop one")


def _contrasts(study: Study, arms: Sequence[Arm]) -> list[Contrast]:
    """The contrasts, each for every combination of the grid where it is of named arms."""
    known, found = {arm.name for arm in arms}, []
    for name, weights in study.contrasts.items():
        if name in known or name in study.arms:
            raise ConfigError(f"study.contrasts: {name} is an arm's name", "choose another")
        if study.arms and set(weights) <= set(study.arms):
            for chosen in itertools.product(*study.grid.values()):
                values = dict(zip(study.grid, chosen, strict=True))
                place = name_of(study.grid, values) if len(arms) > len(study.arms) else ""
                dimensions = dimensions_of(study)
                found.append(
                    Contrast(
                        f"{name}, {place}" if place else name,
                        {
                            name_of(dimensions, {ARM: each} | values): weight
                            for each, weight in weights.items()
                        },
                    )
                )
        elif set(weights) <= known:
            found.append(Contrast(name, weights))
        else:
            missing = next(each for each in weights if each not in (study.arms or known))
            raise ConfigError(
                f"study.contrasts.{name}: there is no arm {missing!r}",
                f"choose of {', '.join(study.arms or known)}",
            )
    return found


def _rounds(config: Config) -> list[int]:
    halving, last = config.study.halving, config.finetune.epochs
    if halving is None:
        return [last]
    varied = [
        *config.study.grid,
        *(key for arm in config.study.arms.values() for key in settings_in(arm.set)),
    ]
    if "finetune.epochs" in varied:
        key = "grid" if "finetune.epochs" in config.study.grid else "arms"
        raise ConfigError(
            f"study.{key}: finetune.epochs varies, and study.halving sets it", "drop one of them"
        )
    if halving.epochs[-1] >= last:
        raise ConfigError(
            f"study.halving.epochs: {halving.epochs[-1]} epochs are not fewer than the last "
            f"round's, finetune.epochs={last}",
            "name fewer epochs",
        )
    return [*halving.epochs, last]


def _section(key: str) -> str:
    return key.partition(".")[0]


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
