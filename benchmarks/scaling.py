"""Requests a second of fine-tuning in several processes, beside TorchRec's train pipelines.

Every contestant trains the same ranker with Adam and the same table of 1 M rows, split over the
processes, with row-wise Adagrad on the same batches, in 2 processes (gloo): histories of 50,
5 candidates, 64 wide.

- thawline: `Trainer` over `SplitTables`, lookups one update ahead; the same while the table is
  frozen; and over `ShardedTables`, which are TorchRec's kernels and exchange;
- torchrec base, torchrec sparse dist: `DistributedModelParallel` (DDP for the network) under
  `TrainPipelineBase` and `TrainPipelineSparseDist`;
- network alone: forward, backward and Adam with rows that are there already, without a table and
  without anything between the processes. No engine can be quicker than that, so the most by which
  one could beat another is the other's time over this one.

They take turns of a few steps each, in another order each round, so that a noisy machine is noisy
for all of them; medians over the rounds are printed (time by the clock, and on the CPU, which other
work on the machine disturbs less), and how many ids a lookup sends after those that are twice in it
are gone. The ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from step import LEARNING_RATE, Repeated, make_batch, make_ranker, make_rows
from torch import Tensor, nn
from torchrec.streamable import Pipelineable

from thawline.data.batches import Batch
from thawline.model.ranker import Ranker
from thawline.tables.parts import Shards
from thawline.tables.split import SplitTables
from thawline.training.components import TrainedTable
from thawline.training.distributed import DenseSums, Ranks, make_ranks
from thawline.training.loop import Trainer
from thawline.training.schedule import Plan, Schedule

Turn = Callable[[], float]
"""Trains a few steps and gives the seconds of one."""


def main() -> None:
    """Runs the contest with each number of processes and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[64, 512], help="requests a process and step"
    )
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the ids; 0: uniform")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="steps a turn")
    options = parser.parse_args()
    for count, batch in itertools.product(options.processes, options.batches):
        options.batch = batch
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(work, (count, folder, options), nprocs=count, start_method="spawn")
            show(json.loads(Path(folder, "found.json").read_text()), count, options)


def work(rank: int, count: int, folder: str, options: argparse.Namespace) -> None:
    """One process of the contest."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    ranks = make_ranks("cpu")
    rng = np.random.default_rng(rank)
    batches = [make_batch(rng, options) for _ in range(options.steps)]
    turns: dict[str, Turn] = {
        "thawline": thawline(options, ranks, batches),
        "thawline, frozen": thawline(options, ranks, batches, frozen=True),
        "thawline over torchrec": thawline(options, ranks, batches, engine="torchrec"),
        "torchrec base": torchrec(options, batches, "TrainPipelineBase"),
        "torchrec sparse dist": torchrec(options, batches, "TrainPipelineSparseDist"),
        "network alone": network_alone(options, batches),
    }
    found: dict[str, Any] = {name: [] for name in turns}
    order = np.random.default_rng(0)
    for number in range(options.rounds + 1):
        for name in order.permutation(list(turns)):
            turn = turns[name]
            ranks.wait()
            used = time.process_time()
            seconds = turn()
            used = (time.process_time() - used) / options.steps
            if number:
                found[name].append((seconds, used))
    if ranks.leads:
        rows = [batch.rows for batch in batches]
        asked, sent = (sum(map(len, each)) for each in (rows, [own.unique() for own in rows]))
        result = {"seconds": found, "sent": sent / asked}
        Path(folder, "found.json").write_text(json.dumps(result))
    ranks.wait()
    dist.destroy_process_group()


def thawline(
    options: argparse.Namespace,
    ranks: Ranks,
    batches: list[Batch],
    *,
    engine: str = "split",
    frozen: bool = False,
) -> Turn:
    """Our trainer over our split tables, or over TorchRec's."""
    from thawline.tables.sharded import ShardedTables

    make = SplitTables if engine == "split" else ShardedTables
    spec = Shards(make_rows(options), learning_rate=LEARNING_RATE, trainable=not frozen)
    group = dist.new_group()  # Of its own: lookups of two engines must not meet.
    assert isinstance(group, dist.ProcessGroup)
    tables = make({"item": spec}, group=group)
    epochs = options.rounds + 1
    trainer = Trainer(
        make_ranker(options)[0],
        {"item": TrainedTable(tables.tables["item"])},
        Repeated(batches),
        Schedule(epochs, {"item": Plan()} if frozen else {}),
        learning_rate=1e-3,
        staleness=1,
        group=tables.beside,
        sums=DenseSums(ranks, tables.settle),
    )
    summaries = trainer.epochs()

    def turn() -> float:
        summary = next(summaries)
        return summary.seconds / summary.steps

    return turn


def network_alone(options: argparse.Namespace, batches: list[Batch]) -> Turn:
    """The network's step without a table and without other processes."""
    ranker, adam = make_ranker(options)
    generator = torch.Generator().manual_seed(0)
    embeddings = [
        torch.randn(len(batch.rows), options.dim, generator=generator) * options.dim**-0.5
        for batch in batches
    ]

    def turn() -> float:
        started = time.perf_counter()
        for batch, rows in zip(batches, embeddings, strict=True):
            loss = ranker.loss(batch, {"item": rows.detach().requires_grad_()}).total
            adam.zero_grad()
            loss.backward()
            adam.step()
        return (time.perf_counter() - started) / len(batches)

    return turn


def torchrec(options: argparse.Namespace, batches: list[Batch], pipeline: str) -> Turn:
    """TorchRec's own way, with one of its train pipelines."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import train_pipeline
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

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
    model = Peer(collection, make_ranker(options)[0])
    sharder = EmbeddingCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
        }
    )
    count = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=count, local_world_size=count, compute_device="cpu"),
        constraints={
            "item": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
        },
    )
    world = dist.group.WORLD
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world),
        device=torch.device("cpu"),
        plan=planner.collective_plan(model, [sharder], world),
        sharders=[sharder],
    )
    dense = [own for name, own in parallel.named_parameters() if "head" in name]
    adam = torch.optim.Adam(dense, lr=1e-3, fused=True)
    made = getattr(train_pipeline, pipeline)(parallel, adam, torch.device("cpu"))
    endless = itertools.cycle([PeerBatch.of(batch) for batch in batches])

    def turn() -> float:
        started = time.perf_counter()
        for _ in batches:
            made.progress(endless)
        return (time.perf_counter() - started) / len(batches)

    return turn


@dataclass
class PeerBatch(Pipelineable):
    """A batch as TorchRec's pipelines want it."""

    features: Any
    batch: Batch

    @classmethod
    def of(cls, batch: Batch) -> PeerBatch:
        """With its rows as TorchRec's features."""
        from torchrec import KeyedJaggedTensor

        rows = batch.rows
        lengths = torch.ones_like(rows, dtype=torch.int32)
        return cls(KeyedJaggedTensor(["rows"], rows, lengths=lengths), batch)

    def to(self, device: torch.device, non_blocking: bool = False) -> PeerBatch:
        """Itself: all is on the CPU."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Nothing to record."""


class Head(nn.Module):
    """The ranker's loss as a module's forward."""

    def __init__(self, ranker: Ranker) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(self, batch: PeerBatch, embeddings: Tensor) -> Tensor:
        """The loss."""
        return self.ranker.loss(batch.batch, {"item": embeddings}).total


class Peer(nn.Module):
    """A table and the ranker, for TorchRec to split."""

    def __init__(self, collection: nn.Module, ranker: Ranker) -> None:
        super().__init__()
        self.collection = collection
        self.head = Head(ranker)

    def forward(self, batch: PeerBatch) -> tuple[Tensor, Tensor]:
        """The loss, and the loss again as the output."""
        found = self.collection(batch.features)
        loss = self.head(batch, found["rows"].values())
        return loss, loss.detach()


def show(found: dict[str, Any], count: int, options: argparse.Namespace) -> None:
    """Prints medians and ratios to ours."""
    rounds = {name: np.array(own) for name, own in found["seconds"].items()}
    medians = {name: np.median(own, axis=0) for name, own in rounds.items()}
    ratios = {name: np.median(own / rounds["thawline"], axis=0) for name, own in rounds.items()}
    title = f"{count} processes, {options.batch} requests each; {found['sent']:.0%} of ids sent"
    table = Table(title=title, title_justify="left")
    headings = ("contestant", "ms a step", "CPU ms a process", "requests/s")
    for heading in (*headings, "thawline is faster by", "by CPU time"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, (seconds, used) in medians.items():
        table.add_row(
            name,
            f"{1e3 * seconds:.1f}",
            f"{1e3 * used:.1f}",
            f"{count * options.batch / seconds:,.0f}",
            *(f"{ratio:.2f}x" for ratio in ratios[name]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
