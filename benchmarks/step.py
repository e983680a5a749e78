"""Requests a second of a whole fine-tuning step, beside two peers that train the same model.

Every contestant trains the same ranker with the same dense Adam on the same batches (512 requests,
history 50, 5 candidates, width 64, 1 M rows); they differ in what holds the
item rows:

- thawline: `LocalTable`, row-wise Adagrad; and the same table while it is frozen;
- torchrec: `EmbeddingCollection`, sharded on one rank (gloo), with FBGEMM's row-wise Adagrad fused
  into the backward;
- torch adagrad, torch sparse adam: `nn.Embedding(sparse=True)` and that optimizer.

The contestants take turns step by step, so that a noisy machine is noisy for all of them; medians
are printed. Then an epoch is trained from a dataset on disk, sampled negatives and all, and the
share of it spent waiting for batches is printed.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thawline.config import Model, Simulate, parse_config
from thawline.data.batches import Batch, RequestReader
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.data.simulate import simulate
from thawline.data.windows import build_dataset
from thawline.model.bundle import Meta
from thawline.model.ranker import Ranker
from thawline.tables import LocalTable
from thawline.training.components import TrainedTable
from thawline.training.loop import Trainer
from thawline.training.schedule import Schedule

LEARNING_RATE = 0.02


def main() -> None:
    """Runs the contest and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the ids; 0: uniform")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    batches = [make_batch(rng, options) for _ in range(4)]
    contestants = {
        "thawline": thawline_step,
        "thawline, frozen": functools.partial(thawline_step, frozen=True),
        "torchrec": torchrec_step,
        "torch adagrad": sparse_step(torch.optim.Adagrad),
        "torch sparse adam": sparse_step(torch.optim.SparseAdam),
    }
    steps = {name: make(options) for name, make in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds + 2):
        batch = batches[turn % len(batches)]
        for name, step in steps.items():
            started = time.perf_counter()
            step(batch)
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    show(times, options.batch)
    show_waiting(options)


def make_batch(rng: np.random.Generator, options: argparse.Namespace) -> Batch:
    """A batch of full histories whose ids follow a Zipf law over all rows but padding."""
    size, length, count = options.batch, options.history, options.candidates
    ranks = np.arange(1, options.rows, dtype=np.float64)
    cumulative = np.cumsum(ranks**-options.zipf)
    scattered = np.random.default_rng(1).permutation(options.rows - 1) + 1

    def draw(*shape: int) -> Tensor:
        drawn = np.searchsorted(cumulative, rng.random(shape) * cumulative[-1])
        return torch.from_numpy(scattered[drawn])

    labels = torch.zeros(size, count, 1)
    labels[:, 0] = 1
    return Batch(
        request_id=torch.arange(size),
        timestamp=torch.zeros(size, dtype=torch.int64),
        history_row=draw(size, length),
        history_action=torch.ones(size, length, dtype=torch.int64),
        history_age=torch.from_numpy(rng.exponential(24.0, (size, length)).astype(np.float32)),
        candidate_row=draw(size, count),
        candidate_mask=torch.ones(size, count, dtype=torch.bool),
        candidate_log_q=torch.full((size, count), -10.0),
        labels=labels,
        context=torch.from_numpy(rng.integers(0, 10, (size, 3))),
        oracle=None,
    )


class Repeated:
    """A reader that gives the same batches each epoch."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.num_batches = len(batches)

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """What is left of it."""
        return iter(self.batches[start:])


def make_ranker(options: argparse.Namespace) -> tuple[Ranker, torch.optim.Optimizer]:
    """The same network, whoever asks, and its Adam."""
    torch.manual_seed(0)
    ranker = Ranker(
        Model(dim=options.dim),
        actions=1,
        context_sizes={"a": 10, "b": 10, "c": 10},
        history_length=options.history,
    )
    return ranker, torch.optim.Adam(ranker.parameters(), lr=1e-3, fused=True)


def make_rows(options: argparse.Namespace) -> Tensor:
    """The same starting rows, whoever asks."""
    return LocalTable.random(options.rows, options.dim, seed=0).weight


def thawline_step(options: argparse.Namespace, *, frozen: bool = False) -> Callable[[Batch], None]:
    """Our table."""
    ranker, adam = make_ranker(options)
    table = LocalTable(make_rows(options), learning_rate=LEARNING_RATE, trainable=not frozen)

    def step(batch: Batch) -> None:
        lookup = table.lookup(batch.rows)
        embeddings = lookup.wait()
        loss = ranker.loss(batch, {"item": embeddings}).total
        adam.zero_grad()
        loss.backward()
        if embeddings.grad is not None:
            lookup.apply(embeddings.grad)
        adam.step()

    return step


def sparse_step(
    optimizer: type[torch.optim.Optimizer],
) -> Callable[[argparse.Namespace], Callable[[Batch], None]]:
    """PyTorch's own sparse embedding with one of its sparse optimizers."""

    def make(options: argparse.Namespace) -> Callable[[Batch], None]:
        ranker, adam = make_ranker(options)
        table = nn.Embedding.from_pretrained(
            make_rows(options), freeze=False, sparse=True, padding_idx=0
        )
        sparse = optimizer(table.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]

        def step(batch: Batch) -> None:
            loss = ranker.loss(batch, {"item": table(batch.rows)}).total
            adam.zero_grad()
            sparse.zero_grad()
            loss.backward()
            sparse.step()
            adam.step()

        return step

    return make


def torchrec_step(options: argparse.Namespace) -> Callable[[Batch], None]:
    """TorchRec's EmbeddingCollection, sharded on one rank, its optimizer fused."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    dist.init_process_group("gloo", rank=0, world_size=1)
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="item",
                embedding_dim=options.dim,
                num_embeddings=options.rows,
                feature_names=["rows"],
            )
        ]
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
        }
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={
            "item": ParameterConstraints(compute_kernels=[EmbeddingComputeKernel.FUSED.value])
        },
    )
    plan = planner.plan(collection, [sharder])
    sharded = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    (weight,) = sharded.state_dict().values()
    weight.local_shards()[0].tensor.copy_(make_rows(options))
    ranker, adam = make_ranker(options)

    def step(batch: Batch) -> None:
        rows = batch.rows
        features = KeyedJaggedTensor(
            ["rows"], rows, lengths=torch.ones_like(rows, dtype=torch.int32)
        )
        embeddings = sharded(features)["rows"].values()
        loss = ranker.loss(batch, {"item": embeddings}).total
        adam.zero_grad()
        loss.backward()
        adam.step()

    return step


def show(times: dict[str, list[float]], batch: int) -> None:
    """Prints medians and ratios to ours."""
    ours = float(np.median(times["thawline"]))
    table = Table(title=f"one fine-tuning step, batch {batch}", title_justify="left")
    for heading in ("table", "ms a step", "requests/s", "thawline is faster by"):
        table.add_column(heading, justify="left" if heading == "table" else "right")
    for name, seconds in times.items():
        median = float(np.median(seconds))
        table.add_row(
            name, f"{1e3 * median:.1f}", f"{batch / median:,.0f}", f"{median / ours:.2f}x"
        )
    Console().print(table)


def show_waiting(options: argparse.Namespace) -> None:
    """Trains an epoch of a simulated click log and prints the time spent waiting for batches."""
    with tempfile.TemporaryDirectory() as folder:
        log = simulate(Simulate(impressions=600_000, users=1_500, items=20_000), Path(folder))
        config = parse_config(
            f"""
            events: {{path: {log.events}, actions: {{click: {{column: click}}}}}}
            windows: {{finetune_days: 20, pretrain_days: 8}}
            finetune: {{batch_size: {options.batch}}}
            model: {{dim: {options.dim}}}
            """
        )
        build_dataset(config, Path(folder) / "dataset")
        dataset = Dataset.open(Path(folder) / "dataset")
        table = LocalTable.random(dataset.catalog.num_rows, options.dim, seed=0)
        reader = RequestReader(
            dataset,
            "train",
            batch_size=options.batch,
            sampler=NegativeSampler(dataset, config.negatives, 0),
        )
        trainer = Trainer(
            Meta.of(dataset, config).make_ranker(),
            {"item": TrainedTable(table)},
            reader,
            Schedule(1),
            learning_rate=1e-3,
        )
        (summary,) = trainer.epochs()
    Console().print(
        f"waiting for batches: {summary.waiting / summary.seconds:.1%} of an epoch of "
        f"{summary.steps} steps, {1e3 * summary.seconds / summary.steps:.0f} ms each"
    )


if __name__ == "__main__":
    main()
