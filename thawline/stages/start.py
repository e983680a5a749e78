"""The first stage of a pipeline: the config resolved and checked, the MLflow run opened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import thawline
from thawline.config import Config, Simulate, dump_config, parse_config
from thawline.data.sources import find_files
from thawline.data.storage import is_remote, list_files
from thawline.stages.check import check
from thawline.tracking import pipeline
from thawline.tracking.fetch import REGISTERED, find_version

CachedStage = Literal["windows", "pretrain", "finetune"]
ALL: tuple[str, ...] = ("*",)
SERVER = ("uri", "experiment")
READ_BY: dict[CachedStage, dict[str, tuple[str, ...]]] = {
    "windows": {
        "model": (),
        "pretrain": (),
        "finetune": ("batch_size",),
        "evaluation": (),
        "gate": (),
        "tracking": SERVER,
        "study": (),
    },
    "pretrain": {"finetune": (), "evaluation": (), "gate": (), "tracking": SERVER, "study": ()},
    "finetune": {"pretrain": (), "gate": ("holdout",), "tracking": SERVER, "study": ()},
}
"""Keys that a stage reads of each section of which it does not read all."""
UNCHANGED = ("", -1)
"""Values of an input that leave the config as it is."""


@dataclass(frozen=True)
class Started:
    """What the other stages need to know of the run."""

    config: str
    """The whole config as YAML, with every default."""
    windows_config: str
    pretrain_config: str
    finetune_config: str
    """The same, with what a stage does not read at its default; see `for_stage`."""
    parent_run_id: str
    source_version: str
    """Changes with the files of the log and what goes with it: their names, sizes and times."""
    code_version: str
    """Changes with the code of Thawline."""


def run(
    text: str,
    changes: Mapping[str, str | int | float],
    *,
    start_from_champion: bool = False,
) -> Started:
    """Resolves the config, checks what can be checked before training and opens the MLflow run.

    Args:
        text: The config as YAML.
        changes: Dotted config keys to the values that replace them; a value in `UNCHANGED`
            replaces nothing.
        start_from_champion: Whether to go on from the registered model that has
            `tracking.alias`: with its catalog (`windows.previous`) and from its rows
            (`pretrain.start_from`).

    Raises:
        ThawlineError: The config, the recipe or the tracking server cannot be used, or there is
            no log.
    """
    config = parse_config(text, overrides(changes))
    if start_from_champion:
        config = from_champion(config)
    source = source_version(config)
    check(config)
    config = pinned(config)
    return Started(
        config=dump_config(config),
        windows_config=dump_config(for_stage(config, "windows")),
        pretrain_config=dump_config(for_stage(config, "pretrain")),
        finetune_config=dump_config(for_stage(config, "finetune")),
        parent_run_id=pipeline.open_parent(config, "retrain"),
        source_version=source,
        code_version=code_version(),
    )


def overrides(changes: Mapping[str, str | int | float]) -> list[str]:
    """The changes of inputs as overrides of the config's text; see `run`."""
    return [
        f"{key}={json.dumps(value)}" for key, value in changes.items() if value not in UNCHANGED
    ]


def from_champion(config: Config) -> Config:
    """The config of a run that goes on from the registered champion."""
    champion = f"models:/{config.tracking.model_name}@{config.tracking.alias}"
    return _replaced(
        config, {"windows": {"previous": champion}, "pretrain": {"start_from": champion}}
    )


def pinned(config: Config) -> Config:
    """The config with each registered model that it starts from named by its version.

    An alias moves while the config's text stays, and by that text Kubeflow knows a task again.
    Where no version has the alias yet, nothing is named.

    Raises:
        TrackingError: The server's refusal, or a version that does not exist.
    """
    changes: dict[str, dict[str, str | None]] = {}
    for section, key in (("windows", "previous"), ("pretrain", "start_from")):
        uri = getattr(getattr(config, section), key)
        if uri is not None and uri.startswith(REGISTERED):
            found = find_version(config, uri)
            name = None if found is None else f"{REGISTERED}{found.name}/{found.version}"
            changes[section] = {key: name}
    return _replaced(config, changes)


def for_stage(config: Config, stage: CachedStage) -> Config:
    """The config with what a cached stage does not read at its default.

    Kubeflow knows a task again by its inputs: with the whole config, another bound of the gate
    would train everything anew.
    """
    defaults, kept = Config(simulate=Simulate()), READ_BY[stage]
    sections: dict[str, Any] = {}
    for name in type(config).model_fields:
        own, default = getattr(config, name), getattr(defaults, name)
        keys = kept.get(name, ALL)
        sections[name] = (
            own
            if keys is ALL
            else default.model_copy(update={key: getattr(own, key) for key in keys})
        )
    return config.model_copy(update=sections)


def _replaced(config: Config, changes: Mapping[str, Mapping[str, str | None]]) -> Config:
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=dict(own))
            for section, own in changes.items()
        }
    )


def source_version(config: Config) -> str:
    """A hash of the names, sizes and times of what `windows` reads; `simulated` if that is nothing.

    Of a table nothing is known before it is read: it counts as new each time.

    Raises:
        DataError: A path of the config names no file.
    """
    events = config.events
    if events.table is not None:
        return f"table at {time.time_ns()}"
    previous = config.windows.previous
    read = {
        "events.path": events.path,
        "events.truth": events.truth,
        "items.path": config.items.path,
        "windows.previous": None if previous and previous.startswith(REGISTERED) else previous,
    }
    if not any(read.values()):
        return "simulated"
    digest = hashlib.sha256()
    for key, path in read.items():
        for entry in [path] if isinstance(path, str) else path or ():
            for name, size, changed in _files(entry, key):
                digest.update(f"{name}\0{size}\0{changed}\0".encode())
    return digest.hexdigest()[:16]


def _files(path: str, key: str) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of each file that a path names."""
    if is_remote(path):
        for entry in list_files(path, key):
            yield f"{path}\0{entry.path}", entry.size, entry.changed
    else:
        for file in find_files(path, key):
            status = file.stat()
            yield str(file), status.st_size, status.st_mtime_ns


def code_version() -> str:
    """Thawline's version and a hash of its sources: right in an image and in a changed checkout."""
    root = Path(thawline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{thawline.__version__}+{digest.hexdigest()[:12]}"
