"""A component's README, made from its docstring and signature."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import components

ARTIFACT_PREFIX = "system."


def readme_path(component: Any) -> Path:
    """Where the README of a component belongs."""
    return Path(components.__file__).parent / component.name / "README.md"


def readme(component: Any) -> str:
    """The README of a component, as Markdown."""
    spec = component.component_spec
    title, _, rest = spec.description.partition("\n")
    parts = [f"# {component.name}", title]
    if rest:
        parts.append(" ".join(rest.split()))
    parts += ["## Inputs", _inputs(spec.inputs)] if spec.inputs else []
    parts += ["## Outputs", _outputs(spec.outputs)] if spec.outputs else []
    parts.append(
        "Made from the docstring of `component.py` by `thawline compile`; change it there."
    )
    return "\n\n".join(parts) + "\n"


def _inputs(items: Mapping[str, Any]) -> str:
    rows = ["| name | type | default | what |", "|---|---|---|---|"]
    for name, item in items.items():
        default = f"`{item.default!r}`" if item.optional and item.default is not None else ""
        rows.append(f"| `{name}` | {_kind(item)} | {default} | {_what(item)} |")
    return "\n".join(rows)


def _outputs(items: Mapping[str, Any]) -> str:
    rows = ["| name | type | what |", "|---|---|---|"]
    rows += [f"| `{name}` | {_kind(item)} | {_what(item)} |" for name, item in items.items()]
    return "\n".join(rows)


def _kind(item: Any) -> str:
    return str(item.type).split("@")[0].removeprefix(ARTIFACT_PREFIX)


def _what(item: Any) -> str:
    return " ".join((item.description or "").split()).replace("|", "\\|")
