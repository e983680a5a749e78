"""Submits a TrainJob, waits for its end and says what became of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from thawline.errors import ClusterError, TrainingError
from thawline.stages.resume import Termination
from thawline.stages.trainjob.cluster import Cluster, NodePod
from thawline.stages.trainjob.follow import LogFollower
from thawline.stages.trainjob.manifest import KEPT
from thawline.tracking.runs import Terminated

OWN_ERROR = re.compile(r"^thawline\.errors\.\w+: (.+?)\n  What to do: (.+)$", re.MULTILINE)
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Exit codes of a container that was ended from outside."""
UNFETCHED_SECONDS = 3_600
"""For which any job is kept: its task may not have fetched the model yet."""
TAIL_LINES = 200
SHOWN_LINES = 20


@dataclass(frozen=True)
class Patience:
    """How long is waited, in seconds."""

    poll: float = 5.0
    """Between two looks at the job."""
    outage: float = 600.0
    """For an API that does not answer."""
    deletion: float = 120.0
    """For a job to be gone that was deleted."""


def run_job(
    cluster: Cluster,
    body: dict[str, Any],
    show: Callable[[str], None],
    patience: Patience = Patience(),
) -> None:
    """Submits a TrainJob and waits for its success; lines of its log are shown.

    A job of the same name is an earlier try of this task: it is taken over while it runs and where
    it has succeeded, and put out of the way where it has failed. SIGTERM and Ctrl-C delete the job.

    Raises:
        ClusterError: The cluster refuses the job or does not answer, or somebody deleted the job.
        TrainingError: The job failed; the error is the one that its processes gave, if they gave
            one.
        Terminated: SIGTERM came, or the cluster took a node away: another try goes on.
    """
    name = body["metadata"]["name"]
    termination = Termination()
    follower = LogFollower(cluster, name, show, patience.poll)
    with termination.deferred():
        try:
            _submit(cluster, body, show, patience)
            follower.start()
            condition = _await_end(cluster, name, termination, patience)
        except (KeyboardInterrupt, Terminated):
            # First of all: the pod has seconds left.
            show(f"{name}: stopped, so the TrainJob is deleted")
            cluster.delete(name)
            raise
        finally:
            follower.finish()
    if condition["type"] == "Failed":
        raise _failure(cluster, name, condition)


def end_of(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """The condition in which a TrainJob has ended; None while it has not."""
    conditions = job.get("status", {}).get("conditions", ())
    return next(
        (
            dict(each)
            for each in conditions
            if each["type"] in ("Complete", "Failed") and each["status"] == "True"
        ),
        None,
    )


def expired(job: Mapping[str, Any], now: datetime | None = None) -> bool:
    """Whether a TrainJob ended so long ago that it need not be kept."""
    condition = end_of(job)
    if condition is None:
        return False
    kept = max(UNFETCHED_SECONDS, float(job["metadata"].get("annotations", {}).get(KEPT, "inf")))
    ended = datetime.fromisoformat(condition["lastTransitionTime"])
    return ((now or datetime.now(UTC)) - ended).total_seconds() >= kept


def _submit(
    cluster: Cluster, body: dict[str, Any], show: Callable[[str], None], patience: Patience
) -> None:
    name = body["metadata"]["name"]
    earlier = cluster.get(name)
    end = earlier and end_of(earlier)
    if end and end["type"] == "Failed":
        show(f"{name}: the TrainJob of an earlier try failed; it starts again")
        cluster.delete(name, within=patience.deletion, pause=patience.poll)
        earlier = None
    if earlier is None and cluster.create(body):
        show(f"{name}: submitted to {body['spec']['trainer']['numNodes']} nodes")
    else:
        show(f"{name}: the TrainJob of an earlier try is taken over")


def _await_end(
    cluster: Cluster, name: str, termination: Termination, patience: Patience
) -> dict[str, Any]:
    answered = time.monotonic()
    while True:
        termination.obey()
        try:
            job = cluster.get(name)
            answered = time.monotonic()
        except ClusterError as error:
            if not error.passing or time.monotonic() - answered > patience.outage:
                raise
        else:
            if job is None:
                raise ClusterError(
                    f"the TrainJob {name} is gone: somebody deleted it", "run the task again"
                )
            if condition := end_of(job):
                return condition
        time.sleep(patience.poll)


def _failure(
    cluster: Cluster, name: str, condition: Mapping[str, Any]
) -> TrainingError | Terminated:
    if condition.get("reason") == "DeadlineExceeded":
        return TrainingError(
            f"the TrainJob {name} did not end in time: {condition.get('message', '')}",
            "raise trainjob.timeout_seconds in the profile; what was saved is gone on with",
        )
    failed = [pod for pod in cluster.pods(name) if pod.exit_code or pod.disrupted]
    if any(pod.disrupted or pod.exit_code in STOPPED for pod in failed):
        # The processes of the other nodes fail as well when one is taken away.
        return Terminated(128 + signal.SIGTERM)
    lines = _last_lines(cluster, failed)
    own = OWN_ERROR.findall("\n".join(lines))
    if own:
        what, remedy = own[-1]
        return TrainingError(f"the TrainJob {name} failed: {what}", remedy)
    codes = ", ".join(f"{pod.name} {pod.exit_code}" for pod in failed)
    shown = "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])
    return TrainingError(
        f"the TrainJob {name} failed ({condition.get('reason', '')}: "
        f"{condition.get('message', '')}); exit codes: {codes or 'none'}\n{shown}".rstrip(),
        f"see its log: kubectl -n {cluster.namespace} logs "
        f"-l jobset.sigs.k8s.io/jobset-name={name}",
    )


def _last_lines(cluster: Cluster, failed: list[NodePod]) -> list[str]:
    if not failed:
        return []
    try:
        return [text for _, text in cluster.log(failed[0].name, tail=TAIL_LINES)]
    except ClusterError:
        return []
