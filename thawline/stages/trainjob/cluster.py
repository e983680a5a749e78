"""The few calls of a Kubernetes API that a TrainJob takes, with errors that say what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from thawline.errors import ClusterError
from thawline.stages.trainjob.manifest import (
    CONTAINER,
    GROUP,
    LABELS,
    PLURAL,
    REPLICATED_JOB,
    VERSION,
)

SECONDS = 30
"""Within which the API has to answer; a stream of a log may be silent for longer."""
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REMEDIES = {
    401: "the task's service account has no valid token; see docs/kubeflow.md",
    403: "let the task's service account create, get, list and delete trainjobs, and list pods and "
    "get their logs; see docs/kubeflow.md",
    404: "install Kubeflow Trainer 2.3 or newer on the cluster",
    400: "this Kubeflow Trainer is too old for the manifest: 2.3 or newer is needed",
    422: "correct the profile's trainjob section",
}


@dataclass(frozen=True)
class NodePod:
    """A pod of a TrainJob, as far as its end is concerned."""

    name: str
    index: str
    """Of the node: 0 is the one that evaluates and writes."""
    started: bool
    exit_code: int | None
    """Of its container; None while it runs."""
    disrupted: str
    """Why the cluster took it away (an eviction, a preemption); empty if it did not."""


class Cluster:
    """A namespace of a Kubernetes cluster."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        """Calls nothing yet."""
        self.namespace = namespace
        self._jobs, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)
        self._place = (GROUP, VERSION, namespace, PLURAL)

    @classmethod
    def connect(cls) -> Cluster:
        """The namespace of this pod, or that of the current context outside of a cluster.

        Raises:
            ClusterError: Neither is to be had.
        """
        try:
            if NAMESPACE.exists():
                config.load_incluster_config()
                return cls(client.ApiClient(), NAMESPACE.read_text(encoding="utf-8").strip())
            config.load_kube_config()
            _, context = config.list_kube_config_contexts()
        except (config.ConfigException, OSError) as error:
            raise ClusterError(
                f"there is no Kubernetes cluster to submit a TrainJob to: {error}",
                "run this profile on a cluster, set KUBECONFIG, or choose a profile without nodes",
            ) from error
        return cls(client.ApiClient(), context["context"].get("namespace", "default"))

    def get(self, name: str) -> dict[str, Any] | None:
        """A TrainJob; None where there is none."""
        try:
            with _explained(f"reading the TrainJob {name}", missing=True):
                return dict(
                    self._jobs.get_namespaced_custom_object(
                        *self._place, name, _request_timeout=SECONDS
                    )
                )
        except _Missing:
            return None

    def create(self, body: dict[str, Any]) -> bool:
        """Submits a TrainJob; False where there is one of this name.

        Raises:
            ClusterError: It is refused; a field that the cluster does not know is a refusal.
        """
        try:
            with _explained(f"submitting the TrainJob {body['metadata']['name']}"):
                self._jobs.create_namespaced_custom_object(
                    *self._place, body, field_validation="Strict", _request_timeout=SECONDS
                )
        except _Exists:
            return False
        return True

    def delete(self, name: str, *, within: float = 0.0, pause: float = 1.0) -> None:
        """Deletes a TrainJob with its pods, if it is there.

        Args:
            name: Of the job.
            within: Seconds for which its end is waited for; 0: not at all.
            pause: Seconds between two looks.

        Raises:
            ClusterError: A refusal, or it is still there afterwards.
        """
        try:
            with _explained(f"deleting the TrainJob {name}", missing=True):
                self._jobs.delete_namespaced_custom_object(
                    *self._place, name, propagation_policy="Foreground", _request_timeout=SECONDS
                )
        except _Missing:
            return
        deadline = time.monotonic() + within
        while within and self.get(name) is not None:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the TrainJob {name} was deleted {within:.0f} s ago and is still there",
                    f"look at its pods: kubectl -n {self.namespace} describe trainjob {name}",
                )
            time.sleep(pause)

    def ours(self) -> list[dict[str, Any]]:
        """The TrainJobs that Thawline submitted."""
        selector = ",".join(f"{key}={value}" for key, value in LABELS.items())
        with _explained("listing TrainJobs"):
            found = self._jobs.list_namespaced_custom_object(
                *self._place, label_selector=selector, _request_timeout=SECONDS
            )
        return list(found["items"])

    def pods(self, name: str) -> list[NodePod]:
        """The pods of a TrainJob's nodes, the first node's first."""
        selector = (
            f"jobset.sigs.k8s.io/jobset-name={name},"
            f"jobset.sigs.k8s.io/replicatedjob-name={REPLICATED_JOB}"
        )
        with _explained(f"listing the pods of {name}"):
            found = self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=SECONDS
            )
        # Of a node that was started again, the newest pod counts.
        newest = sorted(found.items, key=lambda pod: str(pod.metadata.creation_timestamp))
        pods = {pod.index: pod for pod in map(_node_pod, newest)}
        return [pods[index] for index in sorted(pods, key=lambda index: (len(index), index))]

    def log(
        self, pod: str, *, follow: bool = False, since: int | None = None, tail: int | None = None
    ) -> Iterator[tuple[str, str]]:
        """Time and text of each line that the training container wrote.

        Args:
            pod: Its name.
            follow: Goes on until the container ends.
            since: Only lines of the last so many seconds.
            tail: Only so many of the last lines.
        """
        options = {"since_seconds": since, "tail_lines": tail}
        with _explained(f"reading the log of {pod}"):
            stream = self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                container=CONTAINER,
                follow=follow,
                timestamps=True,
                _preload_content=False,
                _request_timeout=None if follow else SECONDS,
                **{key: value for key, value in options.items() if value is not None},
            )
            rest = b""
            for chunk in stream.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from map(_line, lines)
            if rest:
                yield _line(rest)


class _Missing(Exception):  # noqa: N818
    """There is no such object."""


class _Exists(Exception):  # noqa: N818
    """There is such an object."""


@contextmanager
def _explained(doing: str, *, missing: bool = False) -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status == 404 and missing:
            raise _Missing from error
        if error.status == 409:
            raise _Exists from error
        raise ClusterError(
            f"{doing}: the cluster answers {error.status}: {_reason(error)}",
            REMEDIES.get(int(error.status or 0), "look at the cluster and try again"),
            passing=int(error.status or 0) in (0, 429) or int(error.status or 0) >= 500,
        ) from error
    except (HTTPError, OSError) as error:
        raise ClusterError(
            f"{doing}: the cluster does not answer: {error}",
            "check the network and the API server and try again",
            passing=True,
        ) from error


def _reason(error: client.ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _node_pod(pod: Any) -> NodePod:
    status = pod.status
    states = [each.state for each in status.container_statuses or () if each.name == CONTAINER]
    ended = next((state.terminated for state in states if state and state.terminated), None)
    disrupted = next(
        (each for each in status.conditions or () if each.type == "DisruptionTarget"), None
    )
    return NodePod(
        name=pod.metadata.name,
        index=(pod.metadata.labels or {}).get("batch.kubernetes.io/job-completion-index", "0"),
        started=status.phase not in (None, "Pending"),
        exit_code=ended.exit_code if ended else None,
        disrupted=status.reason or (disrupted.reason or "disrupted" if disrupted else ""),
    )


def _line(line: bytes) -> tuple[str, str]:
    stamp, _, text = line.decode(errors="replace").partition(" ")
    return stamp, text
