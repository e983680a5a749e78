"""What a TrainJob is made of besides the config; a pipeline's profile decides it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from thawline.config.base import Count, Section

Cpu = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?$|^\d+m$")]
Memory = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?([KMGTPE]i?)?$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
References = dict[Name, dict[str, str]]
"""Names of config maps or secrets to their keys to the variables that these become."""


class Accelerator(Section):
    """GPUs of one container."""

    type: str = Field("nvidia.com/gpu", description="The resource's name.")
    count: Count = 1


class Toleration(Section):
    """A taint that a pod puts up with."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Placed(Section):
    """What a container gets and where it runs; what is not set is not asked for."""

    cpu: Cpu | None = Field(None, description="Cores that are reserved, such as 4 or 500m.")
    cpu_limit: Cpu | None = None
    memory: Memory | None = Field(None, description="Memory that is reserved, such as 16Gi.")
    memory_limit: Memory | None = None
    accelerator: Accelerator | None = None
    node_selector: dict[str, str] = Field({}, description="Labels that the node must have.")
    tolerations: list[Toleration] = Field([], description="Of taints that the node may have.")
    shared_memory: Memory | None = Field(
        None, description="Size of an in-memory /dev/shm; a container has 64 MB without one."
    )
    timeout_seconds: Seconds | None = Field(None, description="Of one try, start included.")


class Work(Section):
    """The folder that the tries and the nodes of a run share."""

    folder: str = Field(description="A path in the volume, or a URL: s3://, gs://, hdfs://.")
    claim: Name | None = Field(
        None, description="A PersistentVolumeClaim (ReadWriteMany) that is mounted at `folder`."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Work:
        if ("://" in self.folder) == (self.claim is not None):
            raise ValueError(
                f"folder ({self.folder}) must be a URL, or the path at which a claim is mounted"
            )
        if self.claim is not None and not self.folder.startswith("/"):
            raise ValueError(f"folder ({self.folder}) must be an absolute path")
        return self


class Nodes(Placed):
    """The nodes of a TrainJob, and each one's share."""

    nodes: Annotated[int, Field(ge=2)] = 2
    processes_per_node: Count | None = Field(
        None, description="Default: one a GPU; without GPUs, one."
    )
    runtime: Name = Field("torch-distributed", description="The ClusterTrainingRuntime's name.")
    keep_seconds: Annotated[int, Field(ge=0)] = Field(
        86_400,
        description="For which a job that has ended is kept, with what it shared; 0: not at all. "
        "Older ones are deleted when the next one is submitted.",
    )

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or (self.accelerator.count if self.accelerator else 1)


class TrainJobSettings(Nodes):
    """All of it, as a compiled pipeline hands it to the task that fine-tunes."""

    image: str
    image_pull_secrets: list[Name] = Field([], description="Names of secrets.")
    env: dict[str, str] = Field({}, description="Variables, in clear.")
    config_maps: References = Field({}, description="Variables from config maps.")
    secrets: References = Field({}, description="Variables from secrets.")
    work: Work
