"""Which of several ways is the quickest: measured once, then remembered on this machine.

Ways that compute the same sum in another order differ in the last bits, so a choice that could
turn out differently in the next run would change the weights it trains. A choice is therefore
kept in a file beside the process's memory.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Wait = Callable[[], None]

ROUNDS = 9
SECONDS = 0.2
"""A measurement ends after so many rounds or so many seconds, whichever comes first."""


class Choices:
    """Names chosen by key, in this process and in a JSON file of the user's cache folder.

    The first process that stores a key wins, whatever others measured at the same time. Where no
    file can be written (a container without a home), choices last as long as the process.
    """

    def __init__(self, file_name: str) -> None:
        """Keeps `thawline/<file_name>` under `$XDG_CACHE_HOME` or `~/.cache`."""
        self.file_name = file_name
        self._known: dict[str, str] = {}

    def choose(self, key: str, ways: Mapping[str, Callable[[], object]], wait: Wait) -> str:
        """The name of the quickest way, measured the first time that `key` is asked for.

        Args:
            key: Says all that the choice depends on: device, versions, shapes.
            ways: What competes, by name; called several times in the first measurement.
            wait: Waits until the device is idle.
        """
        if key not in self._known:
            name = self._read().get(key, "")
            if name not in ways:
                name = self._store(key, quickest(ways, wait), ways)
            self._known[key] = name
        return self._known[key]

    @property
    def path(self) -> Path | None:
        """The file; None where the user has no home."""
        folder = os.environ.get("XDG_CACHE_HOME", "")
        try:
            root = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
        except RuntimeError:
            return None
        return root / "thawline" / self.file_name

    def _read(self) -> dict[str, str]:
        """What the file holds; nothing where it is missing or damaged."""
        try:
            known = json.loads(self.path.read_text(encoding="utf-8")) if self.path else {}
        except (OSError, ValueError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {key: name for key, name in known.items() if isinstance(name, str)}

    def _store(self, key: str, name: str, ways: Mapping[str, object]) -> str:
        """Adds a choice to the file, unless another process was first; gives what now counts."""
        if self.path is None:
            return name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = self._read()
                if known.get(key, "") in ways:
                    return known[key]
                temporary = self.path.with_suffix(".tmp")
                text = json.dumps(known | {key: name}, indent=1, sort_keys=True)
                temporary.write_text(text + "\n", encoding="utf-8")
                temporary.replace(self.path)
        except OSError:
            pass
        return name


def quickest(ways: Mapping[str, Callable[[], object]], wait: Wait) -> str:
    """The way with the shortest run: they take turns, after a run each that does not count."""
    for way in ways.values():
        way()
    shortest = dict.fromkeys(ways, math.inf)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for name, way in ways.items():
            wait()
            started = time.perf_counter()
            way()
            wait()
            shortest[name] = min(shortest[name], time.perf_counter() - started)
        if time.perf_counter() - began > SECONDS:
            break
    return min(shortest, key=lambda name: shortest[name])


def device_name(device: torch.device) -> str:
    """The model of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'cpu'} {torch.backends.cpu.get_cpu_capability()}"
