"""A study on one machine: datasets, pretrained rows, every trial, and the report.

Everything lies in one folder, and what is there is not computed again:

```
datasets/<key>/     one for each distinct dataset
tables/<key>/       pretrained rows, one for each distinct pretraining
prefixes/<key>/     epochs that several trials begin with (`study_prefix`)
trials/<key>/       trial.yaml, trial.json, report.html and log.txt of each trial
trials.parquet  study.json  study.html
```

Several studies may share the folder and have the last three files elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from thawline import logs
from thawline.config import Config
from thawline.errors import DataError
from thawline.folders import locked_folder
from thawline.stages.study_files import Task, read_result
from thawline.stages.study_inputs import Built, Inputs
from thawline.stages.study_prefix import with_prefixes
from thawline.stages.study_processes import Job, Result, Runner, run_jobs, run_process, threads_of
from thawline.stages.study_report import MADE, Outcome, check, report, score
from thawline.stages.study_warm import warmed
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
    report_to: str | Path | None = None,
    facts: Mapping[str, Any] | None = None,
    runner: Runner | None = None,
    show: Show = lambda changed, standings: None,
) -> Outcome:
    """Runs what the config's `study` asks for into the folder `out`.

    Trials that are finished there are not run again, those that were killed go on, failed ones are
    tried again. A trial that fails stops no other, nor does a dataset that one arm alone has. On
    Ctrl-C and SIGTERM the running ones save their checkpoints, and what is finished is reported.

    Args:
        config: Its `study` section is laid out; everything else is what the arms share.
        out: The study's folder; may hold datasets and trials of other studies.
        dataset: A dataset folder for all trials. None: each distinct one is built in `out`.
        report_to: Gets `trials.parquet`, `study.json` and `study.html`. None: `out` does.
        facts: What `study.json` is to hold besides.
        runner: What runs one trial. None: a process for each.
        show: Told of each change, maybe in another thread.

    Raises:
        BusyError: Another process runs a study there.
        ConfigError: An arm, baseline or halving that cannot be, or an arm that varies the data
            though there is but the one that was given; the message names the key.
        DataError: No trial came to an end.
        ThawlineError: No dataset or no pretrained rows can be made, or MLflow does not answer.
    """
    out = Path(out)
    design = check(config)
    given = None if dataset is None else Path(dataset)
    if given is not None:
        design.require_one_dataset("a dataset was given for all arms")
    at_once = config.study.jobs
    threads = threads_of(at_once)
    with locked_folder(out), warmed(config, threads) as warm:
        runner = runner or partial(run_process, threads=threads, warm=warm)
        parent = runs.start_parent(config, "study")
        status = "FAILED"
        try:
            inputs = Inputs(out, parent, at_once, given, warm)
            inputs.datasets(design.trials())
            inputs.require(design.study.action, design.study.holdout)
            report_of = partial(report, Path(report_to or out), design, store=out, more=facts or {})
            study = _Run(design, out, inputs, parent, runner, show)
            with runs.stage_run(config, "study", parent) as tracked:
                try:
                    study.rounds()
                finally:
                    outcome = report_of(study.results.values(), study.went_on)
                for name in MADE:
                    tracked.log_artifact(outcome.folder / name)
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


Place = tuple[str, int, int]
"""Of a trial: arm, seed, round."""


@dataclass
class _Run:
    """A study that runs."""

    design: Design
    out: Path
    inputs: Inputs
    parent: str
    runner: Runner
    show: Show
    results: dict[Place, Result] = field(default_factory=dict)
    standings: dict[Place, Standing] = field(default_factory=dict)
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

    def _run(self, trials: Sequence[Trial]) -> None:
        jobs, same = self._jobs(trials)
        if self.design.study.share_prefix:
            jobs = with_prefixes(jobs, self.out / "prefixes")
        at_once = self.design.study.jobs
        # An exception from here would keep an open generator, and so the processes, alive.
        with closing(run_jobs(jobs, self.runner, at_once, partial(self._started, same))) as ended:
            for job, result in ended:
                if job.task.until is not None and result["status"] == "failed":
                    logs.say(f"study: {job.task.name}: trained by each: {result['error']}")
                for trial in same.get(job.task.trial, ()):
                    self._ended(trial, result)

    def _jobs(self, trials: Sequence[Trial]) -> tuple[list[Job], dict[str, list[Trial]]]:
        """What is to be run, and by key the trials that it is of: arms may resolve to one config.

        What was run before or cannot start has ended.
        """
        self.inputs.datasets(trials)
        same: dict[str, list[Trial]] = {}
        pending: dict[str, tuple[Trial, Built]] = {}
        for trial in trials:
            built = self.inputs.dataset(trial)
            key = trial.key(built.version if isinstance(built, Built) else "")
            self.standings[_place(trial)] = Standing(key, trial.arm.name, trial.seed, trial.epochs)
        for trial in trials:
            built, key = self.inputs.dataset(trial), self.standings[_place(trial)].trial
            if not isinstance(built, Built):
                self._ended(trial, self._task(key, trial).failed(built))
                continue
            known = read_result(self.out / "trials" / key)
            if known is not None and known["status"] == "finished":
                self.standings[_place(trial)].found = True
                self._ended(trial, known)
                continue
            same.setdefault(key, []).append(trial)
            pending.setdefault(key, (trial, built))
        failed = self.inputs.tables(pending.values())
        jobs = []
        for key, (trial, built) in pending.items():
            table = self.inputs.table(trial, built)
            task = self._task(key, trial, dataset=built.folder, table=table)
            if table in failed:
                for each in same[key]:
                    self._ended(each, task.failed(failed[table]))
            else:
                jobs.append(Job(task, trial.config, self.out / "trials" / key))
        return jobs, same

    def _task(
        self, key: str, trial: Trial, *, dataset: Path = Path(), table: Path = Path()
    ) -> Task:
        return Task(
            trial=key,
            arm=trial.arm.name,
            values=dict(trial.arm.values),
            seed=trial.seed,
            round=trial.epochs,
            dataset=str(dataset.absolute()),
            table=str(table),
            parent_run_id=self.parent,
            keep_models=self.design.study.keep_models,
            pages=self.design.study.pages,
        )

    def _started(self, same: Mapping[str, Sequence[Trial]], job: Job) -> None:
        if job.task.until is not None:
            logs.say(f"study: {job.task.name}: trained once")
        for trial in same.get(job.task.trial, ()):
            own = self.standings[_place(trial)]
            own.status = "running"
            self._tell(own)

    def _ended(self, trial: Trial, result: Result) -> None:
        own = self.standings[_place(trial)]
        # Another study or arm may have called the same config by another name.
        result = result | {"arm": trial.arm.name, "values": dict(trial.arm.values)}
        own.status, own.error = result["status"], result.get("error") or ""
        own.seconds = result.get("seconds")
        own.score = score(self.design, result)
        self.results[_place(trial)] = result
        self._tell(own)

    def _tell(self, changed: Standing) -> None:
        with self.lock:
            self.show(changed, list(self.standings.values()))

    def _mean(self, arm: Arm, trials: Sequence[Trial]) -> float | None:
        scores = [self.standings[_place(trial)].score for trial in trials if trial.arm == arm]
        known = [value for value in scores if value is not None]
        return sum(known) / len(known) if known else None


def _place(trial: Trial) -> Place:
    return (trial.arm.name, trial.seed, trial.epochs)
