"""One trial of a study: fine-tuning and the evaluation of the hold-outs, in a folder of its own.

`thawline study` starts `python -m thawline.stages.study_trial <folder>` for each.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from thawline.config import Config, load_config
from thawline.errors import ThawlineError
from thawline.stages import evaluate, finetune
from thawline.stages.study_files import CONFIG, LOG, REPORT, TASK, Task, write_result
from thawline.study.trials import light
from thawline.tracking.runs import Terminated, stage_run


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
