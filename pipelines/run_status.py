"""`thawline status`: how a run on Kubeflow stands, task by task."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.connection import EndpointOption, NamespaceOption, TokenFileOption, connect
from thawline.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from pipelines.kfp_client import Kfp

LISTED = 10
"""Runs that are listed where none is named."""
PATIENCE = 300.0
"""Seconds for which an endpoint may fail while a run is followed."""

ENDED = {"SUCCEEDED", "SKIPPED", "FAILED", "CANCELED"}
"""What Kubeflow calls the end of a run; any other word, a new one too, may pass."""

INNER = re.compile(r"root|.*-driver|(retry-)?executor(\(\d+\))?|.*\(\d+\)")
"""Nodes of Argo's that are no task: the pipeline itself, and the steps and tries of a task."""
RETRY = re.compile(r"(retry-)?executor\((?!0\))\d+\)")
"""A try of a task but the first, which is 0."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Task:
    """A task, as Kubeflow tells of it."""

    id: str
    """Those of a loop share their name."""
    name: str
    state: str
    retries: int | None
    """None: Kubeflow does not say."""
    seconds: float | None
    """None: it has not started."""
    error: str


def status(
    run: Annotated[str | None, typer.Argument(help="Id of a run.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The run that was created last.")] = False,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Show how a run stands, task by task; without one, list the newest.

    Exits with 0 where the run has succeeded, 1 where it has ended otherwise, and 3 where it has
    not ended.
    """
    if run and last:
        raise ConfigError("a run's id and --last", "give one of them")
    kfp = connect(endpoint, namespace, token_file)
    if not run and not last:
        for each in kfp.newest_runs(LISTED):
            typer.echo(f"{each['run_id']}  {_state(each):<9}  {each.get('display_name', '')}")
        return
    found = kfp.run(run or last_run(kfp))
    for line in described(kfp, found, datetime.now(UTC)):
        typer.echo(line)
    raise typer.Exit(exit_code(found))


def last_run(kfp: Kfp) -> str:
    """Id of the run that was created last.

    Raises:
        ClusterError: There is none.
    """
    newest = kfp.newest_runs(1)
    if not newest:
        raise ClusterError("there is no run yet", "start one with `thawline submit`")
    return str(newest[0]["run_id"])


def exit_code(run: dict[str, Any]) -> int:
    """What a script is told: 0 success, 1 another end, 3 no end."""
    state = _state(run)
    return 0 if state == "SUCCEEDED" else 1 if state in ENDED else 3


def follow(
    kfp: Kfp, run_id: str, pause: float = 10.0, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Says what changes until a run has ended.

    Args:
        kfp: The API.
        run_id: Of the run.
        pause: Seconds between two looks.
        sleep: Passes them.

    Returns:
        The run at its end.

    Raises:
        ClusterError: The endpoint refuses, or does not answer for five minutes.
    """
    told: dict[str, str] = {}
    while True:
        run = patiently(lambda: kfp.run(run_id), pause, sleep)
        for task in tasks(run, datetime.now(UTC)):
            if told.get(task.id) != task.state:
                told[task.id] = task.state
                typer.echo(f"{task.name}: {task.state}{_after(task)}")
        if _state(run) in ENDED:
            typer.echo(f"run: {_state(run)}")
            return run
        sleep(pause)


def patiently(
    call: Callable[[], dict[str, Any]], pause: float, sleep: Callable[[float], None]
) -> dict[str, Any]:
    """An answer, asked for again while what fails may pass by itself."""
    waited = 0.0
    while True:
        try:
            return call()
        except ClusterError as error:
            if not error.passing or waited >= PATIENCE:
                raise
        sleep(pause)
        waited += pause


def ended(run: dict[str, Any]) -> bool:
    """Whether a run goes on no more."""
    return _state(run) in ENDED


def described(kfp: Kfp, run: dict[str, Any], now: datetime) -> Iterator[str]:
    """Lines about a run and its tasks."""
    yield f"run: {run.get('display_name', '')} ({run['run_id']})"
    yield f"state: {_state(run)}"
    started, finished = _moment(run.get("created_at")), _moment(run.get("finished_at"))
    if started:
        took = _duration(((finished or now) - started).total_seconds())
        yield f"created: {started:%Y-%m-%d %H:%M:%S} UTC, {took}"
    error = _error(run)
    if error:
        yield f"error: {error}"
    for link in mlflow_links(run):
        yield f"MLflow: {link}"
    yield kfp.connection.link(run["run_id"])
    found = tasks(run, now)
    retried = sum(1 for each in _details(run) if RETRY.fullmatch(each.get("display_name", "")))
    if retried and all(task.retries is None for task in found):
        yield f"retries: {retried}, of tasks that Kubeflow does not name"
    if found:
        yield ""
        yield from _table(found)


def mlflow_links(run: dict[str, Any]) -> list[str]:
    """Addresses of the MLflow run that Kubeflow made; else how to find the one Thawline made."""
    entries = ((run.get("plugins_output") or {}).get("mlflow") or {}).get("entries") or {}
    values = [str((each or {}).get("value", "")) for each in entries.values()]
    links = [value for value in values if value.startswith(("http://", "https://"))]
    return links or [f"search runs for tags.`thawline.pipeline_run_id` = '{run['run_id']}'"]


def tasks(run: dict[str, Any], now: datetime) -> list[Task]:
    """The tasks of a run in the order in which they started."""
    details = _details(run)
    pods = {each["pod_name"]: each for each in details if each.get("pod_name")}
    shown = [each for each in details if not INNER.fullmatch(each.get("display_name", ""))]
    shown.sort(key=lambda each: _moment(each.get("start_time")) or now)
    return [_task(each, pods, now) for each in shown]


def _details(run: dict[str, Any]) -> list[dict[str, Any]]:
    return list((run.get("run_details") or {}).get("task_details") or ())


def _task(detail: dict[str, Any], pods: dict[str, dict[str, Any]], now: datetime) -> Task:
    start, end = _moment(detail.get("start_time")), _moment(detail.get("end_time"))
    below = [
        pods[child["pod_name"]]
        for child in detail.get("child_tasks") or ()
        if child.get("pod_name") in pods
    ]
    failed = [
        (each.get("executor_detail") or {}).get("failed_main_jobs") for each in (detail, *below)
    ]
    known = [len(jobs) for jobs in failed if jobs is not None]
    return Task(
        id=detail.get("task_id") or detail.get("display_name", ""),
        name=detail.get("display_name") or detail.get("task_id", ""),
        state=_state(detail),
        retries=max(known) if known else None,
        seconds=((end or now) - start).total_seconds() if start else None,
        error=_error(detail) or next(filter(None, map(_error, below)), ""),
    )


def _table(found: Sequence[Task]) -> Iterator[str]:
    rows = [("task", "state", "retries", "took")]
    for task in found:
        retries = "" if task.retries is None else str(task.retries)
        rows.append((task.name, task.state, retries, _duration(task.seconds)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for task in found:
        if task.error:
            yield f"{task.name}: {task.error}"


def _state(holder: dict[str, Any]) -> str:
    return str(holder.get("state") or "PENDING")


def _error(holder: dict[str, Any]) -> str:
    return str((holder.get("error") or {}).get("message", "")).strip()


def _after(task: Task) -> str:
    return f" after {_duration(task.seconds)}" if task.state in ENDED and task.seconds else ""


def _moment(text: str | None) -> datetime | None:
    """A time stamp; None where there is none: Kubeflow writes that as 1970, too."""
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return moment if moment > EPOCH else None


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))
