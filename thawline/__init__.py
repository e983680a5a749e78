"""Thawline: recommenders whose ID embedding tables survive more than one epoch.

The stages of the pipeline, from a log to a report (docs/library.md): `load_config` or `Config`,
then `build_windows`, `pretrain`, `finetune`, `evaluate` and `register`, each from folders to a
folder, or `run` for all of them; `score` for requests in files. What they leave is read by
`Dataset`, `RequestReader` and `Bundle`, a trained model. Errors that a user can act on are
`ThawlineError`.

For a training loop of your own (docs/engine.md): `LocalTable`, `TableGroup`, `make_optimizer` and
`Prefetcher`.

Each is loaded when it is first asked for, so that `import thawline` stays quick and reading a
config loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thawline.config import Config, load_config
    from thawline.data.batches import RequestReader
    from thawline.data.manifest import Dataset
    from thawline.errors import ThawlineError
    from thawline.model.bundle import Bundle
    from thawline.stages.evaluate import run as evaluate
    from thawline.stages.finetune import run as finetune
    from thawline.stages.pipeline import run
    from thawline.stages.pretrain import run as pretrain
    from thawline.stages.register import run as register
    from thawline.stages.score import run as score
    from thawline.stages.windows import run as build_windows
    from thawline.tables import LocalTable, TableGroup, make_optimizer
    from thawline.training.prefetch import Prefetcher

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "thawline.model.bundle",
    "Config": "thawline.config",
    "Dataset": "thawline.data.manifest",
    "LocalTable": "thawline.tables",
    "Prefetcher": "thawline.training.prefetch",
    "RequestReader": "thawline.data.batches",
    "TableGroup": "thawline.tables",
    "ThawlineError": "thawline.errors",
    "build_windows": "thawline.stages.windows:run",
    "evaluate": "thawline.stages.evaluate:run",
    "finetune": "thawline.stages.finetune:run",
    "load_config": "thawline.config",
    "make_optimizer": "thawline.tables",
    "pretrain": "thawline.stages.pretrain:run",
    "register": "thawline.stages.register:run",
    "run": "thawline.stages.pipeline:run",
    "score": "thawline.stages.score:run",
}
"""Where each public name lives, and what it is called there if not the same."""

__all__ = [
    "Bundle",
    "Config",
    "Dataset",
    "LocalTable",
    "Prefetcher",
    "RequestReader",
    "TableGroup",
    "ThawlineError",
    "build_windows",
    "evaluate",
    "finetune",
    "load_config",
    "make_optimizer",
    "pretrain",
    "register",
    "run",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'thawline' has no attribute {name!r}")
    module, _, there = _HOMES[name].partition(":")
    return getattr(import_module(module), there or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
