"""The config as text: YAML and `key=value` overrides in, YAML out, errors that name the key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

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


def settings_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys and values, those of sections written out: `{a: {b: 1}}` is `{a.b: 1}`.

    So a section sets the keys that it names, and the others stay; mappings that are no sections,
    such as `finetune.schedule`, are values.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        kind: Any = Config
        for name in key.split("."):
            kind = _kind_of(kind, name)
        if _is_section(kind) and isinstance(value, dict) and value:
            found |= settings_in({f"{key}.{name}": own for name, own in value.items()})
        else:
            found[key] = value
    return found


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
        place = [str(part) for part in item["loc"]]
        if item["type"] == "missing":
            # A table of one's own may be a misspelt `item`.
            place.pop()
        elif item["type"] != "extra_forbidden":
            continue
        *parents, key = place or [""]
        known = _keys_at(parents)
        near = difflib.get_close_matches(key, known, n=1)
        if near and key not in known:
            return f"did you mean {'.'.join([*parents, near[0]])}?"
        if known and item["type"] == "extra_forbidden":
            return f"known keys there: {', '.join(known)}"
    return "see `thawline config --schema` for every key"


def _keys_at(parents: Sequence[str]) -> list[str]:
    kind: Any = Config
    for name in parents:
        kind = _kind_of(kind, name)
    return list(kind.model_fields) if _is_section(kind) else []


def _kind_of(kind: Any, key: str) -> Any:
    """The section, or the mapping of names of one's own to sections, at a key of another."""
    if _is_section(kind):
        field = kind.model_fields.get(key)
        kind = field.annotation if field else get_type_hints(kind).get("__pydantic_extra__")
        mappings = [option for option in (kind, *get_args(kind)) if get_origin(option) is dict]
        if field and mappings:
            return mappings[0]
    options = (kind, *get_args(kind))
    return next((option for option in options if _is_section(option)), None)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
