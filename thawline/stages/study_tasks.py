"""A study as the tasks of a pipeline: laid out, a task a trial, and all of them in one report.

A pipeline loops over the distinct pretrainings, and within each over its trials, so that a trial is
given the one table that it starts from. What passes between tasks are texts and folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config, Study, dump_config, parse_config
from thawline.errors import BusyError, ConfigError, DataError, ThawlineError, TrackingError
from thawline.stages import start
from thawline.stages.study_files import RESULT, Task, gather, write_result
from thawline.stages.study_report import MADE, Outcome, check, report
from thawline.stages.task import read_config
from thawline.study.design import Design, Trial
from thawline.study.grid import parse_grid, split_values
from thawline.tracking import pipeline, runs


@dataclass(frozen=True)
class Started:
    """What the tasks of a study need to know."""

    config: str
    """The whole config as YAML, with its study."""
    windows_config: str
    tables: list[str]
    """The config of each distinct pretraining, as JSON on one line."""
    source_version: str
    code_version: str


def lay_out(
    text: str,
    changes: Mapping[str, str | int | float],
    *,
    grid: str = "",
    seeds: str = "",
) -> Started:
    """Resolves the config, checks every arm and opens the MLflow run.

    Args:
        text: The config as YAML.
        changes: As `start.run` has them.
        grid: Options as `--grid` has them, with `;` between them; empty leaves `study.grid`.
        seeds: Numbers with commas between them; empty leaves `study.seeds`.

    Raises:
        ThawlineError: The config, an arm or the tracking server cannot be used, or there is no log.
    """
    config = parse_config(text, start.overrides(changes))
    own = config.study.model_dump(mode="json")
    if grid.strip():
        own["grid"] = parse_grid(part for part in grid.split(";") if part.strip())
    if seeds.strip():
        own["seeds"] = [parse_seed(part) for part in split_values(seeds)]
    config = config.model_copy(update={"study": Study.model_validate(own)})
    if config.study.halving is not None:
        raise ConfigError(
            "study.halving: a pipeline's trials are laid out before the first one runs",
            "drop it, or use `thawline study`",
        )
    source = start.source_version(config)
    check(config).require_one_dataset("a pipeline builds one")
    config = start.pinned(config)
    pipeline.open_parent(config, "study")
    return Started(
        config=dump_config(config),
        windows_config=dump_config(start.for_stage(config, "windows")),
        tables=list(_by_table(config)),
        source_version=source,
        code_version=start.code_version(),
    )


def arms_of(text: str, table: str) -> list[str]:
    """The trials that start from a table, each as JSON on one line.

    Args:
        text: The config as YAML.
        table: One of `Started.tables`.
    """
    trials = _by_table(parse_config(text))[table]
    return [json.dumps({"arm": trial.arm.name, "seed": trial.seed}) for trial in trials]


def trial(
    text: str, which: str, dataset: str | Path, table: str | Path, out: str | Path, version: str
) -> dict[str, object]:
    """Runs one trial into the folder `out`; what a config or the data did wrong is its result.

    Args:
        text: The config as YAML.
        which: One of `arms_of`.
        dataset: The dataset folder.
        table: The table folder.
        out: Gets `trial.json`, `report.html` and, with `study.keep_models`, the model.
        version: Of the dataset.

    Raises:
        BusyError: A task of an earlier try still runs.
        TrackingError: MLflow does not answer, which is no fault of the trial.
        Terminated: After SIGTERM.
    """
    # The other tasks of a study start without what trains.
    from thawline.stages import study_trial

    config = read_config(text)
    wanted, out = json.loads(which), Path(out)
    found = next(
        each
        for each in Design.of(config).trials()
        if (each.arm.name, each.seed) == (wanted["arm"], int(wanted["seed"]))
    )
    task = Task(
        trial=found.key(version),
        arm=found.arm.name,
        values=dict(found.arm.values),
        seed=found.seed,
        round=found.epochs,
        dataset=str(dataset),
        table=str(table),
        parent_run_id=pipeline.find_parent(config),
        keep_models=config.study.keep_models,
        pages=config.study.pages,
    )
    out.mkdir(parents=True, exist_ok=True)
    try:
        return study_trial.run(found.config, task, out)
    except (BusyError, TrackingError):
        raise
    except ThawlineError as error:
        result = task.result("failed", error=error.what, remedy=error.remedy)
        write_result(out, result)
        print(error)
        return result


def collect(text: str, folders: Iterable[str | Path], out: str | Path) -> Outcome:
    """Makes the study's folder of what its trials found: figures, statistics and the report.

    Raises:
        DataError: No trial came to an end.
        TrackingError: MLflow does not answer.
    """
    config, out = parse_config(text), Path(out)
    with runs.stage_run(config, "study", pipeline.find_parent(config)) as tracked:
        gather(folders, out / "trials")
        design = Design.of(config)
        results = _for_all(
            design,
            [
                json.loads(path.read_text(encoding="utf-8"))
                for path in sorted((out / "trials").glob(f"*/{RESULT}"))
            ],
        )
        order = {arm.name: place for place, arm in enumerate(design.arms)}
        results.sort(key=lambda result: (order[result["arm"]], result["seed"]))
        outcome = report(out, design, results)
        for name in MADE:
            tracked.log_artifact(out / name)
        if not any(result["status"] == "finished" for result in results):
            raise DataError(
                f"no trial came to an end; the first one said: {outcome.failed[0]['error']}"
                if results
                else "there is no trial",
                "correct the grid or the config",
            )
    return outcome


def parse_seed(text: str) -> int:
    """A seed.

    Raises:
        ConfigError: It is no whole number.
    """
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"study.seeds: {text!r} is no whole number", "write e.g. --seeds 0,1,2"
        ) from error


def _for_all(design: Design, results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results for every arm and seed: of several that are one trial, the first one was run."""
    known = {(result["arm"], result["seed"]): result for result in results}
    found = []
    for same in _distinct(design).values():
        result = known.get((same[0].arm.name, same[0].seed))
        if result is not None:
            found += [
                result | {"arm": each.arm.name, "values": dict(each.arm.values)} for each in same
            ]
    return found


def _distinct(design: Design) -> dict[str, list[Trial]]:
    """Trials by what decides their figures: arms may resolve to one config."""
    found: dict[str, list[Trial]] = {}
    for each in design.trials():
        found.setdefault(each.key(""), []).append(each)
    return found


def _by_table(config: Config) -> dict[str, list[Trial]]:
    """The trials by the config of their pretraining, as JSON."""
    keys: dict[str, str] = {}
    found: dict[str, list[Trial]] = {}
    for each, *_ in _distinct(Design.of(config)).values():
        own = each.config.model_copy(update={"seed": each.table_seed})
        tree = start.for_stage(own, "pretrain").model_dump(mode="json")
        # Of the arms that share rows, the first one's: they differ in what pretraining reads not.
        text = keys.setdefault(each.table_key(""), json.dumps(tree))
        found.setdefault(text, []).append(each)
    return found
