"""The first stage of a pipeline: the config resolved and checked, the MLflow run opened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import thawline
from thawline.config import Config, dump_config, parse_config
from thawline.data.sources import find_files
from thawline.data.storage import is_remote, list_files
from thawline.stages.check import check
from thawline.tracking import pipeline

UNCHANGED = ("", -1)
"""Values of an input that leave the config as it is."""


@dataclass(frozen=True)
class Started:
    """What the other stages need to know of the run."""

    config: str
    """The whole config as YAML, with every default."""
    parent_run_id: str
    source_version: str
    """Changes with the files of the log: their names, sizes and times."""
    code_version: str
    """Changes with the code of Thawline."""


def run(text: str, changes: Mapping[str, str | int | float]) -> Started:
    """Resolves the config, checks what can be checked before training and opens the MLflow run.

    Args:
        text: The config as YAML.
        changes: Dotted config keys to the values that replace them; a value in `UNCHANGED`
            replaces nothing.

    Raises:
        ThawlineError: The config, the recipe or the tracking server cannot be used, or there is
            no log.
    """
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in changes.items() if value not in UNCHANGED
    ]
    config = parse_config(text, overrides)
    source = source_version(config)
    check(config)
    return Started(
        config=dump_config(config),
        parent_run_id=pipeline.open_parent(config, "retrain"),
        source_version=source,
        code_version=code_version(),
    )


def source_version(config: Config) -> str:
    """A hash of the names, sizes and times of the log's files; `simulated` where there are none.

    Of a table nothing is known before it is read: it counts as new each time.

    Raises:
        DataError: A path of the config names no file.
    """
    events = config.events
    if events.table is not None:
        return f"table at {time.time_ns()}"
    if events.path is None:
        return "simulated"
    digest = hashlib.sha256()
    for key, path in (("events.path", events.path), ("events.truth", events.truth)):
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
