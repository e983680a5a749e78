"""The files of a trial's folder: what it is to do, and what became of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config, dump_config
from thawline.errors import ThawlineError

TASK, CONFIG, RESULT, LOG = "task.json", "trial.yaml", "trial.json", "log.txt"
REPORT = "report.html"


@dataclass(frozen=True)
class Task:
    """What a trial needs to know beside its config."""

    trial: str
    """Its key: a name that the same inputs always get."""
    arm: str
    values: Mapping[str, Any]
    """Of the grid's keys."""
    seed: int
    round: int
    """Epochs of the round."""
    dataset: str
    table: str
    parent_run_id: str = ""
    keep_models: bool = False
    pages: bool = True
    """Whether it gets the evaluation's page."""
    starts: tuple[str, ...] = ()
    """Epochs shared with other trials that it may begin from, the longest first."""
    until: int | None = None
    """Of epochs that are to be shared: how many."""

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.arm}, seed {self.seed}"

    def start(self) -> str | None:
        """The longest of `starts` that is there: what was to train another one may have failed."""
        return next((start for start in self.starts if Path(start).exists()), None)

    def result(self, status: str, **more: Any) -> dict[str, Any]:
        """What `trial.json` holds: which trial it is, and what became of it."""
        own = ("trial", "arm", "values", "seed", "round")
        return {name: getattr(self, name) for name in own} | {"status": status} | more

    def failed(self, error: ThawlineError) -> dict[str, Any]:
        """The result of a trial that an error ended."""
        return self.result("failed", error=error.what, remedy=error.remedy)


def write_task(folder: Path, task: Task, config: Config) -> None:
    """Writes what `read_task` and the process of the job read; an older result goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)
    (folder / TASK).write_text(json.dumps(asdict(task), indent=2), encoding="utf-8")
    (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")


def read_task(folder: Path) -> Task:
    """What `write_task` wrote, without the config."""
    tree = json.loads((folder / TASK).read_text(encoding="utf-8"))
    return Task(**tree | {"starts": tuple(tree["starts"])})


def read_result(folder: Path) -> dict[str, Any] | None:
    """What became of a trial; None where it has not come to an end."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes `trial.json`, whole or not at all."""
    partial = folder / f".{RESULT}.partial"
    partial.write_text(json.dumps(result, indent=2), encoding="utf-8")
    partial.rename(folder / RESULT)


def gather(folders: Iterable[str | Path], out: str | Path) -> int:
    """Copies what trials found, without their models, into folders under `out`; says how many."""
    count = 0
    for folder in folders:
        for result in sorted(Path(folder).rglob(RESULT)):
            known = json.loads(result.read_text(encoding="utf-8"))
            own = Path(out) / known["trial"]
            own.mkdir(parents=True, exist_ok=True)
            for name in (RESULT, REPORT):
                if (result.parent / name).exists():
                    shutil.copyfile(result.parent / name, own / name)
            count += 1
    return count
