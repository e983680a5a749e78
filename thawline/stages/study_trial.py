"""One trial of a study: fine-tuning and the evaluation of the hold-outs, in a folder of its own.

`thawline study` starts `python -m thawline.stages.study_trial <folder>` for each.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config, dump_config, load_config
from thawline.errors import ThawlineError
from thawline.stages import evaluate, finetune
from thawline.study.trials import light
from thawline.tracking.runs import Terminated, stage_run

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

    def result(self, status: str, **more: Any) -> dict[str, Any]:
        """What `trial.json` holds: which trial it is, and what became of it."""
        own = ("trial", "arm", "values", "seed", "round")
        return {name: getattr(self, name) for name in own} | {"status": status} | more


def write_task(folder: Path, task: Task, config: Config) -> None:
    """Writes what `main` reads; an older result goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)
    (folder / TASK).write_text(json.dumps(asdict(task), indent=2), encoding="utf-8")
    (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")


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


def run(config: Config, task: Task, folder: str | Path) -> dict[str, Any]:
    """Fine-tunes and evaluates; the figures go to `trial.json`, the evaluation's page beside it.

    A trial that was killed goes on from its last checkpoint when it is called again with the same
    folder. Its MLflow run is a child of the task's, and has those of the two stages as children.

    Returns:
        What `trial.json` holds: `trial`, `arm`, `values`, `seed`, `round`, `status`, `seconds`,
        `exported_epoch`, `schedule`, `epochs` (the metrics after each) and `metrics` (those of the
        exported model).

    Raises:
        ThawlineError: See the two stages.
        Terminated: After SIGTERM.
    """
    folder, started = Path(folder), time.monotonic()
    model, evaluation = folder / "model", folder / "evaluation"
    name = f"{task.arm}, seed {task.seed}"
    tags = {"thawline.stage": "trial", "thawline.trial": task.trial, "thawline.arm": task.arm}
    with stage_run(config, name, task.parent_run_id, tags=tags) as tracked:
        tracked.log_params({**task.values, "seed": task.seed, "round": task.round})
        parent = tracked.run_id
        # A model folder appears whole or not at all, and the folder's name stands for its inputs.
        if not (model / "epochs.json").exists():
            finetune.run(config, task.dataset, task.table, model, parent_run_id=parent)
        verdict = evaluate.run(config, task.dataset, model, evaluation, parent_run_id=parent)
        epochs = json.loads((model / "epochs.json").read_text(encoding="utf-8"))
        meta = json.loads((model / "model.json").read_text(encoding="utf-8"))
        metrics = {holdout: light(tree) for holdout, tree in verdict.metrics.items()}
        result = task.result(
            "finished",
            seconds=time.monotonic() - started,
            exported_epoch=meta["exported_epoch"],
            actions=meta["actions"],
            data_version=meta["data_version"],
            schedule=json.loads((model / "schedule.json").read_text(encoding="utf-8")),
            epochs=[
                {holdout: light(tree) for holdout, tree in epoch["metrics"].items()}
                for epoch in epochs
            ],
            metrics=metrics,
        )
        tracked.log_metrics(metrics, step=len(epochs))
    shutil.copyfile(evaluation / REPORT, folder / REPORT)
    write_result(folder, result)
    if not task.keep_models:
        shutil.rmtree(model)
        shutil.rmtree(evaluation)
    return result


def main(folder: Path) -> None:
    """Runs the trial that `write_task` described; an error of any kind becomes its result."""
    task = Task(**json.loads((folder / TASK).read_text(encoding="utf-8")))
    try:
        run(load_config(folder / CONFIG), task, folder)
    except Terminated:
        raise
    except ThawlineError as error:
        print(error, file=sys.stderr)
        write_result(folder, task.result("failed", error=error.what, remedy=error.remedy))
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        remedy = f"see {folder / LOG}; this is a defect"
        write_result(folder, task.result("failed", error=what, remedy=remedy))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
