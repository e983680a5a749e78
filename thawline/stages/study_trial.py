"""One trial of a study: fine-tuning and the evaluation of the hold-outs, in a folder of its own.

`thawline study` starts `python -m thawline.stages.study_trial <folder>` for each.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.stages import evaluate, finetune, study_prefix
from thawline.stages.shared_epochs import shared_of
from thawline.stages.study_files import REPORT, Task, write_result
from thawline.stages.study_processes import serve
from thawline.study.trials import light, training_of
from thawline.tracking.runs import stage_run


def run(config: Config, task: Task, folder: str | Path) -> dict[str, Any]:
    """Fine-tunes and evaluates; the figures go to `trial.json`, the evaluation's page beside it.

    A trial that was killed goes on from its last checkpoint when it is called again with the same
    folder. Its MLflow run is a child of the task's, and has those of the two stages as children.

    Returns:
        What `trial.json` holds: `trial`, `arm`, `values`, `seed`, `round`, `status`, `seconds`,
        `exported_epoch`, `schedule`, `shared_epochs` (how many were not trained here), `epochs`
        (the metrics after each), `metrics` (those of the exported model) and `training` (see
        `training_of`).

    Raises:
        ThawlineError: See the two stages.
        Terminated: After SIGTERM.
    """
    folder, started = Path(folder), time.monotonic()
    model, evaluation = folder / "model", folder / "evaluation"
    tags = {"thawline.stage": "trial", "thawline.trial": task.trial, "thawline.arm": task.arm}
    with stage_run(config, task.name, task.parent_run_id, tags=tags) as tracked:
        tracked.log_params({**task.values, "seed": task.seed, "round": task.round})
        parent = tracked.run_id
        # A model folder appears whole or not at all, and the folder's name stands for its inputs.
        if not (model / "epochs.json").exists():
            finetune.run(
                config, task.dataset, task.table, model, parent_run_id=parent, start=task.start()
            )
        verdict = evaluate.run(
            config, task.dataset, model, evaluation, parent_run_id=parent, page=task.pages
        )
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
            shared_epochs=shared_of(epochs),
            epochs=[
                {holdout: light(tree) for holdout, tree in epoch["metrics"].items()}
                for epoch in epochs
            ],
            metrics=metrics,
            page=task.pages,
            training=training_of(epochs, meta["exported_epoch"]),
        )
        tracked.log_metrics(metrics, step=len(epochs))
    if task.pages:
        shutil.copyfile(evaluation / REPORT, folder / REPORT)
    write_result(folder, result)
    if not task.keep_models:
        shutil.rmtree(model)
        shutil.rmtree(evaluation)
    return result


def main(folder: Path) -> None:
    """Runs the trial, or epochs to share, that `write_task` described.

    An error of any kind becomes its result.
    """
    serve(folder, lambda config, task, own: _work_of(task)(config, task, own))


def _work_of(task: Task) -> Callable[[Config, Task, Path], Any]:
    return run if task.until is None else study_prefix.run


if __name__ == "__main__":
    main(Path(sys.argv[1]))
