"""The fine-tuning stage on several nodes: the same folders in and out as on one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from thawline.config import Config, dump_config
from thawline.data.manifest import Dataset
from thawline.errors import ClusterError, ConfigError
from thawline.folders import whole_folder
from thawline.stages.trainjob import shared
from thawline.stages.trainjob.manifest import manifest
from thawline.stages.trainjob.node import NodeWork
from thawline.stages.trainjob.settings import TrainJobSettings

if TYPE_CHECKING:
    from thawline.stages.trainjob.cluster import Cluster

INJECTED = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")
"""Variables by which Kubeflow's back end names the MLflow run that it made for this task."""


def run_on_nodes(
    config: Config,
    dataset: str | Path,
    table: str | Path,
    out: str | Path,
    trainjob: str,
    *,
    parent_run_id: str = "",
    poll_seconds: float = 5.0,
) -> list[dict[str, Any]]:
    """Fine-tunes by a TrainJob, as `thawline.stages.finetune.run` does in this process.

    The inputs go to a folder of the job below `work.folder`, from which every node reads them; the
    model comes back from there. Another try of the same task finds the job of the one before.

    Args:
        config: Of the nodes.
        dataset: A dataset folder here.
        table: A table folder, or a model folder, here.
        out: The model folder to make here.
        trainjob: `TrainJobSettings` as JSON.
        parent_run_id: The MLflow run of the pipeline.
        poll_seconds: Between two looks at the job.

    Returns:
        What the folder's `epochs.json` holds.

    Raises:
        ConfigError: Settings that cannot be used, or no client for Kubernetes.
        ClusterError: The cluster refuses the job or does not answer.
        DataError: The shared folder cannot be read or written.
        TrainingError: The job failed.
        Terminated: After SIGTERM, or where the cluster took a node away.
    """
    try:
        from thawline.stages.trainjob.cluster import Cluster
        from thawline.stages.trainjob.job import Patience, run_job
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a TrainJob needs the client of Kubernetes: {error}",
            "pip install 'thawline[kubeflow]'",
        ) from error
    try:
        settings = TrainJobSettings.model_validate_json(trainjob)
    except ValidationError as error:
        raise ConfigError(f"trainjob: {error}", "compile the pipeline anew") from error
    injected = {name: os.environ[name] for name in INJECTED if name in os.environ}
    settings = settings.model_copy(update={"env": settings.env | injected})
    name = job_name(config, dataset, trainjob, parent_run_id)
    jobs = f"{settings.work.folder.rstrip('/')}/trainjobs"
    place = f"{jobs}/{name}"
    cluster = Cluster.connect()
    _sweep(cluster, jobs, keep=name)
    for source, part in ((dataset, "dataset"), (table, "table")):
        shared.put(source, f"{place}/{part}")
    work = NodeWork(
        dump_config(config),
        f"{place}/dataset",
        f"{place}/table",
        f"{place}/model",
        parent_run_id,
    )
    body = manifest(name, settings, work.to_json())
    run_job(cluster, body, say, Patience(poll=poll_seconds))
    with whole_folder(out) as folder, tempfile.TemporaryDirectory() as cache:
        shutil.copytree(shared.fetch(work.model, Path(cache)), folder, dirs_exist_ok=True)
    if not settings.keep_seconds:
        cluster.delete(name)
    # The job alone is worth being kept: its log and its events.
    shared.remove(place)
    return list(json.loads((Path(out) / "epochs.json").read_text(encoding="utf-8")))


def job_name(config: Config, dataset: str | Path, trainjob: str, parent_run_id: str) -> str:
    """The name of the job of a task, the same in each of its tries."""
    version = Dataset.open(dataset).manifest.data_version
    text = json.dumps([parent_run_id, dump_config(config), version, trainjob])
    return f"thawline-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def say(line: str) -> None:
    """Shows a line of the job as this task's own."""
    print(line, flush=True, file=sys.stdout)


def _sweep(cluster: Cluster, jobs: str, *, keep: str) -> None:
    """Deletes what ended long ago; that is no reason for a task to fail."""
    from thawline.stages.trainjob.job import expired

    try:
        for job in cluster.ours():
            name = job["metadata"]["name"]
            if name != keep and expired(job):
                cluster.delete(name)
                shared.remove(f"{jobs}/{name}")
                say(f"{name}: ended long ago and is deleted")
    except ClusterError as error:
        say(f"old TrainJobs stay: {error.what}")
