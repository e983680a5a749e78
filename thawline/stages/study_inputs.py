"""What the trials of a study start from: datasets and pretrained rows, each distinct one made once.

`python -m thawline.stages.study_inputs <folder>` makes one that `write_task` described.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.data.manifest import Dataset, Split
from thawline.errors import BusyError, ConfigError, DataError, ThawlineError, TrackingError
from thawline.stages import pretrain, windows
from thawline.stages.study_files import Task, write_result
from thawline.stages.study_processes import Job, run_jobs, run_process, serve, threads_of
from thawline.stages.study_warm import Warm
from thawline.study.design import Trial, data_key

BESIDE = ".job"
"""Ending of the folder with the log of what a process makes; it goes once that is made."""


@dataclass(frozen=True)
class Built:
    """A dataset that is there."""

    folder: Path
    version: str


@dataclass
class Inputs:
    """The datasets and tables of a study's folder."""

    out: Path
    parent: str
    """The MLflow run of the study."""
    at_once: int
    """How many are made at a time."""
    given: Path | None = None
    """A dataset that all trials are to use."""
    warm: Warm | None = None
    built: dict[str, Built | ThawlineError] = field(default_factory=dict)
    """By `data_key`, what became of each dataset."""

    def dataset(self, trial: Trial) -> Built | ThawlineError:
        """The dataset of a trial, once `datasets` has made it, or why there is none."""
        return self.built[data_key(trial.config)]

    def datasets(self, trials: Sequence[Trial]) -> None:
        """Makes the datasets of trials that are not known yet.

        Raises:
            ThawlineError: None could be made; the first one's error.
        """
        first = {data_key(trial.config): trial for trial in reversed(trials)}
        first = {key: trial for key, trial in first.items() if key not in self.built}
        if self.given is not None:
            found = Built(self.given, Dataset.open(self.given).manifest.data_version)
            self.built |= dict.fromkeys(first, found)
            return
        folders = {key: self.out / "datasets" / key for key in first}
        errors = self._make(
            [
                _job(key, trial, "the dataset", dataset=folders[key], parent=self.parent)
                for key, trial in reversed(first.items())
            ]
        )
        for key, folder in folders.items():
            self.built[key] = errors.get(key) or Built(
                folder, Dataset.open(folder).manifest.data_version
            )
        _require_any(self.built, errors)

    def require(self, action: str | None, holdout: Split) -> None:
        """Fails where a dataset lacks what the study is judged by.

        Args:
            action: Of the metric; None: the primary one, which each has.
            holdout: Of the metric.

        Raises:
            ConfigError: Names the key.
        """
        for built in self.built.values():
            if not isinstance(built, Built):
                continue
            manifest = Dataset.open(built.folder).manifest
            if action is not None and action not in manifest.actions:
                raise ConfigError(
                    f"study.action: {built.folder} has no action {action!r}",
                    f"choose of {', '.join(manifest.actions)}",
                )
            if not manifest.requests.get(holdout):
                raise ConfigError(
                    f"study.holdout: {built.folder} has no requests in {holdout}",
                    "choose the other hold-out, or hold requests out (windows.holdout_users, "
                    "windows.test_days)",
                )

    def table(self, trial: Trial, built: Built) -> Path:
        """The folder of a trial's pretrained rows."""
        return (self.out / "tables" / trial.table_key(built.version)).absolute()

    def tables(self, trials: Iterable[tuple[Trial, Built]]) -> dict[Path, ThawlineError]:
        """Makes the pretrained rows of trials that are not there.

        Args:
            trials: Each with its dataset.

        Returns:
            Why rows could not be made, by their folder.

        Raises:
            ThawlineError: None could be made; the first one's error.
        """
        first: dict[Path, tuple[Trial, Built]] = {}
        for trial, built in trials:
            first.setdefault(self.table(trial, built), (trial, built))
        jobs = []
        for folder, (trial, built) in first.items():
            if not (folder / "table.json").exists():
                # Seeds may share the rows of another one.
                seed = {"seed": trial.table_seed}
                own = replace(trial, config=trial.config.model_copy(update=seed))
                jobs.append(
                    _job(
                        folder.name,
                        own,
                        "the pretrained rows",
                        dataset=built.folder,
                        table=folder,
                        parent=self.parent,
                    )
                )
        errors = self._make(jobs)
        _require_any(first, errors)
        return {folder: errors[folder.name] for folder in first if folder.name in errors}

    def _make(self, jobs: Sequence[Job]) -> dict[str, ThawlineError]:
        """Makes all; gives what went wrong, by key."""
        if len(jobs) > 1 and self.at_once > 1:
            return self._in_processes(jobs)
        errors: dict[str, ThawlineError] = {}
        for job in jobs:
            try:
                _make(job.config, job.task)
            except (BusyError, TrackingError):
                raise
            except ThawlineError as error:
                errors[job.task.trial] = error
        return errors

    def _in_processes(self, jobs: Sequence[Job]) -> dict[str, ThawlineError]:
        at_once = min(self.at_once, len(jobs))
        runner = partial(
            run_process,
            threads=threads_of(at_once),
            module="thawline.stages.study_inputs",
            warm=self.warm,
        )
        errors: dict[str, ThawlineError] = {}
        with closing(run_jobs(jobs, runner, at_once, lambda job: None)) as ended:
            for job, result in ended:
                if result["status"] == "finished":
                    shutil.rmtree(job.folder)
                else:
                    errors[job.task.trial] = DataError(result["error"], result["remedy"])
        return errors


def _job(
    key: str, trial: Trial, what: str, *, dataset: Path, parent: str, table: Path | None = None
) -> Job:
    task = Task(
        trial=key,
        arm=f"{what} of {trial.arm.name}",
        values={},
        seed=trial.config.seed,
        round=0,
        dataset=str(dataset.absolute()),
        table="" if table is None else str(table),
        parent_run_id=parent,
    )
    made = table or dataset
    return Job(task, trial.config, made.with_name(f"{made.name}{BESIDE}"))


def _make(config: Config, task: Task) -> None:
    """Makes a dataset or, where the task names a table, its rows."""
    if task.table:
        pretrain.run(config, task.dataset, task.table, parent_run_id=task.parent_run_id)
    else:
        windows.run(config, task.dataset, parent_run_id=task.parent_run_id)


def _require_any(wanted: Mapping[Any, Any], errors: Mapping[str, ThawlineError]) -> None:
    if errors and len(errors) == len(wanted):
        raise next(iter(errors.values()))


def _work(config: Config, task: Task, folder: Path) -> None:
    _make(config, task)
    write_result(folder, task.result("finished"))


def main(folder: Path) -> None:
    """Makes what `write_task` described; an error of any kind becomes its result."""
    serve(folder, _work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
