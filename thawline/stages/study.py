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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.errors import ConfigError, DataError
from thawline.folders import locked_folder
from thawline.stages import pretrain, windows
from thawline.stages.study_processes import Job, Result, Runner, run_jobs, run_process, threads_of
from thawline.stages.study_trial import Task, read_result
from thawline.study.comparison import compare_arms
from thawline.study.design import Arm, Design, Trial
from thawline.study.halving import survivors
from thawline.study.report import REPORT, main_rows, summary, write_report
from thawline.study.trials import read_study, tidy, write_study
from thawline.tracking import runs
from thawline.training.recipes import make_schedule


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


@dataclass
class Outcome:
    """What a study found."""

    folder: Path
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    """See `study.comparison.compare_arms`."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The trials that failed."""
        return [trial for trial in self.facts["trials"] if trial["status"] == "failed"]

    def main(self) -> list[Mapping[str, Any]]:
        """The rows of the study's own metric, one an arm."""
        return main_rows(self.facts, self.rows)

    def words(self) -> list[str]:
        """What they say, an arm a sentence."""
        return summary(self.facts, self.rows)


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
                for name in ("trials.parquet", "study.json", REPORT):
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


def check(config: Config) -> Design:
    """Lays out a study, and fails now over what its trials would fail over late.

    Raises:
        ConfigError: See `Design`, and the schedules of all arms and rounds.
        TrackingError: MLflow cannot be used.
    """
    design = Design.of(config)
    for epochs in design.rounds:
        for trial in design.trials(epochs):
            if trial.seed == config.study.seeds[0]:
                try:
                    make_schedule(trial.config, list(config.events.context))
                except ConfigError as error:
                    what = f"study.grid: the arm {trial.arm.name}"
                    if len(design.rounds) > 1:
                        what += f", in the round of {epochs} epochs"
                    raise ConfigError(f"{what}: {error.what}", error.remedy) from error
    runs.check(config)
    return design


def report_only(folder: str | Path) -> Outcome:
    """Makes the report of a study's folder again, from `study.json` and `trials.parquet`.

    Raises:
        DataError: There is no study.
    """
    folder = Path(folder)
    facts, table = read_study(folder)
    rows = compare_arms(facts, table)
    write_report(folder / REPORT, facts, rows)
    return Outcome(folder, facts, rows)


def report(
    folder: Path, design: Design, results: Iterable[Result], went_on: Sequence[Sequence[str]] = ()
) -> Outcome:
    """Writes `trials.parquet`, `study.json` and `study.html` of results.

    Args:
        folder: Where.
        design: What was to run.
        results: Of the trials that came to an end.
        went_on: Names of the arms of each round after the first.
    """
    results = list(results)
    facts = study_facts(design, results, went_on)
    write_study(folder, facts, tidy(results, list(design.study.grid)))
    return report_only(folder)


def study_facts(
    design: Design, results: Sequence[Result], went_on: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """What `study.json` holds: what was to be studied, and what became of each trial."""
    finished = [result for result in results if result["status"] == "finished"]
    study = design.study
    last = {trial.arm.name: trial.epochs for trial in design.trials()}
    schedules = {result["arm"]: result["schedule"] for result in finished}
    first = finished[0] if finished else {}
    dropped = {
        name: design.rounds[number]
        for number, names in enumerate([[arm.name for arm in design.arms], *went_on])
        for name in names
        if number < len(went_on) and name not in went_on[number]
    }
    return {
        "grid": study.grid,
        "seeds": study.seeds,
        "pretrain": study.pretrain,
        "metric": study.metric,
        "holdout": study.holdout,
        "action": study.action or next(iter(first.get("actions", ())), None),
        "data_version": first.get("data_version"),
        "rounds": list(design.rounds),
        "arms": [
            {
                "name": arm.name,
                "values": dict(arm.values),
                "baseline": arm.baseline,
                "epochs": last[arm.name],
                "dropped_after": dropped.get(arm.name),
                "schedule": schedules.get(arm.name),
            }
            for arm in design.arms
        ],
        "trials": [
            {name: result.get(name) for name in (*_TOLD, "error", "remedy", "seconds")}
            for result in results
        ],
    }


_TOLD = ("trial", "arm", "seed", "round", "status")


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


def score(design: Design, result: Result) -> float | None:
    """The study's metric of a trial; None where it failed or the figure is undefined."""
    study = design.study
    tree = result.get("metrics", {}).get(study.holdout)
    if tree is None:
        return None
    action = study.action or result["actions"][0]
    value = tree["pooled"].get(action, {}).get(study.metric)
    return None if value is None else float(value)
