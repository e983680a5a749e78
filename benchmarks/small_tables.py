"""The backward of small tables, by one-hot product and by scatter, and the gather of single rows.

First, for tables of 4 to 256 rows and 10 k to 500 k ids a step, the sum of the gradients by row:

- one-hot, scatter: ours, as `SmallTable` calls them;
- nn.Embedding: `embedding_dense_backward`, which PyTorch's module runs.

Up to how many rows the one-hot product wins is printed for each number of ids. Then `gather`
beside `F.embedding` and `F.embedding_bag` with one id a bag: a frozen read, and a read with its
dense gradient. Contestants take turns, so that a noisy machine is noisy for all of them; medians
are printed. It runs on CUDA where there is one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from thawline.tables.choices import device_name
from thawline.tables.gather import gather, sum_rows
from thawline.tables.small import sum_one_hot

ROWS = (4, 8, 16, 32, 64, 128, 256)
IDS = (10_000, 50_000, 100_000, 500_000)
Step = Callable[[], object]
Read = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    """Runs every contest and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7, help="fewer ids take more")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    Console().print(f"{device_name(torch.device(options.device))}, {options.threads} threads")
    backwards(options)
    gathers(options)


def backwards(options: argparse.Namespace) -> None:
    """One-hot against scatter and `nn.Embedding` over rows and ids."""
    table = Table(
        title=f"sum of gradients by row, width {options.dim}, {options.dtype}: ms",
        title_justify="left",
    )
    for heading in ("ids", "rows", "one-hot", "scatter", "nn.Embedding", "one-hot / scatter"):
        table.add_column(heading, justify="right")
    ratios: dict[int, dict[int, float]] = {count: {} for count in IDS}
    for count, rows in itertools.product(IDS, ROWS):
        rounds = options.rounds * max(1, IDS[-1] // (10 * count))
        medians = compete(backward_steps(rows, count, options), options, rounds)
        ratios[count][rows] = medians["one-hot"] / medians["scatter"]
        table.add_row(
            f"{count:,}",
            str(rows),
            *(f"{1e3 * median:.3f}" for median in medians.values()),
            f"{ratios[count][rows]:.2f}",
            end_section=rows == ROWS[-1],
        )
    Console().print(table)
    for count, by_rows in ratios.items():
        Console().print(f"{count:,} ids: {crossover(by_rows)}", highlight=False)


def crossover(ratios: dict[int, float]) -> str:
    """Up to how many rows one-hot is the quicker way."""
    ahead = list(itertools.takewhile(lambda rows: ratios[rows] < 1, ratios))
    if not ahead:
        return f"scatter wins from {min(ratios)} rows on"
    if len(ahead) == len(ratios):
        return f"one-hot wins up to {ahead[-1]} rows at least"
    return f"one-hot wins up to {ahead[-1]} rows"


def backward_steps(rows: int, count: int, options: argparse.Namespace) -> dict[str, Step]:
    """Each way to sum the same gradients."""
    ids = torch.randint(0, rows, (count,), device=options.device)
    dtype = getattr(torch, options.dtype)
    grad = torch.randn(count, options.dim, device=options.device, dtype=dtype)
    dense_backward = torch.ops.aten.embedding_dense_backward
    return {
        "one-hot": lambda: sum_one_hot(grad, ids, rows),
        "scatter": lambda: sum_rows(grad, ids, rows),
        "nn.Embedding": lambda: dense_backward(grad, ids, rows, -1, False),
    }


def gathers(options: argparse.Namespace, count: int = 28_160) -> None:
    """`gather` against PyTorch's functions over tables of several sizes."""
    reads: dict[str, Read] = {
        "gather": gather,
        "F.embedding": lambda weight, ids: functional.embedding(ids, weight),
        "F.embedding_bag": one_id_a_bag,
    }
    table = Table(title=f"{count:,} ids, width {options.dim}: ms", title_justify="left")
    for heading in ("rows", "read", *reads):
        table.add_column(heading, justify="right")
    for rows in (1_000, 100_000, 1_000_000):
        ids = torch.randint(0, rows, (count,), device=options.device)
        weight = torch.randn(rows, options.dim, device=options.device)
        grad = torch.randn(count, options.dim, device=options.device)
        frozen = {name: functools.partial(read, weight, ids) for name, read in reads.items()}
        training = {name: trained(read, weight, ids, grad) for name, read in reads.items()}
        contests = (("frozen", frozen, 5), ("with gradient", training, 1))
        for heading, steps, times in contests:
            medians = compete(steps, options, times * options.rounds)
            row = (f"{1e3 * median:.3f}" for median in medians.values())
            table.add_row(f"{rows:,}", heading, *row)
    Console().print(table)


def one_id_a_bag(weight: Tensor, ids: Tensor) -> Tensor:
    """An `EmbeddingBag` whose bags hold one id each."""
    offsets = torch.arange(len(ids), device=ids.device)
    return functional.embedding_bag(ids, weight, offsets, mode="sum")


def trained(read: Read, weight: Tensor, ids: Tensor, grad: Tensor) -> Step:
    """A read and the dense gradient of what it read."""
    leaf = weight.clone().requires_grad_()
    return lambda: torch.autograd.grad(read(leaf, ids), leaf, grad)


def compete(
    steps: Mapping[str, Step], options: argparse.Namespace, rounds: int
) -> dict[str, float]:
    """Median seconds of each contestant, taking turns; two rounds of warm-up are left out."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            wait(options.device)
            started = time.perf_counter()
            step()
            wait(options.device)
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def wait(device: str) -> None:
    """Until the device has nothing left to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
