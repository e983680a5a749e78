"""How much of a slow lookup prefetch hides, and what a step then takes.

The table is a local one whose rows come late, by a delay that stands for an all-to-all: they are
read when the lookup is launched, and a thread hands them over after the delay. The delays are 0 to
100 % of the compute time (forward, backward and the network's optimizer) of a step. Steps with and
without prefetch take turns, so that a noisy machine is noisy for both; medians are printed:

- exposed: seconds in which a step waits for its rows;
- step: the whole step, beside the sum and the maximum of compute and delay.

It fails where prefetch leaves more than 10 % of the exposed time of a lookup that is shorter than
backward and optimizer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thawline.tables import LocalTable, TableGroup
from thawline.tables.base import Lookup
from thawline.training.prefetch import Prefetcher

DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_EXPOSED = 0.1
"""Of what is exposed without prefetch."""


@dataclass(frozen=True)
class LateLookup:
    """Rows that were read at once and arrive later."""

    lookup: Lookup
    arrival: Future[None]

    def wait(self) -> Tensor:
        """See `Lookup.wait`."""
        self.arrival.result()
        return self.lookup.wait()

    def apply(self, grad: Tensor) -> None:
        """See `Lookup.apply`."""
        self.lookup.apply(grad)


class LateTable(LocalTable):
    """A local table behind a slow network."""

    delay = 0.0
    """Seconds."""
    network = ThreadPoolExecutor(1)
    """One, since exchanges follow each other."""

    def lookup(self, rows: Tensor) -> LateLookup:  # type: ignore[override]
        """See `IdTable.lookup`."""
        return LateLookup(super().lookup(rows), self.network.submit(time.sleep, self.delay))


@dataclass
class Times:
    """Seconds of each step."""

    exposed: list[float]
    forward: list[float]
    rest: list[float]
    """Backward and optimizer."""
    update: list[float]
    step: list[float]

    def median(self, name: str) -> float:
        """Of one of them, without the first steps."""
        return float(np.median(getattr(self, name)[3:]))


class Contestant:
    """A small network over a table, trained with or without prefetch, step by step."""

    def __init__(self, options: argparse.Namespace, delay: float, staleness: int) -> None:
        """The same network and batches, whoever asks."""
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        rows = torch.randn(options.rows, options.dim, generator=generator)
        self.table = LateTable(rows)
        self.table.delay = delay
        self.network = nn.Sequential(
            nn.Linear(options.dim, options.width), nn.ReLU(), nn.Linear(options.width, 1)
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), fused=True)
        prefetcher: Prefetcher[Tensor] = Prefetcher(
            TableGroup({"item": self.table}), lambda batch: {"item": batch}, staleness=staleness
        )
        batches = (
            torch.randint(1, options.rows, (options.lookups,), generator=generator)
            for _ in range(options.steps)
        )
        self.times = Times([], [], [], [], [])
        self._run = self._steps(prefetcher.steps(batches))

    def step(self) -> None:
        """The next step."""
        next(self._run)

    def _steps(self, steps: Iterator) -> Iterator[None]:  # type: ignore[type-arg]
        while True:
            marks = [time.perf_counter()]
            step = next(steps)
            marks.append(time.perf_counter())
            loss = self.network(step.embeddings["item"]).square().mean()
            step.look_ahead()
            marks.append(time.perf_counter())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            marks.append(time.perf_counter())
            step.apply()
            marks.append(time.perf_counter())
            spans = [*np.diff(marks), marks[-1] - marks[0]]
            for name, seconds in zip(vars(self.times), spans, strict=True):
                getattr(self.times, name).append(seconds)
            yield


def main() -> None:
    """Measures every delay and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lookups", type=int, default=4_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    alone = Contestant(options, 0.0, 0)
    for _ in range(options.steps):
        alone.step()
    compute = alone.times.median("forward") + alone.times.median("rest")
    table = Table(title=f"compute {1e3 * compute:.1f} ms a step; ms", title_justify="left")
    for heading in (
        *("delay", "exposed", "exposed, prefetch", "left", "hidden behind", "step"),
        *("step, prefetch", "sum", "maximum"),
    ):
        table.add_column(heading, justify="right")
    failed = False
    for share in DELAYS:
        delay = share * compute
        plain, ahead = (Contestant(options, delay, staleness) for staleness in (0, 1))
        for _ in range(options.steps):
            plain.step()
            ahead.step()
        exposed, left = plain.times.median("exposed"), ahead.times.median("exposed")
        hiding = ahead.times.median("rest") + ahead.times.median("update")
        own = sum(plain.times.median(name) for name in ("forward", "rest", "update"))
        if share and delay < ahead.times.median("rest"):
            failed = failed or left > MOST_EXPOSED * exposed
        steps = (plain.times.median("step"), ahead.times.median("step"))
        figures = (hiding, *steps, own + delay, max(own, delay))
        table.add_row(
            *(f"{1e3 * seconds:.1f}" for seconds in (delay, exposed, left)),
            f"{left / exposed:.1%}",
            *(f"{1e3 * seconds:.1f}" for seconds in figures),
        )
    Console(width=120).print(table)
    if failed:
        sys.exit(f"prefetch left more than {MOST_EXPOSED:.0%} of an exposed lookup")


if __name__ == "__main__":
    main()
