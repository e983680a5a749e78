"""One lookup and one update of an ID table, beside peers and beside copying the same bytes.

28,160 ids a step (512 requests, 50 in the history and 5 candidates), width 64, two threads. The
contestants take turns, so that a noisy machine is noisy for all of them; medians are printed.

- thawline: `LocalTable`, row-wise Adagrad; also with every other row closed, with bfloat16 rows,
  and frozen (lookup alone);
- fbgemm: `SplitTableBatchedEmbeddingBagsCodegen`, row-wise Adagrad fused into its backward;
- torch adagrad: `nn.Embedding(sparse=True)` and `torch.optim.Adagrad`;
- copy: as many bytes copied as a lookup reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import fbgemm_gpu  # noqa: F401  (loads the operators)
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thawline.tables import LocalTable

LEARNING_RATE = 0.02
Step = Callable[[Tensor], None]


def main() -> None:
    """Runs every contest and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=28_160)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    grad = torch.randn(options.ids, options.dim, generator=torch.Generator().manual_seed(0))
    for zipf in (0.0, 1.1):
        contest(options, grad, zipf)
    sizes(options, grad)


def contest(options: argparse.Namespace, grad: Tensor, zipf: float) -> None:
    """All contestants on 1 M rows with ids of one popularity."""
    rows = 1_000_000
    batches = [draw_ids(rows, options.ids, zipf, seed) for seed in range(4)]
    weight = LocalTable.random(rows, options.dim, seed=0).weight
    source, target = torch.randn_like(grad), torch.empty_like(grad)
    steps: dict[str, Step] = {
        "thawline": thawline_step(weight.clone(), grad),
        "thawline, half closed": thawline_step(weight.clone(), grad, closed=torch.arange(rows) % 2),
        "thawline, bfloat16": thawline_step(weight.bfloat16(), grad),
        "thawline, frozen": frozen_step(weight.clone()),
        "fbgemm": fbgemm_step(weight, grad),
        "torch adagrad": torch_step(weight.clone(), grad),
        "copy": lambda ids: target.copy_(source),  # type: ignore[dict-item, return-value]
    }
    medians = compete(steps, batches, options.rounds)
    distinct = int(np.median([len(ids.unique()) for ids in batches]))
    name = "drawn evenly" if zipf == 0 else f"Zipf {zipf:g}"
    table = Table(title=f"1 M rows, ids {name}: {distinct:,} distinct", title_justify="left")
    table.add_column("table")
    for heading in ("ms", "against thawline", "against copy"):
        table.add_column(heading, justify="right")
    for contestant, median in medians.items():
        table.add_row(
            contestant,
            f"{1e3 * median:.2f}",
            f"{median / medians['thawline']:.2f}x",
            f"{median / medians['copy']:.1f}x",
        )
    Console().print(table)


def sizes(options: argparse.Namespace, grad: Tensor) -> None:
    """The same number of ids out of more and more rows."""
    steps: dict[str, Step] = {}
    for rows in (100_000, 1_000_000, 10_000_000):
        ids = draw_ids(rows, options.ids, 0.0, 0)
        step = thawline_step(torch.zeros(rows, options.dim), grad)
        steps[f"{rows:,}"] = lambda _, step=step, ids=ids: step(ids)  # type: ignore[misc]
    medians = compete(steps, [torch.empty(0)], options.rounds)
    least = min(medians.values())
    table = Table(title="thawline, ids drawn evenly from", title_justify="left")
    for heading in ("rows", "ms", "against the smallest"):
        table.add_column(heading, justify="right")
    for name, median in medians.items():
        table.add_row(name, f"{1e3 * median:.2f}", f"{median / least:.2f}x")
    Console().print(table)


def compete(steps: dict[str, Step], batches: list[Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of each contestant, taking turns; two rounds of warm-up are left out."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step(batches[turn % len(batches)])
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def draw_ids(rows: int, count: int, zipf: float, seed: int) -> Tensor:
    """Ids from 1 on, popular ones scattered over the table."""
    rng = np.random.default_rng(seed)
    if zipf == 0:
        return torch.from_numpy(rng.integers(1, rows, count))
    cumulative = np.cumsum(np.arange(1, rows, dtype=np.float64) ** -zipf)
    drawn = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return torch.from_numpy(np.random.default_rng(1).permutation(rows - 1)[drawn] + 1)


def thawline_step(weight: Tensor, grad: Tensor, closed: Tensor | None = None) -> Step:
    """Our table, training but for the rows where `closed` is not 0."""
    table = LocalTable(weight, learning_rate=LEARNING_RATE)
    if closed is not None:
        table.freeze(closed.bool())

    def step(ids: Tensor) -> None:
        lookup = table.lookup(ids)
        lookup.wait()
        lookup.apply(grad)

    return step


def frozen_step(weight: Tensor) -> Step:
    """Our table, frozen: a lookup and nothing else."""
    table = LocalTable(weight, trainable=False)
    return lambda ids: table.lookup(ids).wait()  # type: ignore[return-value]


def fbgemm_step(weight: Tensor, grad: Tensor) -> Step:
    """FBGEMM's table; its bags hold one id each."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(len(weight), weight.shape[1], EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.NONE,
    )
    table.split_embedding_weights()[0].copy_(weight)
    offsets = torch.arange(len(grad) + 1)
    return lambda ids: table(ids, offsets).backward(grad)  # type: ignore[no-any-return]


def torch_step(weight: Tensor, grad: Tensor) -> Step:
    """PyTorch's sparse embedding and its Adagrad."""
    table = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True, padding_idx=0)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=LEARNING_RATE)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        table(ids).backward(grad)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
