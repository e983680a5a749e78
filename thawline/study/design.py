"""What a study runs: arms from a grid, trials from arms and seeds, and which arms are compared."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from thawline import __version__
from thawline.config import Config, Study, dump_config, parse_config
from thawline.errors import ConfigError

ELSEWHERE = {
    "seed": "give study.seeds (--seeds)",
    "workdir": "give study a folder with --out",
    "study": "a study is no part of itself",
    "tracking": "trials of one study are tracked in one place",
    "simulate": "a study has one dataset; run one for each",
    "events": "a study has one dataset; run one for each",
    "items": "a study has one dataset; run one for each",
    "windows": "a study has one dataset; run one for each",
}
"""Sections that no grid may vary, and what to do instead."""

UNREAD = ("workdir", "tracking", "runtime", "study", "simulate", "events", "audit")
"""Sections that decide no figure of a trial; the log is known by the version of the dataset."""

PRETRAINED_BY = ("dim", "layers", "heads", "ffn", "dropout", "checkpoint_activations")
"""Keys of `model` that pretraining reads."""


@dataclass(frozen=True)
class Arm:
    """One combination of the grid's values."""

    name: str
    values: Mapping[str, Any]
    """By key, in the grid's order."""
    baseline: str
    """Name of the arm that it is compared with; its own where it is one."""


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
    rounds: Sequence[int]
    """Epochs of each round; the last is the one that counts. More than one with halving."""
    _config: Config

    @classmethod
    def of(cls, config: Config) -> Design:
        """Lays out the study that a config asks for.

        Raises:
            ConfigError: A key or a value that cannot be, or a baseline that the grid does not have;
                the message names the key.
        """
        study = config.study
        for key in study.grid:
            section = key.partition(".")[0]
            if section in ELSEWHERE:
                raise ConfigError(f"study.grid: {key} cannot vary", ELSEWHERE[section])
        baseline = baseline_values(study.grid, study.baseline)
        combinations = [
            dict(zip(study.grid, values, strict=True))
            for values in itertools.product(*study.grid.values())
        ]
        names = [_name(study.grid, values) for values in combinations]
        arms = [
            Arm(name, values, _name(study.grid, values | baseline))
            for name, values in zip(names, combinations, strict=True)
        ]
        return cls(study, arms, _rounds(config), config)

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

    def _config_of(self, text: str, arm: Arm, epochs: int | None) -> Config:
        changes = [f"{key}={json.dumps(value)}" for key, value in arm.values.items()]
        if epochs is not None and len(self.rounds) > 1:
            changes.append(f"finetune.epochs={epochs}")
        # The study compares the arms with each other, whatever is registered.
        return parse_config(
            text, [*changes, "gate.champion=none"], source=f"study.grid: the arm {arm.name}"
        )


def parse_grid(options: Iterable[str]) -> dict[str, list[Any]]:
    """The grid of `key=value,value` options; commas within brackets or quotes part no values.

    Raises:
        ConfigError: An option without `=` or without a value, or a key that comes twice.
    """
    grid: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key = key.strip()
        if not equals or not key or not text.strip():
            raise ConfigError(
                f"--grid {option!r} has no values",
                "write e.g. --grid finetune.recipe=co-train,freeze-until-last",
            )
        if key in grid:
            raise ConfigError(f"--grid {key} comes twice", "give its values in one --grid")
        grid[key] = [_value(part, option) for part in split_values(text)]
    return grid


def split_values(text: str) -> list[str]:
    """The parts of a text between its commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def baseline_values(grid: Mapping[str, Sequence[Any]], text: str | None) -> dict[str, Any]:
    """What the baseline fixes, by key.

    Raises:
        ConfigError: A value that the grid does not have, or that several keys have.
    """
    if text is None:
        return {key: values[0] for key, values in grid.items()}
    known = ", ".join(f"{key}={_text(value)}" for key, values in grid.items() for value in values)
    found: dict[str, Any] = {}
    for part in split_values(text):
        key, equals, value = part.partition("=")
        if equals:
            wanted = _value(value, part)
            keys = [key.strip()] if wanted in grid.get(key.strip(), ()) else []
        else:
            wanted = _value(part, part)
            keys = [name for name, values in grid.items() if wanted in values]
        if not keys:
            raise ConfigError(
                f"study.baseline: the grid has no {part!r}",
                f"choose of {known}" if known else "give a grid",
            )
        if len(keys) > 1:
            raise ConfigError(
                f"study.baseline: {part!r} is a value of {' and of '.join(keys)}",
                f"write {keys[0]}={part}",
            )
        found[keys[0]] = wanted
    return found


def _rounds(config: Config) -> list[int]:
    halving, last = config.study.halving, config.finetune.epochs
    if halving is None:
        return [last]
    if "finetune.epochs" in config.study.grid:
        raise ConfigError(
            "study.grid: finetune.epochs varies, and study.halving sets it", "drop one of them"
        )
    if halving.epochs[-1] >= last:
        raise ConfigError(
            f"study.halving.epochs: {halving.epochs[-1]} epochs are not fewer than the last "
            f"round's, finetune.epochs={last}",
            "name fewer epochs",
        )
    return [*halving.epochs, last]


def _name(grid: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> str:
    """The values of the keys that vary, with as much of a key as tells it from the others."""
    varied = [key for key, options in grid.items() if len(options) > 1] or list(grid)
    ends = [key.rpartition(".")[2] for key in varied]
    parts = []
    for key, end in zip(varied, ends, strict=True):
        text = _text(values[key])
        short = end if ends.count(end) == 1 else key
        parts.append(text if key == "finetune.recipe" else f"{short} {text}")
    return ", ".join(parts) or "the config"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _value(text: str, option: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option!r} holds no YAML value: {text}", "quote it") from error


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
