"""The config as text: YAML and `key=value` overrides in, YAML out, errors that name the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from thawline.config.base import Section
from thawline.config.tree import Config
from thawline.errors import ConfigError


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Parses YAML text and `key=value` overrides into a `Config`.

    Args:
        text: YAML; empty text is an empty mapping.
        overrides: `dotted.key=value` strings; values are YAML (`3`, `true`, `[1, 2]`, `null`).
        source: Named in errors, usually the file.

    Raises:
        ConfigError: Text that is not YAML, an unknown key, a value of the wrong kind.
    """
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}", "fix the syntax") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds a {type(tree).__name__}", "write keys and values")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source), _remedy(error)) from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file (see `parse_config`); relative paths stay relative to the cwd."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "check --config") from error
    return parse_config(text, overrides, source=str(path))


def dump_config(config: Config) -> str:
    """The whole config as YAML text that `parse_config` reads back to an equal `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", key.strip()):
        raise ConfigError(f"override {override!r} is not key=value", "write e.g. finetune.epochs=3")
    *sections, last = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {section} is not a section", "check the key")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r} is not YAML: {error}", "quote it") from error


def _explain(error: ValidationError, source: str) -> str:
    lines = [f"{source} cannot be used:"]
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        lines.append(f"  {where}: {message}")
    return "\n".join(lines)


def _remedy(error: ValidationError) -> str:
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            *parents, key = [str(part) for part in item["loc"]]
            known = _keys_at(parents)
            near = difflib.get_close_matches(key, known, n=1)
            if near:
                return f"did you mean {'.'.join([*parents, near[0]])}?"
            if known:
                return f"known keys there: {', '.join(known)}"
    return "see `thawline config --schema` for every key"


def _keys_at(parents: Sequence[str]) -> list[str]:
    section: Any = Config
    for name in parents:
        field = section.model_fields.get(name) if _is_section(section) else None
        if field is None:
            return []
        options = [field.annotation, *get_args(field.annotation)]
        section = next((option for option in options if _is_section(option)), None)
    return list(section.model_fields) if _is_section(section) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
