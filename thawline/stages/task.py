"""What a compiled pipeline's profile tells a task, by variables of its container."""

from __future__ import annotations

import os
from collections.abc import Mapping

from thawline.config import Config, parse_config

DEVICE_VARIABLE = "THAWLINE_DEVICE"
"""The device that a task was given, so that it fails where it does not see it."""
WORK_VARIABLE = "THAWLINE_WORK"
"""The folder that the tries of a task share."""


def read_config(text: str, environment: Mapping[str, str] | None = None) -> Config:
    """The config as a task is to use it.

    Args:
        text: The resolved config, as YAML.
        environment: `THAWLINE_DEVICE` becomes `runtime.device`: a task that was given a GPU and
            sees none must not train for days on a CPU. `THAWLINE_WORK` is where checkpoints lie,
            in its folder `checkpoints`, unless `finetune.checkpoint.folder` says where. Default:
            this process's.

    Raises:
        ConfigError: The config cannot be used.
    """
    environment = os.environ if environment is None else environment
    config = parse_config(text)
    changes = []
    if device := environment.get(DEVICE_VARIABLE):
        changes.append(f"runtime.device={device}")
    work = environment.get(WORK_VARIABLE)
    if work and config.finetune.checkpoint.folder is None:
        changes.append(f"finetune.checkpoint.folder={work.rstrip('/')}/checkpoints")
    return parse_config(text, changes) if changes else config
