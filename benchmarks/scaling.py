"""Requests a second of fine-tuning in several processes, beside TorchRec's train pipelines.

Every contestant trains the same ranker with Adam and the same sharded table with row-wise Adagrad
on the same batches, in 1 and 2 processes (gloo): histories of 50, 5 candidates, 64 wide.

- thawline: `Trainer` over `ShardedTables`, lookups one update ahead; and the same while it is
  frozen;
- torchrec base, torchrec sparse dist: `DistributedModelParallel` (DDP for the network) under
  `TrainPipelineBase` and `TrainPipelineSparseDist`.

They take turns of a few steps each, so that a noisy machine is noisy for all of them; medians over
the rounds are printed (time by the clock, and on the CPU, which other work on the machine disturbs
less), and how many ids a lookup sends after those that are twice in it are gone.
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
from step import LEARNING_RATE, make_batch, make_ranker
from torch import Tensor, nn
from torchrec.streamable import Pipelineable

from thawline.data.batches import Batch
from thawline.model.ranker import Ranker
from thawline.training.components import TrainedTable
from thawline.training.distributed import DenseSums, Ranks, make_ranks
from thawline.training.loop import Trainer
from thawline.training.schedule import Plan, Schedule

Turn = Callable[[], float]
"""Trains a few steps and gives the seconds of one."""


def main() -> None:
    """Runs the contest with each number of processes and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512, help="requests a process and step")
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the ids; 0: uniform")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    options = parser.parse_args()
    for count in options.processes:
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
        "torchrec base": torchrec(options, batches, "TrainPipelineBase"),
        "torchrec sparse dist": torchrec(options, batches, "TrainPipelineSparseDist"),
    }
    found: dict[str, Any] = {name: [] for name in turns}
    for number in range(options.rounds + 1):
        for name, turn in turns.items():
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


def table_rows(options: argparse.Namespace) -> Tensor:
    """The same starting rows, whoever asks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(options.rows, options.dim, generator=generator) * options.dim**-0.5


@dataclass
class Repeated:
    """The same batches each epoch."""

    batches: list[Batch]

    @property
    def num_batches(self) -> int:
        """Of an epoch."""
        return len(self.batches)

    def epoch(self, index: int, start: int = 0) -> Any:
        """What is left of it."""
        return iter(self.batches[start:])


def thawline(
    options: argparse.Namespace, ranks: Ranks, batches: list[Batch], *, frozen: bool = False
) -> Turn:
    """Our trainer over our sharded tables."""
    from thawline.tables.sharded import ShardedTables, Shards

    rows = table_rows(options)
    spec = Shards(rows, learning_rate=LEARNING_RATE, trainable=not frozen)
    tables = ShardedTables({"item": spec}, group=ranks.tables)
    epochs = options.rounds + 1
    trainer = Trainer(
        make_ranker(options)[0],
        {"item": TrainedTable(tables.tables["item"])},
        Repeated(batches),  # type: ignore[arg-type]
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
    medians = {name: np.median(own, axis=0) for name, own in found["seconds"].items()}
    ours = medians["thawline"][0]
    title = f"{count} processes, {options.batch} requests each; {found['sent']:.0%} of ids sent"
    table = Table(title=title, title_justify="left")
    headings = ("contestant", "ms a step", "CPU ms a process", "requests/s")
    for heading in (*headings, "thawline is faster by"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, (seconds, used) in medians.items():
        table.add_row(
            name,
            f"{1e3 * seconds:.1f}",
            f"{1e3 * used:.1f}",
            f"{count * options.batch / seconds:,.0f}",
            f"{seconds / ours:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
