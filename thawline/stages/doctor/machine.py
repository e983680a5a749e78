"""Python, packages, torch, the engine of sharded tables, the GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from thawline import __version__
from thawline.config import Config
from thawline.errors import ConfigError, ThawlineError
from thawline.stages.doctor.findings import Skipped
from thawline.stages.task import DEVICE_VARIABLE

ENGINE_SECONDS = 180.0
"""TorchRec takes long to import from a cold disk."""


def python(wanted: str | None = None) -> str:
    """The interpreter's version.

    Args:
        wanted: A specifier such as `>=3.11`. None: Thawline's own.
    """
    wanted = wanted or importlib.metadata.metadata("thawline")["Requires-Python"] or ""
    found = platform.python_version()
    if found not in SpecifierSet(wanted):
        raise ConfigError(
            f"this is Python {found}, and Thawline needs {wanted}",
            "make the virtual environment with such a Python and install Thawline there",
        )
    return f"Python {found}, Thawline {__version__}, {sys.executable}"


def packages(wanted: Iterable[str] | None = None) -> str:
    """Whether every package that Thawline names is here in a version that it takes.

    Args:
        wanted: Requirements as in `pyproject.toml`. None: Thawline's own, without its extras.
    """
    if wanted is None:
        wanted = importlib.metadata.requires("thawline") or ()
    requirements = [Requirement(text) for text in wanted]
    # A marker that asks for an extra does not hold where none is named.
    needed = [each for each in requirements if not each.marker or each.marker.evaluate()]
    wrong = list(filter(None, map(_complaint, needed)))
    if wrong:
        raise ConfigError("; ".join(wrong), "install Thawline again: pip install thawline")
    return f"{len(needed)} packages, each in a version that Thawline takes"


def _complaint(needed: Requirement) -> str:
    try:
        found = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{needed.name} is not installed"
    if needed.specifier.contains(found, prereleases=True):
        return ""
    return f"{needed.name} is {found}, and Thawline needs {needed.specifier}"


def torch_works() -> str:
    """Whether torch multiplies."""
    import torch

    ones = torch.ones(16, 16)
    product = float((ones @ ones).sum())
    if product != 16**3:
        raise ThawlineError(
            f"torch {torch.__version__} says that 16 cubed is {product}",
            "install torch again, for this machine's processor",
        )
    cores = len(os.sched_getaffinity(0))
    return f"torch {torch.__version__}, {cores} cores"


def wants_gpu(config: Config) -> bool:
    """Whether the config or the task's profile asks for a GPU."""
    return config.runtime.device == "cuda" or os.environ.get(DEVICE_VARIABLE) == "cuda"


def gpu(config: Config) -> str:
    """Whether torch sees a GPU and computes on it."""
    import torch

    if not torch.cuda.is_available():
        if not wants_gpu(config):
            raise Skipped("torch sees no GPU, and runtime.device asks for none")
        built = torch.version.cuda
        raise ConfigError(
            "a GPU is asked for, and torch "
            + (f"sees none (it is built for CUDA {built})" if built else "is built without CUDA"),
            "check the driver (`nvidia-smi`) and on a cluster the task's accelerator"
            if built
            else "install the gpu extra: pip install 'thawline[gpu]'",
        )
    total = float(torch.ones(16, device="cuda").sum())
    if total != 16:
        raise ThawlineError(f"the GPU says that 16 ones are {total}", "check the GPU: `nvidia-smi`")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    free, whole = torch.cuda.mem_get_info(0)
    unused = ", not used by runtime.device=cpu" if config.runtime.device == "cpu" else ""
    return f"{', '.join(names)}; {free / 1e9:.0f} of {whole / 1e9:.0f} GB free{unused}"


def engine(config: Config, seconds: float = ENGINE_SECONDS) -> str:
    """Whether TorchRec and FBGEMM look rows up, in a process of its own: their faults are native.

    Args:
        config: Says whether they are needed.
        seconds: After which that process is ended.
    """
    needed = config.tables.engine == "torchrec" or wants_gpu(config)
    command = [sys.executable, "-m", "thawline.stages.doctor.lookup"]
    try:
        child = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ThawlineError(
            f"a lookup by TorchRec did not come to an end within {seconds:g} s",
            "see whether the machine or its disk is overloaded",
        ) from error
    return read_lookup(child.returncode, child.stdout, child.stderr, needed=needed)


def read_lookup(code: int, out: str, err: str, *, needed: bool) -> str:
    """What a process said that ran `thawline.stages.doctor.lookup`."""
    remedy = "install the engine: pip install 'thawline[cpu]' and torchrec (see pyproject.toml)"
    try:
        told = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = (err.strip().splitlines() or ["no word"])[-1]
        raise ThawlineError(f"a lookup by TorchRec ended with {code}: {last}", remedy) from error
    if missing := told.get("missing"):
        if not needed:
            raise Skipped(f"{missing}; one process on CPUs does without")
        raise ConfigError(str(missing), remedy)
    return str(told["found"])
