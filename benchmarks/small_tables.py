"""The backward of small tables, by one-hot product and by scatter, and the gather of single rows.

First, for tables of 4 to 256 rows and 10 k to 500 k ids a step, the sum of the gradients by row:

- one-hot, scatter: ours, as `SmallTable` calls them;
- nn.Embedding: `embedding_dense_backward`, which PyTorch's module runs.

Up to how many rows the one-hot product wins is printed for each number of ids. Then `gather`
beside `F.embedding` and `F.embedding_bag` with one id a bag: a frozen read, and a read with its
dense gradient. Contestants take turns, so that a noisy machine is noisy for all of them; the first
table has the shortest run of each, the second medians. It runs on CUDA where there is one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from thawline.tables.choices import device_name
from thawline.tables.crossover import ROWS, Step, compete, last_won, sweep
from thawline.tables.gather import gather

IDS = (10_000, 50_000, 100_000, 500_000)
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
    ratios: dict[int, dict[int, float]] = {}
    for timed in sweep(
        IDS,
        dim=options.dim,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        rounds=options.rounds,
        more=embedding_backward,
    ):
        ratios.setdefault(timed.ids, {})[timed.rows] = timed.ratio
        table.add_row(
            f"{timed.ids:,}",
            str(timed.rows),
            *(f"{1e3 * median:.3f}" for median in timed.seconds.values()),
            f"{timed.ratio:.2f}",
            end_section=timed.rows == ROWS[-1],
        )
    Console().print(table)
    for count, by_rows in ratios.items():
        Console().print(f"{count:,} ids: {verdict(by_rows)}", highlight=False)


def verdict(ratios: dict[int, float]) -> str:
    """Up to how many rows one-hot is the quicker way."""
    last = last_won(ratios)
    if last is None:
        return f"scatter wins from {min(ratios)} rows on"
    return f"one-hot wins up to {last} rows" + (" at least" if last == max(ratios) else "")


def embedding_backward(grad: Tensor, ids: Tensor, rows: int) -> dict[str, Step]:
    """What PyTorch's own module runs."""
    dense_backward = torch.ops.aten.embedding_dense_backward
    return {"nn.Embedding": lambda: dense_backward(grad, ids, rows, -1, False)}


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
            medians = compete(steps, options.device, times * options.rounds)
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


if __name__ == "__main__":
    main()
