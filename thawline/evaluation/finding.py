"""A sentence of a report that a reader should know, and what such sentences are made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Tree = Mapping[str, Any]

Level = Literal["warning", "note"]


class Finding(NamedTuple):
    """One thing that a reader should know."""

    level: Level
    holdout: str
    """The hold-out that it is about; empty for training."""
    text: str


def primary(tree: Tree) -> str | None:
    """The primary action of a metrics tree; None where nothing was scored."""
    return next(iter(tree["pooled"]), None)


def ends(tree: Tree, action: str, name: str, figure: str) -> tuple[float, float] | None:
    """The 95 % interval of a figure, `pooled` or of a tier; None where there is none."""
    known = tree.get("intervals") or {}
    slices = known.get("pooled") if name == "pooled" else known.get("tiers", {}).get(name)
    found: Sequence[float] | None = ((slices or {}).get(action) or {}).get(figure)
    return (found[0], found[1]) if found else None
