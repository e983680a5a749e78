"""What a node of a TrainJob runs: it brings the inputs here and becomes torchrun.

The runtime of Kubeflow Trainer tells torchrun the rest by its PET_* variables.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from thawline.data.storage import is_remote
from thawline.stages.trainjob.manifest import WORK
from thawline.stages.trainjob.shared import fetch


@dataclass(frozen=True)
class NodeWork:
    """What a node does; JSON in the variable `THAWLINE_TRAINJOB`."""

    config: str
    """The resolved config, as YAML."""
    dataset: str
    table: str
    model: str
    """Where the model folder is to be, a path or a URL."""
    parent_run_id: str
    publish: str = ""
    """A URL to which the first process puts the model folder in the end."""

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> NodeWork:
        """What this process was told to do."""
        return cls(**json.loads(os.environ[WORK]))


def localised(work: NodeWork, folder: Path) -> NodeWork:
    """The same work with every folder on this machine.

    Raises:
        DataError: An input cannot be fetched.
    """
    model, publish = work.model, ""
    if is_remote(model):
        model, publish = str(folder / "model"), model
    return NodeWork(
        work.config,
        str(fetch(work.dataset, folder)),
        str(fetch(work.table, folder)),
        model,
        work.parent_run_id,
        publish,
    )


def main() -> None:
    """Starts the processes of this node."""
    work = localised(NodeWork.from_environment(), Path(tempfile.mkdtemp(prefix="thawline-")))
    os.environ[WORK] = work.to_json()
    command = (sys.executable, "-m", "torch.distributed.run", "-m", "thawline.stages.trainjob.rank")
    os.execv(sys.executable, command)  # noqa: S606


if __name__ == "__main__":
    main()
