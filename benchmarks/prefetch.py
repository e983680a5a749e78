"""How much of a slow exchange prefetch hides in two processes, and what a step then takes.

Two processes (gloo) train the article's ranker and an ID table that is split between them. Each
exchange of rows and of their gradients (all-to-all) is made late, so that those of a lookup (how
many rows, which, their values) are late by 0 to 100 % of the compute time: forward, backward and
the network's step. Steps with and without prefetch take turns, so that a noisy machine is noisy for
both; medians are printed, in ms:

- exposed: in which a step waits for what travels: its rows, the next ones before the network's sum,
  the rows' gradients;
- step: the whole step, beside the sum and the maximum of the compute time and of what the exchanges
  take when nothing hides them.

It fails where prefetch leaves more than 10 % of what is exposed without it, though that is shorter
than the backward and the network's step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from step import LEARNING_RATE, Repeated, make_batch, make_ranker, make_rows

from thawline.tables.parts import Shards
from thawline.tables.split import SplitTables
from thawline.training.components import TrainedTable
from thawline.training.distributed import DenseSums, Ranks, make_ranks
from thawline.training.loop import Trainer
from thawline.training.schedule import Schedule

DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0)
EXCHANGES = 3
"""Of a lookup."""
MOST_EXPOSED = 0.1
"""Of what is exposed without prefetch."""

NAMES = ("plain", "ahead")
"""Without prefetch, with it: by staleness."""

Times = dict[str, float]
"""Seconds of a step: `compute`, `hiding` (backward and the network's step), `exposed`, `step`."""


class Late:
    """`all_to_all_single`, some seconds late."""

    def __init__(self) -> None:
        """Takes the place of the plain one."""
        self.seconds = 0.0
        self._plain = dist.all_to_all_single
        dist.all_to_all_single = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Sleeps, then exchanges."""
        time.sleep(self.seconds)
        return self._plain(*arguments, **options)


class Contestant:
    """A trainer with or without prefetch; the same network and batches, whoever asks."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, staleness: int) -> None:
        """Makes its tables; collective."""
        rng = np.random.default_rng(ranks.rank)
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        self.ranks = ranks
        self.tables = SplitTables(
            {"item": Shards(make_rows(options), learning_rate=LEARNING_RATE)}, group=group
        )
        self.trainer = Trainer(
            make_ranker(options)[0],
            {"item": TrainedTable(self.tables.tables["item"])},
            Repeated([make_batch(rng, options) for _ in range(options.steps)]),
            Schedule(1_000),
            learning_rate=1e-3,
            staleness=staleness,
            group=self.tables.beside,
            sums=DenseSums(ranks, self._settle),
            on_step=self._take,
        )
        self._epochs = self.trainer.epochs()
        self._settled = self._started = 0.0
        self._times: list[Times] = []

    def turn(self) -> list[Times]:
        """Trains an epoch; of its steps the first is left out, since no step came before it."""
        self.ranks.wait()
        self._times = []
        next(self._epochs)
        return self._times[1:]

    def _settle(self) -> None:
        started = time.perf_counter()
        self.tables.settle()
        self._settled += time.perf_counter() - started

    def _take(self, step: int, steps: int) -> None:
        """Notes what the step took."""
        phases = self.trainer.clock.take()
        hiding = phases["backward"] + phases["optimizer"] - self._settled
        now = time.perf_counter()
        self._times.append(
            {
                "compute": phases["forward"] + hiding,
                "hiding": hiding,
                "exposed": phases["rows"] + self._settled,
                "step": now - self._started,
            }
        )
        self._settled, self._started = 0.0, now


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks, late = make_ranks("cpu"), Late()
    contestants = {name: Contestant(options, ranks, number) for number, name in enumerate(NAMES)}
    found: list[dict[str, Any]] = []
    compute = 0.0
    for share in DELAYS:
        # Both processes wait for as long as the first one says.
        late.seconds = share * ranks.first(int(1e9 * compute)) / 1e9 / EXCHANGES
        times: dict[str, list[Times]] = {name: [] for name in NAMES}
        for number in range(options.rounds + 1):
            for name, own in contestants.items():
                turn = own.turn()
                times[name] += turn if number else []
        medians = {
            name: {key: float(np.median([each[key] for each in own])) for key in own[0]}
            for name, own in times.items()
        }
        compute = compute or medians["plain"]["compute"]
        found.append(medians | {"delay": EXCHANGES * late.seconds, "compute": compute})
    if ranks.leads:
        Path(folder, "found.json").write_text(json.dumps(found))
    ranks.wait()
    dist.destroy_process_group()


def rows_of(found: list[dict[str, Any]]) -> Iterator[tuple[list[str], bool]]:
    """A table's row for each delay, and whether it fails."""
    for own in found:
        plain, ahead, delay, compute = (own[key] for key in (*NAMES, "delay", "compute"))
        left = ahead["exposed"] / plain["exposed"]
        travels = plain["exposed"]
        times = (delay, plain["exposed"], ahead["exposed"], ahead["hiding"])
        steps = (plain["step"], ahead["step"], compute + travels, max(compute, travels))
        cells = [f"{1e3 * seconds:.1f}" for seconds in (*times, *steps)]
        cells.insert(3, f"{left:.1%}")
        judged = bool(delay) and travels < ahead["hiding"]
        yield cells, judged and left > MOST_EXPOSED


def main() -> None:
    """Measures every delay and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=64, help="requests a process and step")
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the ids; 0: uniform")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, options), nprocs=2, start_method="spawn")
        found = json.loads(Path(folder, "found.json").read_text())
    title = f"2 processes, {options.batch} requests each, ms a step"
    table = Table(title=title, title_justify="left")
    for heading in (
        *("delay", "exposed", "exposed, prefetch", "left", "backward + network's step"),
        *("step", "step, prefetch", "sum", "maximum"),
    ):
        table.add_column(heading, justify="right")
    rows = list(rows_of(found))
    for cells, _ in rows:
        table.add_row(*cells)
    Console(width=120).print(table)
    if any(fails for _, fails in rows):
        sys.exit(f"prefetch left more than {MOST_EXPOSED:.0%} of what is exposed without it")


if __name__ == "__main__":
    main()
