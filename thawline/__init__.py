"""Thawline: recommenders whose ID embedding tables survive more than one epoch.

For a training loop of your own (docs/engine.md): `LocalTable`, `TableGroup`, `make_optimizer` and
`Prefetcher`. They are loaded when they are first asked for, so that `import thawline` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thawline.tables import LocalTable, TableGroup, make_optimizer
    from thawline.training.prefetch import Prefetcher

__version__ = "0.1.0"

__all__ = ["LocalTable", "Prefetcher", "TableGroup", "make_optimizer"]

_HOMES = {"Prefetcher": "thawline.training.prefetch"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'thawline' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "thawline.tables")), name)
