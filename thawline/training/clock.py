"""How long the phases of a step take, summed over an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "lookup", "rows", "forward", "backward", "update", "optimizer")
"""data: waiting for batches. lookup: launching lookups. rows: waiting for rows, which is the part
of a lookup that nothing hides. update: of the ID tables. optimizer: of the network."""


class Clock:
    """Seconds by phase; on CUDA between events, so that nothing waits for the device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Starts at nothing."""
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what stands within, and names it in a profiler's trace; phases do not nest."""
        with torch.profiler.record_function(name):
            if self._cuda and name != "data":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._events.append((name, start, end))
                return
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1e3
        taken, self._seconds, self._events = self._seconds, dict.fromkeys(PHASES, 0.0), []
        return taken
