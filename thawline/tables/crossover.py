"""Where a small table's backward changes hands: the two ways timed over rows and ids.

`small.choose_way` measures one shape when it is first met; here a range of shapes is measured, for
a report and the benchmark.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thawline.tables.small import WAYS

ROWS = (4, 8, 16, 32, 64, 128, 256)
ONE_HOT, SCATTER = WAYS
WARM_UP = 2
"""Rounds that do not count."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Seconds of each way for one shape."""

    rows: int
    ids: int
    seconds: Mapping[str, float]
    """Of the shortest run, which other work on the machine lengthens least; by the way's name."""
    error: Mapping[str, float]
    """Largest distance from the sum in float64, over the largest entry of that sum."""

    @property
    def ratio(self) -> float:
        """One-hot's time over the scatter's: below 1, one-hot is quicker."""
        return self.seconds[ONE_HOT] / self.seconds[SCATTER]


def sweep(
    ids: Sequence[int],
    *,
    rows: Sequence[int] = ROWS,
    dim: int = 64,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 7,
    more: Callable[[torch.Tensor, torch.Tensor, int], Mapping[str, Step]] | None = None,
) -> Iterator[Timed]:
    """Times both ways for every number of ids and, within it, of rows.

    Args:
        ids: Lookups a step; where they are few, more rounds are taken.
        rows: Of the table, rising.
        dim: Width of the table.
        device: Where.
        dtype: Of the gradients.
        rounds: At the most ids.
        more: Further contestants from gradients [n, dim], ids [n] and rows, by name.
    """
    generator = torch.Generator(device).manual_seed(0)
    for count, height in itertools.product(ids, rows):
        drawn = torch.randint(0, height, (count,), device=device, generator=generator)
        grad = torch.randn(count, dim, device=device, generator=generator).to(dtype)
        steps: dict[str, Step] = {
            name: functools.partial(way, grad, drawn, height) for name, way in WAYS.items()
        }
        exact = torch.zeros(height, dim, dtype=torch.float64, device=device)
        exact.index_add_(0, drawn, grad.double())
        error = {
            name: float((way(grad, drawn, height).double() - exact).abs().max() / exact.abs().max())
            for name, way in WAYS.items()
        }
        if more is not None:
            steps |= more(grad, drawn, height)
        turns = rounds * max(1, max(ids) // (10 * count))
        seconds = compete(steps, device, turns, np.min)
        yield Timed(height, count, seconds, error)


def compete(
    steps: Mapping[str, Step],
    device: str,
    rounds: int,
    summed_up: Callable[[Sequence[float]], float] = np.median,
) -> dict[str, float]:
    """Seconds of each contestant over its rounds; they take turns, so that noise is shared."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + WARM_UP):
        for name, step in steps.items():
            _wait(device)
            started = time.perf_counter()
            step()
            _wait(device)
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - started)
    return {name: float(summed_up(seconds)) for name, seconds in times.items()}


def last_won(ratios: Mapping[int, float]) -> int | None:
    """The most rows up to which one-hot is quicker for all that were timed; None: for none.

    Args:
        ratios: `Timed.ratio` by rows, rising.
    """
    ahead = list(itertools.takewhile(lambda rows: ratios[rows] < 1, ratios))
    return ahead[-1] if ahead else None


def crossover(ratios: Mapping[int, float]) -> float | None:
    """Rows at which both ways take equally long, between the two that were timed around it.

    Args:
        ratios: `Timed.ratio` by rows, rising.

    Returns:
        By a straight line in the logarithms of rows and ratio; None where one way wins throughout.
    """
    for (few, low), (many, high) in itertools.pairwise(ratios.items()):
        if low < 1 <= high:
            share = np.log(low) / (np.log(low) - np.log(high))
            return float(few * (many / few) ** share)
    return None


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
