"""The dimensions of a study: their values as options and baselines spell them, names of choices.

A dimension is a config key of the grid, or `ARM`, whose values are the names of `study.arms`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from thawline.errors import ConfigError

ARM = "arm"
"""The dimension of the named arms."""

Dimensions = Mapping[str, Sequence[Any]]


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


def baseline_values(dimensions: Dimensions, text: str | None) -> dict[str, Any]:
    """What the baseline fixes, by dimension.

    Args:
        dimensions: Of the study.
        text: As `study.baseline` has it. None: the first of the named arms, each with its own
            values of the grid; without named arms, the first value of every key.

    Raises:
        ConfigError: A value that no dimension has, or that several have.
    """
    named = dimensions.get(ARM, ())
    if text is None:
        return {ARM: named[0]} if named else {key: own[0] for key, own in dimensions.items()}
    if text in named:
        return {ARM: text}
    known = ", ".join(
        f"{key}={as_text(value)}" for key, values in dimensions.items() for value in values
    )
    found: dict[str, Any] = {}
    for part in split_values(text):
        key, equals, value = part.partition("=")
        keys = [key.strip()] if equals and key.strip() in dimensions else list(dimensions)
        spelt = value.strip() if equals and key.strip() in dimensions else part
        # A name is a name, even where YAML would read a number.
        wanted = {name: spelt if name == ARM else _value(spelt, part) for name in keys}
        keys = [name for name in keys if wanted[name] in dimensions[name]]
        if not keys:
            raise ConfigError(
                f"study.baseline: the {'study' if named else 'grid'} has no {part!r}",
                f"choose of {known}" if known else "give arms or a grid",
            )
        if len(keys) > 1:
            raise ConfigError(
                f"study.baseline: {part!r} is a value of {' and of '.join(keys)}",
                f"write {keys[0]}={part}",
            )
        found[keys[0]] = wanted[keys[0]]
    return found


def name_of(dimensions: Dimensions, values: Mapping[str, Any]) -> str:
    """What varies of a choice, with as much of a key as tells it from the others.

    Args:
        dimensions: Of the study.
        values: By dimension.
    """
    varied = [key for key, options in dimensions.items() if len(options) > 1 or key == ARM]
    varied = varied or list(dimensions)
    ends = [key.rpartition(".")[2] for key in varied]
    parts = []
    for key, end in zip(varied, ends, strict=True):
        text = as_text(values[key])
        short = end if ends.count(end) == 1 else key
        parts.append(text if key in (ARM, "finetune.recipe") else f"{short} {text}")
    return ", ".join(parts) or "the config"


def as_text(value: Any) -> str:
    """A value for a reader: a text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _value(text: str, option: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option!r} holds no YAML value: {text}", "quote it") from error
