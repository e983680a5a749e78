"""What each process of a TrainJob runs, started by torchrun."""

from __future__ import annotations

import os
from pathlib import Path

from thawline.config import parse_config
from thawline.data.storage import publish_folder
from thawline.stages import finetune
from thawline.stages.trainjob.node import NodeWork


def main() -> None:
    """Fine-tunes with the other processes; the first one publishes the model."""
    work = NodeWork.from_environment()
    finetune.run(
        parse_config(work.config),
        work.dataset,
        work.table,
        work.model,
        parent_run_id=work.parent_run_id,
    )
    if work.publish and os.environ.get("RANK", "0") == "0":
        publish_folder(Path(work.model), work.publish)


if __name__ == "__main__":
    main()
