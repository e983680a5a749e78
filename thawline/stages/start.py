"""The first stage of a pipeline: the config resolved and checked, the MLflow run opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import thawline
from thawline.config import Config, dump_config, parse_config
from thawline.data.sources import find_files
from thawline.stages.pipeline import check
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

    Raises:
        DataError: A path of the config names no file.
    """
    events = config.events
    if events.path is None:
        return "simulated"
    files = find_files(events.path)
    if events.truth is not None:
        files += find_files(events.truth, "events.truth")
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def code_version() -> str:
    """Thawline's version and a hash of its sources: right in an image and in a changed checkout."""
    root = Path(thawline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{thawline.__version__}+{digest.hexdigest()[:12]}"
