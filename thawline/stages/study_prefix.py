"""The epochs that trials of a study share: which those are, and training them once.

Each lies in `prefixes/<signature>/` of the study's folder: `state/` (`shared_epochs`), and beside
it the files of its job, as a trial has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.data.manifest import Dataset, Manifest
from thawline.errors import ConfigError
from thawline.stages import finetune
from thawline.stages.shared_epochs import shared_of
from thawline.stages.study_files import Task, write_result
from thawline.stages.study_processes import Job
from thawline.study.prefixes import Prefix, Sharing, share, signatures
from thawline.tracking.runs import stage_run

STATE = "state"


def with_prefixes(trials: Sequence[Job], folder: Path) -> list[Job]:
    """The jobs of trials, each after those that train what it shares with others.

    A prefix stands before the first trial that begins with it, a longer one after a shorter one
    from which it goes on. Trials that have a checkpoint or a model share nothing more.

    Args:
        trials: In their order; the folders of their tables have the tables' keys as names.
        folder: Of all prefixes; what is there is used.
    """
    manifests = {
        dataset: Dataset.open(dataset).manifest for dataset in {job.task.dataset for job in trials}
    }
    sharing = share(
        {job.task.trial: _chain(job, manifests[job.task.dataset]) for job in trials},
        [path.parent.name for path in folder.glob(f"*/{STATE}")],
    )
    return list(_in_order(trials, sharing, folder))


def run(config: Config, task: Task, folder: str | Path) -> dict[str, Any]:
    """Trains the first `task.until` epochs of a trial's config into `folder/state`.

    Killed, it goes on from its last checkpoint when it is called again with the same folder.

    Returns:
        What the folder's `trial.json` holds: `trial`, `seed`, `status`, `seconds` and `epochs`,
        the number of those that were trained here.

    Raises:
        ThawlineError: See `finetune.run`.
        Terminated: After SIGTERM.
    """
    folder, started = Path(folder), time.monotonic()
    tags = {"thawline.stage": "prefix", "thawline.trial": task.trial}
    with stage_run(config, task.name, task.parent_run_id, tags=tags) as tracked:
        epochs = finetune.run(
            config,
            task.dataset,
            task.table,
            folder / STATE,
            parent_run_id=tracked.run_id,
            start=task.start(),
            until=task.until,
        )
    trained = len(epochs) - shared_of(epochs)
    result = task.result("finished", seconds=time.monotonic() - started, epochs=trained)
    write_result(folder, result)
    return result


def _chain(job: Job, manifest: Manifest) -> list[str]:
    """The signatures of a trial; none where it has a checkpoint or a model."""
    model = job.folder / "model"
    if model.exists() or any(model.with_name("model.checkpoints").glob("*/epoch-*")):
        return []
    try:
        return signatures(
            job.config,
            list(manifest.context),
            table_key=Path(job.task.table).name,
            data_version=manifest.data_version,
        )
    except ConfigError:
        return []  # The trial itself will say what is wrong.


def _in_order(trials: Sequence[Job], sharing: Sharing, folder: Path) -> Iterator[Job]:
    waiting = list(sharing.prefixes)
    for job in trials:
        key = job.task.trial
        for prefix in [each for each in waiting if key in each.trials]:
            waiting.remove(prefix)
            yield _prefix_job(prefix, job, folder)
        starts = _states(sharing.starts[key], folder)
        yield replace(job, task=replace(job.task, starts=starts), after=sharing.after(key))


def _prefix_job(prefix: Prefix, of: Job, folder: Path) -> Job:
    epochs = "epoch 1" if prefix.epochs == 1 else f"epochs 1 to {prefix.epochs}"
    task = replace(
        of.task,
        trial=prefix.key,
        arm=f"{epochs} of {len(prefix.trials)} trials",
        values={},
        starts=_states(prefix.starts, folder),
        until=prefix.epochs,
    )
    return Job(task, of.config, folder / prefix.key, prefix.after)


def _states(keys: Iterable[str], folder: Path) -> tuple[str, ...]:
    return tuple(str((folder / key / STATE).absolute()) for key in keys)
