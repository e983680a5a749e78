"""What a profile may say, and what it must not."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from components.factory import GPU_IMAGE, IMAGE
from thawline.config.base import Section
from thawline.errors import ConfigError
from thawline.stages.trainjob.settings import Name, Nodes, Placed, References, Seconds, Work

Stage = Literal[
    "start",
    "windows",
    "pretrain",
    "finetune",
    "evaluate",
    "register",
    "finish",
    "trial",
    "study",
]
COMPUTING: tuple[Stage, ...] = ("pretrain", "finetune", "evaluate", "trial")
"""The stages that compute on a GPU where they have one."""

SECRET = re.compile(r"PASSWORD|PASSWD|SECRET|TOKEN|CREDENTIAL|ACCESS_KEY|API_KEY")
REFERRED = ("MLFLOW_TRACKING_URI",)
"""Variables that differ between clusters, so that they come from a config map."""


class Retries(Section):
    """What happens where a task ends with an error, a node is drained or memory runs out."""

    count: Annotated[int, Field(ge=0)] = 0
    wait_seconds: Annotated[int, Field(ge=0)] = Field(60, description="Doubled with each retry.")
    longest_wait_seconds: Seconds = 1_800


class StageSettings(Placed):
    """What one stage gets."""

    image: str | None = Field(None, description="Default: the profile's image, or gpu_image.")
    retries: Retries = Retries()

    @field_validator("image")
    @classmethod
    def _pinned(cls, image: str | None) -> str | None:
        return image and require_pinned(image)


class Profile(Section):
    """Where a pipeline runs."""

    name: str
    about: str = ""
    image: str = Field(IMAGE, description="Of the stages without an accelerator.")
    gpu_image: str = Field(GPU_IMAGE, description="Of the stages with one.")
    image_pull_secrets: list[Name] = Field([], description="Names of secrets.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    env: dict[str, str] = Field({}, description="Variables of every stage, in clear.")
    config_maps: References = Field(
        {}, description="Variables of every stage: `{name: {key: variable}}`."
    )
    secrets: References = Field({}, description="The same, from secrets.")
    work: Work | None = Field(None, description="Where checkpoints lie, and what nodes share.")
    timeout_seconds: Seconds | None = Field(None, description="Of a whole run.")
    ttl_seconds: Annotated[int, Field(ge=0)] | None = Field(
        None, description="For which the workflow of a run that has ended is kept."
    )
    defaults: StageSettings = StageSettings()
    stages: dict[Stage, StageSettings] = Field({}, description="What differs from the defaults.")
    trainjob: Nodes | None = Field(
        None, description="Fine-tuning on several nodes, by Kubeflow Trainer."
    )

    def stage(self, name: Stage) -> StageSettings:
        """The settings of a stage: its own, and the defaults where it has none."""
        own = self.stages.get(name, StageSettings())
        settings = self.defaults.model_copy(
            update={field: getattr(own, field) for field in own.model_fields_set}
        )
        image = settings.image or (self.gpu_image if settings.accelerator else self.image)
        return settings.model_copy(update={"image": image})

    def with_image(self, image: str) -> Profile:
        """The same profile with every stage in one image.

        Raises:
            ConfigError: The image is not pinned.
        """
        try:
            require_pinned(image)
        except ValueError as error:
            raise ConfigError(str(error), "name e.g. registry.example/thawline:0.1.0") from error
        drop = {"image": None}
        return self.model_copy(
            update={
                "image": image,
                "gpu_image": image,
                "defaults": self.defaults.model_copy(update=drop),
                "stages": {n: own.model_copy(update=drop) for n, own in self.stages.items()},
            }
        )

    @field_validator("image", "gpu_image")
    @classmethod
    def _pinned(cls, image: str) -> str:
        return require_pinned(image)

    @field_validator("env")
    @classmethod
    def _no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if SECRET.search(name.upper()) or re.search(r"://[^/@\s]*:[^/@\s]*@", value):
                raise ValueError(f"{name} looks like a secret; name it under `secrets`")
            if name in REFERRED:
                raise ValueError(f"{name} differs between clusters; name it under `config_maps`")
        return env

    @model_validator(mode="after")
    def _gpu_stages(self) -> Profile:
        for name in self.stages.keys() - set(COMPUTING):
            if self.stage(name).accelerator is not None:
                raise ValueError(f"stages.{name}.accelerator: {name} computes nothing on a GPU")
        if self.defaults.accelerator is not None:
            raise ValueError("defaults.accelerator: name the stages that need one")
        return self

    @model_validator(mode="after")
    def _shared_work(self) -> Profile:
        if self.trainjob is not None:
            if self.work is None:
                raise ValueError("trainjob needs `work`, a folder that every node reaches")
            if self.stage("finetune").accelerator is not None:
                raise ValueError(
                    "stages.finetune.accelerator: this task only waits for the trainjob; GPUs are "
                    "asked for by trainjob.accelerator"
                )
        return self


def require_pinned(image: str) -> str:
    """Sees to it that an image is named by a digest or a tag that does not move.

    Raises:
        ValueError: It is not.
    """
    name, at, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if (at and digest.startswith("sha256:")) or (tag and tag != "latest"):
        return image
    raise ValueError(f"the image {image} must have a tag other than latest, or a digest")
