"""The MLflow run of a Kubeflow pipeline run: opened by the first task, found by the others.

Every task is a process of its own, and Kubeflow's exit task may take no output of another task. So
the parent run carries the id of the pipeline run as a tag, and each task reads that id from
`THAWLINE_RUN_ID`. A parameter would do for the uncached tasks alone: it differs in each run, and
Kubeflow takes a task's parameters into the key of its cache.
"""

from __future__ import annotations

import os

from mlflow import MlflowClient
from mlflow.entities import Run

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.tracking.runs import STAGE_TAG, children, finish_parent, start_parent
from thawline.tracking.server import connect, experiment_id, explained

RUN_ID_VARIABLE = "THAWLINE_RUN_ID"
RUN_ID_TAG = "thawline.pipeline_run_id"
CACHED_TAG = "thawline.cached"
"""Of a parent: the stages whose outputs came from Kubeflow's cache, so that they have no run."""
STAGES = ("windows", "pretrain", "finetune", "evaluate", "register")
"""As each waits for the one before."""

DONE = {"COMPLETE", "CACHED"}
"""Words of Kubeflow's back end for success, beside SUCCEEDED."""


def open_parent(config: Config, name: str) -> str:
    """Starts the parent run of this pipeline run, or opens it again when the pipeline is retried.

    Raises:
        TrackingError: The server cannot be used, or `THAWLINE_RUN_ID` is not set.
    """
    run_id = _pipeline_run_id()
    client = connect(config)
    found = _search(config, client, run_id)
    if found is None:
        return start_parent(config, name, {RUN_ID_TAG: run_id})
    parent = str(found.info.run_id)
    with explained(config, f"opening the run {parent} again"):
        client.update_run(parent, status="RUNNING")
    return parent


def find_parent(config: Config) -> str:
    """The parent run of this pipeline run.

    Raises:
        TrackingError: The server cannot be used, `THAWLINE_RUN_ID` is not set, or there is no
            such run.
    """
    run_id = _pipeline_run_id()
    found = _search(config, connect(config), run_id)
    if found is None:
        raise TrackingError(
            f"no run of the experiment {config.tracking.experiment!r} has the tag "
            f"{RUN_ID_TAG} = {run_id!r}",
            "start the pipeline again: its first task makes this run, with the same tracking.uri "
            "and tracking.experiment",
        )
    return str(found.info.run_id)


def close_parent(config: Config, state: str) -> str:
    """Closes the parent run of this pipeline run, and what its stages left open.

    Args:
        config: Says where.
        state: The word of Kubeflow for how the stages ended. RUNNING, which its back end says
            where it lost track, is judged by the stages' own runs.

    Returns:
        The parent's id; empty where none was ever started.

    Raises:
        TrackingError: The server cannot be used, or `THAWLINE_RUN_ID` is not set.
    """
    client = connect(config)
    found = _search(config, client, _pipeline_run_id())
    if found is None:
        return ""
    parent = str(found.info.run_id)
    word = state.upper()
    if word == "RUNNING":
        word = "FINISHED" if _all_went_well(config, client, found) else "FAILED"
    _note_cached(config, client, found)
    finish_parent(config, parent, "FINISHED" if word in DONE else word)
    return parent


def _pipeline_run_id() -> str:
    run_id = os.environ.get(RUN_ID_VARIABLE, "")
    if not run_id or "'" in run_id:
        raise TrackingError(
            f"{RUN_ID_VARIABLE} is {run_id!r}; it must hold the id of the pipeline run",
            "run the pipeline by `thawline run` or on Kubeflow, which both set it, or set it to "
            "a text that no other run has",
        )
    return run_id


def _search(config: Config, client: MlflowClient, run_id: str) -> Run | None:
    injected = os.environ.get("MLFLOW_RUN_ID", "")
    with explained(config, f"looking for the run of the pipeline run {run_id}"):
        experiment = (
            client.get_run(injected).info.experiment_id
            if injected
            else experiment_id(config, client)
        )
        page = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{run_id}'", max_results=1)
    return page[0] if page else None


def _all_went_well(config: Config, client: MlflowClient, parent: Run) -> bool:
    last = _statuses(config, client, parent)
    if last.get("study") == "FINISHED":
        # A trial that failed is a result of a study.
        return set(last.values()) - {last.get("trial")} == {"FINISHED"}
    return last.get("evaluate") == "FINISHED" and set(last.values()) == {"FINISHED"}


def _note_cached(config: Config, client: MlflowClient, parent: Run) -> None:
    """Tags a parent with the stages that must have ended well, as one after them ran, but ran not.

    Nothing else tells: of a task whose outputs Kubeflow takes from its cache, no process starts.
    """
    if os.environ.get("MLFLOW_RUN_ID"):
        # Kubeflow's back end makes the runs then, those of cached tasks too.
        return
    ran = _statuses(config, client, parent)
    last = max((STAGES.index(stage) for stage in ran if stage in STAGES), default=0)
    cached = [stage for stage in STAGES[:last] if stage not in ran]
    if cached:
        with explained(config, f"tagging the run {parent.info.run_id}"):
            client.set_tag(parent.info.run_id, CACHED_TAG, ", ".join(cached))


def _statuses(config: Config, client: MlflowClient, parent: Run) -> dict[str, str]:
    """How the stages ended; of one that was tried again, the last attempt."""
    with explained(config, "reading the stages' runs"):
        found = list(children(client, parent.info.experiment_id, parent.info.run_id))
    return {child.data.tags.get(STAGE_TAG, ""): child.info.status for child in reversed(found)}
