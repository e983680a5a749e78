"""How long the phases of a step take, summed over an epoch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("data", "lookup", "rows", "forward", "backward", "update", "optimizer")
"""data: waiting for batches. lookup: launching lookups. rows: waiting for rows, which is the part
of a lookup that nothing hides. update: of the ID tables. optimizer: of the network; in several
processes it begins with a wait for the lookups under way, and on CPUs for the update before too."""


class Clock:
    """Seconds by phase; on CUDA between events, so that nothing waits for the device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Starts at nothing."""
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Of phases that the device may not have finished."""

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
                self._add_finished()
                return
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
        self._add_finished()
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _add_finished(self) -> None:
        while self._events and self._events[0][2].query():
            name, start, end = self._events.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1e3
