"""A study on one machine: a dataset, pretrained rows, every trial of the grid, and the report.

Everything lies in one folder, and what is there is not computed again:

```
dataset/            what all trials share
tables/<key>/       pretrained rows, one for each distinct pretraining
trials/<key>/       trial.yaml, trial.json, report.html and log.txt of each trial
trials.parquet  study.json  study.html
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.errors import DataError
from thawline.folders import locked_folder
from thawline.stages import pretrain, windows
from thawline.stages.study_files import Task, read_result
from thawline.stages.study_processes import Job, Result, Runner, run_jobs, run_process, threads_of
from thawline.stages.study_report import MADE, Outcome, check, report, score
from thawline.study.design import Arm, Design, Trial
from thawline.study.halving import survivors
from thawline.tracking import runs


@dataclass
class Standing:
    """Where one trial stands."""

    trial: str
    arm: str
    seed: int
    round: int
    status: str = "waiting"
    """`waiting`, `running`, `finished` or `failed`."""
    score: float | None = None
    """The study's metric."""
    seconds: float | None = None
    error: str = ""
    found: bool = False
    """It had been run before."""


Show = Callable[[Standing, Sequence[Standing]], None]
"""Gets the trial that has changed, and all of the rounds so far."""


def run(
    config: Config,
    out: str | Path,
    *,
    dataset: str | Path | None = None,
    runner: Runner | None = None,
    show: Show = lambda changed, standings: None,
) -> Outcome:
    """Runs what the config's `study` asks for into the folder `out`.

    Trials that are finished there are not run again, those that were killed go on, failed ones are
    tried again. A trial that fails stops no other. On Ctrl-C and SIGTERM the running ones save
    their checkpoints, and what is finished is reported.

    Args:
        config: Its `study` section is laid out; everything else is what the arms share.
        out: The study's folder; may hold trials of other grids over the same dataset.
        dataset: A dataset folder; None: `out/dataset`, which is built.
        runner: What runs one trial. None: a process for each.
        show: Told of each change, maybe in another thread.

    Raises:
        BusyError: Another process runs a study there.
        ConfigError: A grid, baseline or halving that cannot be; the message names the key.
        DataError: No trial came to an end.
        ThawlineError: The dataset or the pretrained rows cannot be made, or MLflow does not answer.
    """
    out = Path(out)
    design = check(config)
    design.require_one_dataset("so far, a study has one")
    at_once = config.study.jobs
    runner = runner or partial(run_process, threads=threads_of(at_once))
    with locked_folder(out):
        parent = runs.start_parent(config, "study")
        status = "FAILED"
        try:
            if dataset is None:
                dataset = out / "dataset"
                windows.run(config, dataset, parent_run_id=parent)
            version = Dataset.open(dataset).manifest.data_version
            study = _Run(config, design, out, Path(dataset), version, parent, runner, show)
            with runs.stage_run(config, "study", parent) as tracked:
                try:
                    study.rounds()
                finally:
                    outcome = study.report()
                for name in MADE:
                    tracked.log_artifact(out / name)
            status = "FINISHED"
        except (KeyboardInterrupt, runs.Terminated):
            status = "KILLED"
            raise
        finally:
            runs.finish_parent(config, parent, status)
    if not any(trial["status"] == "finished" for trial in outcome.facts["trials"]):
        raise DataError(
            f"no trial came to an end; the first one said: {outcome.failed[0]['error']}",
            f"see {out / 'trials'}",
        )
    return outcome


@dataclass
class _Run:
    """A study that runs."""

    config: Config
    design: Design
    out: Path
    dataset: Path
    data_version: str
    parent: str
    runner: Runner
    show: Show
    results: dict[str, Result] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    went_on: list[list[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rounds(self) -> None:
        """Runs round after round, each with the arms that the one before let go on."""
        arms, study = list(self.design.arms), self.design.study
        for number, epochs in enumerate(self.design.rounds):
            trials = self.design.trials(epochs, arms)
            self._run(trials)
            if number + 1 < len(self.design.rounds) and study.halving is not None:
                kept = survivors(
                    {arm.name: self._mean(arm, trials) for arm in arms},
                    {arm.name: arm.baseline for arm in arms},
                    figure=study.metric,
                    eta=study.halving.eta,
                )
                self.went_on.append(kept)
                arms = [arm for arm in arms if arm.name in kept]

    def report(self) -> Outcome:
        """Of what came to an end so far."""
        return report(self.out, self.design, self.results.values(), self.went_on)

    def _run(self, trials: Sequence[Trial]) -> None:
        pending = []
        for trial in trials:
            key = trial.key(self.data_version)
            own = self.standings[key] = Standing(key, trial.arm.name, trial.seed, trial.epochs)
            known = read_result(self.out / "trials" / key)
            if known is not None and known["status"] == "finished":
                # Another grid may have called the same config by another name.
                known |= {"arm": trial.arm.name, "values": dict(trial.arm.values)}
                own.found = True
                self._ended(own, known)
            else:
                pending.append((key, trial))
        jobs = [
            Job(self._task(key, trial), trial.config, self.out / "trials" / key)
            for key, trial in pending
        ]
        at_once = self.design.study.jobs
        # An exception from here would keep an open generator, and so the processes, alive.
        with closing(run_jobs(jobs, self.runner, at_once, self._started)) as ended:
            for job, result in ended:
                self._ended(self.standings[job.task.trial], result)

    def _task(self, key: str, trial: Trial) -> Task:
        return Task(
            trial=key,
            arm=trial.arm.name,
            values=dict(trial.arm.values),
            seed=trial.seed,
            round=trial.epochs,
            dataset=str(self.dataset.absolute()),
            table=str(self._table(trial)),
            parent_run_id=self.parent,
            keep_models=self.design.study.keep_models,
        )

    def _table(self, trial: Trial) -> Path:
        """The pretrained rows of a trial, which are made where they are new."""
        folder = (self.out / "tables" / trial.table_key(self.data_version)).absolute()
        if not (folder / "table.json").exists():
            config = trial.config.model_copy(update={"seed": trial.table_seed})
            pretrain.run(config, self.dataset, folder, parent_run_id=self.parent)
        return folder

    def _started(self, job: Job) -> None:
        own = self.standings[job.task.trial]
        own.status = "running"
        self._tell(own)

    def _ended(self, own: Standing, result: Result) -> None:
        own.status, own.error = result["status"], result.get("error") or ""
        own.seconds = result.get("seconds")
        own.score = score(self.design, result)
        self.results[own.trial] = result
        self._tell(own)

    def _tell(self, changed: Standing) -> None:
        with self.lock:
            self.show(changed, list(self.standings.values()))

    def _mean(self, arm: Arm, trials: Sequence[Trial]) -> float | None:
        keys = [trial.key(self.data_version) for trial in trials if trial.arm == arm]
        scores = [self.standings[key].score for key in keys]
        known = [value for value in scores if value is not None]
        return sum(known) / len(known) if known else None
