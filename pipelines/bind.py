"""Puts a profile's settings on the tasks of a pipeline."""

from __future__ import annotations

from typing import Any

from kfp import dsl, kubernetes

from pipelines.profiles.models import Profile, Stage, StageSettings
from thawline.stages.task import DEVICE_VARIABLE, WORK_VARIABLE
from thawline.stages.trainjob.settings import TrainJobSettings
from thawline.tracking.pipeline import RUN_ID_VARIABLE

RUN_LABEL = "metadata.labels['pipeline/runid']"
"""Label that Kubeflow's API server puts on every pod of a run."""
WITH_CHECKPOINTS: tuple[Stage, ...] = ("finetune", "trial")
SHARED_MEMORY = "/dev/shm"  # noqa: S108


def pipeline_settings(profile: Profile) -> dsl.PipelineConfig:
    """What holds for a whole run."""
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=profile.ttl_seconds,
        active_deadline_seconds=profile.timeout_seconds,
    )


def trainjob_text(profile: Profile) -> str:
    """The TrainJob that fine-tunes, as JSON for its task; empty where the task does it itself."""
    nodes, work = profile.trainjob, profile.work
    if nodes is None or work is None:
        return ""
    settings = TrainJobSettings(
        **nodes.model_dump(),
        image=profile.gpu_image if nodes.accelerator else profile.image,
        image_pull_secrets=profile.image_pull_secrets,
        env=profile.env,
        config_maps=profile.config_maps,
        secrets=profile.secrets,
        work=work,
    )
    return settings.model_dump_json(exclude_defaults=True)


def bind(task: Any, stage: Stage, profile: Profile) -> None:
    """Gives a task what its stage gets."""
    settings = profile.stage(stage)
    task.set_container_image(settings.image)
    # Where a label is read, no value is in the file, so that a cached task stays the same.
    kubernetes.use_field_path_as_env(task, RUN_ID_VARIABLE, RUN_LABEL)
    _bind_resources(task, settings)
    for name, value in {**profile.env, **_told(stage, settings, profile)}.items():
        task.set_env_variable(name, value)
    for name, keys in profile.config_maps.items():
        kubernetes.use_config_map_as_env(task, name, dict(keys))
    for name, keys in profile.secrets.items():
        kubernetes.use_secret_as_env(task, name, dict(keys))
    if stage in WITH_CHECKPOINTS and profile.work is not None and profile.work.claim is not None:
        kubernetes.mount_pvc(task, profile.work.claim, profile.work.folder)
    if profile.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(profile.image_pull_secrets))
    if profile.image_pull_policy:
        kubernetes.set_image_pull_policy(task, profile.image_pull_policy)


def _told(stage: Stage, settings: StageSettings, profile: Profile) -> dict[str, str]:
    """What a task has to know of its own settings."""
    told = {}
    submits = stage == "finetune" and profile.trainjob is not None
    if settings.accelerator or (submits and profile.trainjob and profile.trainjob.accelerator):
        told[DEVICE_VARIABLE] = "cuda"
    if stage in WITH_CHECKPOINTS and profile.work is not None:
        told[WORK_VARIABLE] = profile.work.folder
    return told


def _bind_resources(task: Any, settings: StageSettings) -> None:
    for name in ("cpu", "memory"):
        if wanted := getattr(settings, name):
            getattr(task, f"set_{name}_request")(wanted)
        if limit := getattr(settings, f"{name}_limit"):
            getattr(task, f"set_{name}_limit")(limit)
    if settings.accelerator:
        task.set_accelerator_type(settings.accelerator.type)
        task.set_accelerator_limit(settings.accelerator.count)
    for key, value in settings.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in settings.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump())
    if settings.shared_memory:
        kubernetes.empty_dir_mount(
            task, "shm", SHARED_MEMORY, medium="Memory", size_limit=settings.shared_memory
        )
    if settings.timeout_seconds:
        kubernetes.set_timeout(task, settings.timeout_seconds)
    if settings.retries.count:
        task.set_retry(
            settings.retries.count,
            backoff_duration=f"{settings.retries.wait_seconds}s",
            backoff_factor=2.0,
            backoff_max_duration=f"{settings.retries.longest_wait_seconds}s",
        )
