"""`thawline logs`: what the tasks of a run on Kubeflow have written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.connection import (
    EndpointOption,
    NamespaceOption,
    TokenFileOption,
    connect,
    not_installed,
)
from thawline.errors import ClusterError

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api

    from pipelines.kfp_client import Kfp

SECONDS = 30
"""Within which the API server has to answer; a log that is followed may be silent for longer."""
PAUSE = 5.0
"""Seconds between two looks for a new pod."""
NODE = "workflows.argoproj.io/node-name"
EXECUTOR = re.compile(r"\.([^.]+)\.executor(?:\((\d+)\))?$")
"""The end of a node's name where a task runs: the task, and which try it is."""


@dataclass(frozen=True)
class TaskPod:
    """A pod in which a task runs, or ran."""

    name: str
    task: str
    attempt: int
    started: bool


def logs(
    run: Annotated[str, typer.Argument(help="Id of a run.")],
    task: Annotated[str | None, typer.Option(help="Of one task, e.g. finetune.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")
    ] = False,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Print what the tasks of a run have written, each try under a heading of its own.

    The pods are asked, so this takes a cluster that kubectl reaches, and pods that are still there.
    """
    kfp = connect(endpoint, namespace, token_file)
    place = kfp.pod_namespace
    core = _core(run, place)
    for line in log_lines(core, kfp, run, place, task, follow=follow):
        typer.echo(line)


def log_lines(
    core: CoreV1Api, kfp: Kfp, run_id: str, place: str, task: str | None, *, follow: bool
) -> Iterator[str]:
    """Lines of every try of the tasks, in the order of the pods.

    Args:
        core: The cluster.
        kfp: Says when the run has ended.
        run_id: Of the run.
        place: Namespace of its pods.
        task: Name of the only task that is wanted.
        follow: Waits for pods to come until the run has ended.

    Raises:
        ClusterError: The cluster does not answer or refuses, there is no such pod, or no such task.
    """
    from pipelines.run_status import ended, patiently

    read: set[str] = set()
    while True:
        # Asked before the pods: what comes up in between is found by one more look.
        last = not follow or ended(patiently(lambda: kfp.run(run_id), PAUSE, time.sleep))
        pods = _pods(core, run_id, place)
        fresh = [
            each for each in pods if each.name not in read and each.started and _named(each, task)
        ]
        for pod in fresh:
            read.add(pod.name)
            again = f", try {pod.attempt + 1}" if pod.attempt else ""
            yield f"--- {pod.task}{again} ({pod.name})"
            yield from _read(core, pod.name, place, follow=follow)
        if last and not read:
            raise _nothing(run_id, place, task, pods)
        if last:
            return
        if not fresh:
            time.sleep(PAUSE)


def _core(run_id: str, place: str) -> CoreV1Api:
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise not_installed(error) from error
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    except (config.ConfigException, OSError) as error:
        raise ClusterError(
            f"no Kubernetes cluster can be reached from here: {error}",
            "set KUBECONFIG, or run where there is one: "
            f"kubectl -n {place} logs -l pipeline/runid={run_id} -c main --prefix --tail=-1",
        ) from error
    return client.CoreV1Api()


def _pods(core: CoreV1Api, run_id: str, place: str) -> list[TaskPod]:
    found = _called(
        f"listing the pods of the run {run_id}",
        place,
        lambda: core.list_namespaced_pod(
            place, label_selector=f"pipeline/runid={run_id}", _request_timeout=SECONDS
        ),
    )
    pods = []
    for each in sorted(found.items, key=lambda pod: str(pod.metadata.creation_timestamp)):
        node = EXECUTOR.search((each.metadata.annotations or {}).get(NODE, ""))
        if node:
            started = each.status.phase not in (None, "Pending")
            attempt = int(node[2] or 0)
            pods.append(TaskPod(each.metadata.name, node[1], attempt, started))
    return pods


def _read(core: CoreV1Api, pod: str, place: str, *, follow: bool) -> Iterator[str]:
    newest = ""
    while True:
        try:
            for stamp, text in _stamped(core, pod, place, follow=follow):
                if stamp > newest:
                    newest = stamp
                    yield text
        except ClusterError as error:
            if not (follow and error.passing):
                raise
        # Servers and proxies cut a stream that lasts long, while the pod goes on.
        if not follow or _over(core, pod, place):
            return
        time.sleep(PAUSE)


def _stamped(core: CoreV1Api, pod: str, place: str, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Time and text of each line; times are of one length, so that they compare as texts."""
    doing = f"reading the log of {pod}"
    stream = _called(
        doing,
        place,
        lambda: core.read_namespaced_pod_log(
            pod,
            place,
            container="main",
            follow=follow,
            timestamps=True,
            _preload_content=False,
            _request_timeout=None if follow else SECONDS,
        ),
    )
    chunks, rest = stream.stream(), b""
    while (chunk := _called(doing, place, lambda: next(chunks, None))) is not None:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(_parted, lines)
    if rest:
        yield _parted(rest)


def _parted(line: bytes) -> tuple[str, str]:
    stamp, _, text = line.decode(errors="replace").partition(" ")
    return stamp, text


def _over(core: CoreV1Api, pod: str, place: str) -> bool:
    found = _called(
        f"looking for the pod {pod}",
        place,
        lambda: core.list_namespaced_pod(
            place, field_selector=f"metadata.name={pod}", _request_timeout=SECONDS
        ),
    )
    return all(each.status.phase in ("Succeeded", "Failed") for each in found.items)


def _called(doing: str, place: str, call: Any) -> Any:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return call()
    except ApiException as error:
        raise ClusterError(
            f"{doing}: the cluster answers {error.status}: {_reason(error)}",
            f"see that you may list pods and get pods/log in the namespace {place}",
            passing=error.status in (0, 429) or error.status >= 500,
        ) from error
    except (HTTPError, OSError) as error:
        raise ClusterError(
            f"{doing}: the cluster does not answer: {error}",
            "check KUBECONFIG and the network",
            passing=True,
        ) from error


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        return str(error.reason)


def _named(pod: TaskPod, task: str | None) -> bool:
    return task is None or pod.task == task


def _nothing(run_id: str, place: str, task: str | None, pods: list[TaskPod]) -> ClusterError:
    if not pods:
        return ClusterError(
            f"the namespace {place} holds no pod of the run {run_id}",
            "check the id and --namespace; pods of runs that ended long ago are deleted, and the "
            "UI shows the logs that the cluster archived",
        )
    names = ", ".join(dict.fromkeys(each.task for each in pods))
    return ClusterError(
        f"the run {run_id} has no pod{f' of the task {task}' if task else ''} that has started",
        f"tasks with a pod: {names}; one that comes from the cache has none",
    )
