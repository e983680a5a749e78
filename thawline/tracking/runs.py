"""MLflow runs: one parent a pipeline run, one child a stage.

Everything goes through `MlflowClient` with explicit run ids. MLflow's fluent interface keeps an
active run in the process, and ignores the parent it is given where `MLFLOW_RUN_ID` is set.

Kubeflow's back end can make the runs itself: it injects the task's own run as `MLFLOW_RUN_ID` and
closes it. A stage then logs into that run, and no run is created.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from mlflow.entities import RunStatus
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from thawline import logs
from thawline.config import Config, dump_config
from thawline.errors import TrackingError
from thawline.tracking.origin import origin_tags
from thawline.tracking.run import Run
from thawline.tracking.server import (
    check,
    connect,
    experiment_id,
    explained,
    impatient,
    masked,
    require_answer,
    tracking_uri,
)

__all__ = [
    "Run",
    "Terminated",
    "check",
    "finish_parent",
    "require_answer",
    "stage_run",
    "start_parent",
    "tracking_uri",
]

STATUSES = {
    "FINISHED": "FINISHED",
    "SUCCEEDED": "FINISHED",
    "KILLED": "KILLED",
    "CANCELED": "KILLED",
    "CANCELLED": "KILLED",
    "CANCELING": "KILLED",
}
"""Statuses of MLflow and Kubeflow to the terminal one of MLflow; any other is FAILED."""

STAGE_TAG = "thawline.stage"
CONFIG_TAG = "thawline.config"
"""Hash of the config that a stage ran with: tells a retry from the same stage of another trial."""
ATTEMPT_TAG = "thawline.attempt"
"""Of a stage with this config in this pipeline run, from 1 on."""


class Terminated(SystemExit):
    """SIGTERM came while a stage ran; uncaught, the process ends with 143 as the shell has it."""


def start_parent(config: Config, name: str, tags: Mapping[str, str] | None = None) -> str:
    """Starts the run that the stages of a pipeline run are children of.

    It holds the config as `config.yaml`, without passwords. It stays RUNNING until
    `finish_parent`. With `MLFLOW_RUN_ID` set, the pipeline's run exists: it is tagged and used.

    Args:
        config: Says where.
        name: Shown in the UI.
        tags: Further tags.

    Returns:
        The run's id.

    Raises:
        TrackingError: The server cannot be used.
    """
    client = connect(config)
    all_tags = {**origin_tags(), **(tags or {})}
    injected = os.environ.get("MLFLOW_RUN_ID", "")
    if injected:
        run_id = _pipeline_of(config, client, injected) or injected
        _set_tags(config, client, run_id, all_tags)
    else:
        experiment = experiment_id(config, client)
        with explained(config, "starting a run"):
            run_id = client.create_run(experiment, tags=all_tags, run_name=name).info.run_id
    with explained(config, "logging the config"):
        client.log_text(run_id, masked(dump_config(config)), "config.yaml")
    return run_id


@contextmanager
def stage_run(
    config: Config,
    stage: str,
    parent_run_id: str = "",
    *,
    tags: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Opens the run of one stage and closes it with what became of the block.

    An exception leaves it FAILED, Ctrl-C and SIGTERM (caught in the main thread only, raised as
    `Terminated`) leave it KILLED. A run that Kubeflow injected is left open for Kubeflow to close.

    Each attempt at a stage has a run of its own, with its number as a tag: params never change, and
    what a failed attempt measured stays readable. One that is still open when the next begins was
    killed without a word, and becomes KILLED.

    Args:
        config: Says where.
        stage: Names the run; its tag `thawline.stage`.
        parent_run_id: From `start_parent`, whose status stays untouched. Empty: a run of its own,
            which fails within seconds where the server does not answer: no earlier stage is lost.
        tags: Further tags.

    Raises:
        TrackingError: The server cannot be used, or there is no run `parent_run_id`.
    """
    if not parent_run_id and not os.environ.get("MLFLOW_RUN_ID"):
        require_answer(config)
    client = connect(config)
    all_tags = {**origin_tags(), STAGE_TAG: stage, CONFIG_TAG: _hash(config), **(tags or {})}
    injected = os.environ.get("MLFLOW_RUN_ID", "")
    with _sigterm_raised():
        if injected and injected != parent_run_id:
            pipeline = _pipeline_of(config, client, injected)
            _set_tags(config, client, injected, all_tags)
            with _noted(stage, injected):
                yield Run(injected, parent_run_id or pipeline or injected, config, client)
            return
        run = _create(config, client, stage, parent_run_id, all_tags)
        try:
            with _noted(stage, run.run_id):
                yield run
        except BaseException as error:
            _close(run, status_after(error))
            raise
    with explained(config, f"closing the run {run.run_id}"):
        client.set_terminated(run.run_id, "FINISHED")


def finish_parent(config: Config, run_id: str, status: str) -> None:
    """Closes a parent run and every child that is still open, whatever became of its process.

    May be called again. Runs that Kubeflow made are left for Kubeflow to close.

    Args:
        config: Says where.
        run_id: From `start_parent`. Empty (it never started): nothing happens.
        status: MLflow's or Kubeflow's word; an unknown one counts as FAILED.

    Raises:
        TrackingError: The server cannot be used, or there is no such run.
    """
    if not run_id:
        return
    terminal = STATUSES.get(status.upper(), "FAILED")
    # A child that is open although its pipeline went on was killed without a word.
    left_open = "FAILED" if terminal == "FAILED" else "KILLED"
    client = connect(config)
    injected = os.environ.get("MLFLOW_RUN_ID", "")
    if injected and run_id == _pipeline_of(config, client, injected):
        return
    with explained(config, f"closing the run {run_id}"):
        experiment = client.get_run(run_id).info.experiment_id
        for child in children(client, experiment, run_id):
            if _is_open(child):
                client.set_terminated(child.info.run_id, left_open)
        if run_id != injected:
            client.set_terminated(run_id, terminal)


def _create(
    config: Config, client: MlflowClient, stage: str, parent_run_id: str, tags: dict[str, str]
) -> Run:
    if parent_run_id:
        with explained(config, f"opening the parent run {parent_run_id}"):
            experiment = client.get_run(parent_run_id).info.experiment_id
        tags = {
            **tags,
            MLFLOW_PARENT_RUN_ID: parent_run_id,
            ATTEMPT_TAG: str(_next_attempt(config, client, experiment, parent_run_id, tags)),
        }
    else:
        experiment = experiment_id(config, client)
    with explained(config, f"starting the run of {stage}"):
        created = client.create_run(experiment, tags=tags, run_name=stage)
    run_id = created.info.run_id
    return Run(run_id, parent_run_id or run_id, config, client)


def _next_attempt(
    config: Config,
    client: MlflowClient,
    experiment: str,
    parent_run_id: str,
    tags: Mapping[str, str],
) -> int:
    """Counts the earlier attempts at a stage and closes those whose process has vanished."""
    same = [f"tags.`{tag}` = '{tags[tag]}'" for tag in (STAGE_TAG, CONFIG_TAG)]
    with explained(config, f"looking for earlier attempts at {tags[STAGE_TAG]}"):
        earlier = list(children(client, experiment, parent_run_id, *same))
        for attempt in filter(_is_open, earlier):
            client.set_terminated(attempt.info.run_id, "KILLED")
    return len(earlier) + 1


def children(
    client: MlflowClient, experiment: str, parent: str, *filters: str
) -> Iterator[MlflowRun]:
    """The runs under a parent that meet MLflow's filters, the newest first."""
    conditions = " and ".join([f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'", *filters])
    token = None
    while True:
        page = client.search_runs([experiment], conditions, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _is_open(run: MlflowRun) -> bool:
    return not RunStatus.is_terminated(RunStatus.from_string(run.info.status))


def _hash(config: Config) -> str:
    return hashlib.sha256(dump_config(config).encode()).hexdigest()[:12]


@contextmanager
def _noted(stage: str, run_id: str) -> Iterator[None]:
    """Names the stage in every line of its log, and says when it begins and how it ends."""
    with logs.stage(stage, run_id):
        logs.note(f"{stage} begins")
        try:
            yield
        except BaseException as error:
            status = status_after(error)
            level: logs.Level = "info" if status == "FINISHED" else "error"
            logs.note(f"{stage} ends: {status}: {type(error).__name__}: {error}", level)
            raise
        logs.note(f"{stage} ends: FINISHED")


def _pipeline_of(config: Config, client: MlflowClient, injected: str) -> str:
    try:
        with explained(config, f"opening the run {injected}"):
            tags = client.get_run(injected).data.tags
    except TrackingError as error:
        raise TrackingError(
            f"MLFLOW_RUN_ID names a run that cannot be used: {error.what}",
            "unset MLFLOW_RUN_ID, or point tracking.uri to the server that has this run",
        ) from error
    return str(tags.get(MLFLOW_PARENT_RUN_ID, ""))


def _set_tags(config: Config, client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    with explained(config, f"tagging the run {run_id}"):
        for key, value in tags.items():
            client.set_tag(run_id, key, value)


def status_after(error: BaseException) -> str:
    """MLflow's word for how a stage ended that this came out of."""
    if isinstance(error, KeyboardInterrupt | Terminated):
        return "KILLED"
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "FINISHED"
    return "FAILED"


def _close(run: Run, status: str) -> None:
    # The error that ended the stage must not be hidden by a server that is down as well, and a
    # container that is being stopped has seconds left.
    try:
        with impatient(), explained(run.config, f"closing the run {run.run_id}"):
            run.client.set_terminated(run.run_id, status)
    except TrackingError as error:
        logs.say(str(error), "warning")


@contextmanager
def _sigterm_raised() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
