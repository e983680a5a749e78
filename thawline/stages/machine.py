"""Setting up the machine that a stage runs on."""

from __future__ import annotations

import os

import torch

from thawline.config import Runtime
from thawline.errors import ConfigError


def prepare_machine(runtime: Runtime) -> str:
    """Sets torch's thread count and gives the device to train on.

    Raises:
        ConfigError: A GPU was asked for and none is visible.
    """
    torch.set_num_threads(runtime.threads or len(os.sched_getaffinity(0)))
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "runtime.device is cuda, but torch sees no GPU",
            "install the gpu extra and check the driver, or set runtime.device to auto",
        )
    if runtime.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return runtime.device


def share_cores(runtime: Runtime, processes: int) -> None:
    """Divides the cores between the processes of a job on this machine, if none were asked for."""
    if not runtime.threads:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
