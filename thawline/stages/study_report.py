"""A study before and after its trials: what cannot be is refused, and results become a report.

Nothing here loads what trains.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.errors import ConfigError
from thawline.study.arm_facts import exposure, resolved
from thawline.study.comparison import compare_arms
from thawline.study.design import Design, dimensions_of
from thawline.study.report import REPORT, main_rows, summary, write_report
from thawline.study.trials import FACTS, TRIALS, read_study, tidy, write_study
from thawline.tracking import runs
from thawline.training.recipes import make_schedule
from thawline.training.schedule import Schedule

MADE = (TRIALS, FACTS, REPORT)
"""The files of a study's folder that hold what was found."""

Result = Mapping[str, Any]
"""What a `trial.json` holds."""


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
                    _schedule(trial.config)
                except ConfigError as error:
                    what = design.where(trial.arm)
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
    write_report(folder / REPORT, facts, rows, table)
    return Outcome(folder, facts, rows)


def report(
    folder: Path,
    design: Design,
    results: Iterable[Result],
    went_on: Sequence[Sequence[str]] = (),
    *,
    store: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> Outcome:
    """Writes `trials.parquet`, `study.json` and `study.html` of results.

    Args:
        folder: Where.
        design: What was to run.
        results: Of the trials that came to an end.
        went_on: Names of the arms of each round after the first.
        store: The folder that has `trials/`. None: `folder`.
        more: What `study.json` is to hold besides.
    """
    results = list(results)
    facts = study_facts(design, results, went_on) | dict(more or {})
    facts["store"] = _way(folder, store or folder)
    write_study(folder, facts, tidy(results, list(dimensions_of(design.study))))
    return report_only(folder)


def _way(folder: Path, store: Path) -> str:
    """From one folder to another, as the beginning of a link; empty where they are the same."""
    way = Path(os.path.relpath(store, folder)).as_posix()
    return "" if way == "." else f"{way}/"


def study_facts(
    design: Design, results: Sequence[Result], went_on: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """What `study.json` holds: what was to be studied, and what became of each trial."""
    finished = [result for result in results if result["status"] == "finished"]
    study = design.study
    configs = {trial.arm.name: trial.config for trial in design.trials()}
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
        "contrasts": [
            {"name": each.name, "weights": dict(each.weights)} for each in design.contrasts
        ],
        "seeds": study.seeds,
        "pretrain": study.pretrain,
        "metric": study.metric,
        "holdout": study.holdout,
        "action": study.action or next(iter(first.get("actions", ())), None),
        "data_version": first.get("data_version"),
        "data_versions": {result["arm"]: result["data_version"] for result in finished},
        "rounds": list(design.rounds),
        "arms": [
            {
                "name": arm.name,
                "values": dict(arm.values),
                "changes": dict(arm.changes),
                "baseline": arm.baseline,
                "epochs": configs[arm.name].finetune.epochs,
                "dropped_after": dropped.get(arm.name),
                "schedule": schedules.get(arm.name),
                "resolved": resolved(configs[arm.name]),
                "exposure": exposure(configs[arm.name], _schedule(configs[arm.name])),
            }
            for arm in design.arms
        ],
        "trials": [{name: result.get(name) for name in _TOLD} for result in results],
    }


def _schedule(config: Config) -> Schedule:
    return make_schedule(config, list(config.events.context))


_TOLD = (
    "page",
    "trial",
    "arm",
    "seed",
    "round",
    "status",
    "error",
    "remedy",
    "seconds",
    "shared_epochs",
)


def score(design: Design, result: Result) -> float | None:
    """The study's metric of a trial; None where it failed or the figure is undefined."""
    study = design.study
    tree = result.get("metrics", {}).get(study.holdout)
    if tree is None:
        return None
    action = study.action or result["actions"][0]
    value = tree["pooled"].get(action, {}).get(study.metric)
    return None if value is None else float(value)
