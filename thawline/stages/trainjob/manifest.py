"""The TrainJob as Kubernetes takes it (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2.3)."""

from __future__ import annotations

from typing import Any

from thawline.stages.trainjob.settings import Placed, TrainJobSettings

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
MANAGER = "thawline.io/pipeline"
KEPT = "thawline.io/keep-seconds"
"""Annotation: for how long the job stays after its end."""
LABELS = {"app.kubernetes.io/managed-by": "thawline"}
REPLICATED_JOB = CONTAINER = "node"
"""Names in the runtime that Kubeflow ships, of the job that trains and of its container."""
WORK = "THAWLINE_TRAINJOB"
"""Variable that tells each node what to do."""


def manifest(name: str, settings: TrainJobSettings, work: str) -> dict[str, Any]:
    """A TrainJob that fine-tunes on `settings.nodes` nodes.

    The runtime sets what torchrun reads (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...).

    Args:
        name: Of the job.
        settings: From the profile.
        work: What the nodes do, as JSON; see `thawline.stages.trainjob.node`.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": dict(LABELS),
            "annotations": {KEPT: str(settings.keep_seconds)},
        },
        "spec": {
            "runtimeRef": {"name": settings.runtime},
            **_unless_none("activeDeadlineSeconds", settings.timeout_seconds),
            "trainer": {
                "image": settings.image,
                "command": ["python3", "-m", "thawline.stages.trainjob.node"],
                "numNodes": settings.nodes,
                "numProcPerNode": settings.processes,
                "resourcesPerNode": resources(settings),
                "env": [{"name": WORK, "value": work}, *_environment(settings)],
            },
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": REPLICATED_JOB,
                                        "template": {
                                            "spec": {"template": {"spec": _pod(settings)}}
                                        },
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }


def resources(placed: Placed) -> dict[str, dict[str, str]]:
    """Requests and limits of a container, as Kubernetes takes them."""
    gpus = {placed.accelerator.type: str(placed.accelerator.count)} if placed.accelerator else {}
    requests = _unless_none("cpu", placed.cpu) | _unless_none("memory", placed.memory) | gpus
    limits = (
        _unless_none("cpu", placed.cpu_limit) | _unless_none("memory", placed.memory_limit) | gpus
    )
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _environment(settings: TrainJobSettings) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in settings.env.items()
    ]
    for kind, references in (
        ("configMapKeyRef", settings.config_maps),
        ("secretKeyRef", settings.secrets),
    ):
        variables += [
            {"name": variable, "valueFrom": {kind: {"name": source, "key": key}}}
            for source, keys in references.items()
            for key, variable in keys.items()
        ]
    return variables


def _pod(settings: TrainJobSettings) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = []
    mounts = []
    if settings.shared_memory:
        volume = {"medium": "Memory", "sizeLimit": settings.shared_memory}
        volumes.append({"name": "shm", "emptyDir": volume})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    if settings.work.claim:
        claim = {"claimName": settings.work.claim}
        volumes.append({"name": "work", "persistentVolumeClaim": claim})
        mounts.append({"name": "work", "mountPath": settings.work.folder})
    tolerations = [each.model_dump(exclude_none=True) for each in settings.tolerations]
    parts: dict[str, Any] = {
        "nodeSelector": settings.node_selector,
        "tolerations": tolerations,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "volumes": volumes,
        "containers": [{"name": CONTAINER, "volumeMounts": mounts}] if mounts else [],
    }
    return {key: value for key, value in parts.items() if value}


def _unless_none(key: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {key: value}
