"""Training in several processes: who they are, what they split, what they add up.

Each process reads its own part of the requests and keeps its own part of the ID tables
(`thawline.tables.parts`); the network is the same in all of them. Its gradients are summed by one
flat all-reduce after the backward, not by DDP: DDP's buckets travel while the backward runs, where
they would meet the lookup of the next batch in an order that differs between processes, and its
buckets are made anew whenever a schedule freezes or thaws a part of the network.

Losses are normalised by the counts of all processes' batches, which travel with the lookups
(`thawline.tables.GroupLookup.total`), so sums over the processes are what
one process would compute on all of their requests, but for in-batch contrastive negatives, which
are the process's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thawline import logs
from thawline.data.batches import Batch, RequestReader, padded_width
from thawline.data.ids import IdTableSpec
from thawline.data.shards import Shard
from thawline.errors import ConfigError, TrainingError
from thawline.model.ranker import Losses

TIMEOUT = timedelta(hours=1)
"""How long a process waits for the others, as while the first one evaluates."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a job, this one's place among them, and their groups."""

    rank: int
    size: int
    local_size: int
    """Processes on this machine."""
    dense: dist.ProcessGroup
    """Of all processes, for the network's gradients and everything small."""
    tables: dist.ProcessGroup
    """Of all processes, for the ID tables' rows alone."""
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and writes what the job writes."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """The requests that this process reads."""
        return Shard(self.rank, self.size)

    def most(self, count: int) -> int:
        """The largest of the processes' counts; collective."""
        return self._reduce(count, dist.ReduceOp.MAX)

    def total(self, count: int) -> int:
        """The sum of the processes' counts; collective."""
        return self._reduce(count, dist.ReduceOp.SUM)

    def share(self, module: nn.Module) -> None:
        """Gives every process the first one's parameters; collective."""
        with torch.no_grad():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, dist.get_global_rank(self.dense, 0), group=self.dense)

    def wait(self) -> None:
        """Returns when every process has come here; collective."""
        self.most(0)

    def first(self, value: int) -> int:
        """The first process's value; collective."""
        return self.total(int(value) if self.leads else 0)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A block without collectives that succeeds in every process or in none; collective.

        Raises:
            TrainingError: The block failed in another process; where it failed, its own error.
        """
        try:
            yield
        except Exception as error:
            # Before the others know: when one of them ends, torchrun ends this process, which may
            # not have come to its own message by then.
            if self.size > 1:
                what = getattr(error, "what", error)
                logs.say(f"process {self.rank} of the job failed: {what}", "error")
            self.most(1)
            raise
        if self.most(0):
            raise TrainingError(
                "another process of the job failed", "see what that process says above or below"
            )

    def _reduce(self, count: int, how: dist.ReduceOp.RedOpType) -> int:
        value = torch.tensor(count, device=self.device)
        dist.all_reduce(value, how, group=self.dense)
        return int(value)


@contextmanager
def joined(device: str, *, alone: bool = False) -> Iterator[Ranks | None]:
    """Joins the job that `torchrun` has started, and leaves it at the end of the block.

    Backends are gloo on the CPU and NCCL on CUDA, one device a process.

    Args:
        device: `cpu` or `cuda`.
        alone: Makes a job of this one process where `torchrun` has started none.

    Yields:
        None where this process is alone and is not to be a job.

    Raises:
        TrainingError: From the block, where another process has gone.
    """
    started = dist.is_torchelastic_launched()
    if not (started or alone):
        yield None
        return
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    backend = "nccl" if device == "cuda" else "gloo"
    if started:
        # torchrun starts killed processes again with the store of those before, whose addresses
        # the groups would find in it.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_ranks(device, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except RuntimeError as error:
        # gloo has no class of its own for it.
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise TrainingError(
            f"the connection to another process of the job broke: {error}",
            "see what that process says above or below; where it says nothing, it was killed, by a "
            "lack of memory for example",
        ) from error
    finally:
        dist.destroy_process_group()


def make_ranks(device: str | torch.device, *, local_size: int = 1) -> Ranks:
    """The processes of the default group; collective."""
    ranks = list(range(dist.get_world_size()))
    dense, tables = (dist.new_group(ranks, timeout=TIMEOUT) for _ in range(2))
    device = torch.device(device)
    return Ranks(dist.get_rank(), len(ranks), local_size, dense, tables, device)


class DenseSums:
    """Sums over the processes, for the network. Each call is collective."""

    def __init__(self, ranks: Ranks, settle: Callable[[], None]) -> None:
        """Sums over all of `ranks`.

        Args:
            ranks: The processes.
            settle: Waits for the lookups under way: collectives of two groups at a time could
                wait for each other, each process for another one.
        """
        self.ranks = ranks
        self._settle = settle
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """Whether this process is to stop; `losses` tells the others."""
        self.stopping = False
        """Whether any process was to stop when the losses were last summed: the same in all."""

    def losses(self, losses: Losses) -> Losses:
        """The losses of all processes' batches, without a graph; brings `stopping` up to date."""
        return self._read(self._sum(self._told(losses)))

    def gradients(self, parameters: Iterable[nn.Parameter], losses: Losses) -> Losses:
        """Replaces gradients by their sums, and does what `losses` does, in one sum.

        A gradient that no process has stays None.
        """
        trained = [own for own in parameters if own.requires_grad]
        grads = [own.grad for own in trained]
        flat = [
            torch.zeros_like(own).flatten() if grad is None else grad.flatten()
            for own, grad in zip(trained, grads, strict=True)
        ]
        told = self._told(losses)
        there = told.new_tensor([float(grad is not None) for grad in grads])
        summed = self._sum(torch.cat([*flat, there, told]))
        sizes = [own.numel() for own in trained]
        *parts, found, told = summed.split([*sizes, len(trained), len(told)])
        for own, part, any_has in zip(trained, parts, found.tolist(), strict=True):
            own.grad = part.view_as(own) if any_has else None
        return self._read(told)

    def _told(self, losses: Losses) -> Tensor:
        """What each step tells the other processes; a sum of its own would cost a round trip."""
        values = torch.stack([own.detach() for own in _values(losses)])
        return torch.cat([values, values.new_full((1,), float(self.asked_to_stop()))])

    def _read(self, told: Tensor) -> Losses:
        *summed, stopping = told.unbind()
        self.stopping = bool(stopping > 0)
        # A copy, since views would keep the gradients' memory for as long as the losses.
        return Losses(*torch.stack(summed).unbind())

    def _sum(self, values: Tensor) -> Tensor:
        self._settle()
        dist.all_reduce(values, group=self.ranks.dense)
        return values


class EvenReader:
    """A process's requests in as many batches as every other process has.

    Shards may differ by a batch, and one may be empty. Short ones end with batches of padding,
    which take part in each exchange and add nothing to any loss.
    """

    def __init__(self, reader: RequestReader, ranks: Ranks, padding: Batch) -> None:
        """Agrees on the number of batches; collective."""
        self.reader = reader
        self.padding = padding
        self.num_batches = ranks.most(reader.num_batches)
        """Batches of an epoch, in every process."""
        self.num_requests = ranks.total(reader.num_requests)
        """Requests of an epoch, of all processes, without padding."""

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """See `RequestReader.epoch`."""
        own = self.reader.num_batches
        if start < own:
            yield from self.reader.epoch(index, start)
        yield from repeat(self.padding, self.num_batches - max(own, start))


def padding_batch(
    *,
    actions: int,
    context: int,
    id_columns: Mapping[str, IdTableSpec] | None = None,
    weighted: bool = False,
) -> Batch:
    """A batch of one request without history, candidates or labels.

    Args:
        actions: How many there are.
        context: Context columns.
        id_columns: The tables beside `item`.
        weighted: Whether the others have weights.
    """
    width = padded_width(1)
    return Batch(
        request_id=torch.full((1,), -1),
        timestamp=torch.zeros(1, dtype=torch.int64),
        history_row=torch.zeros(1, width, dtype=torch.int64),
        history_action=torch.zeros(1, width, dtype=torch.int64),
        history_age=torch.zeros(1, width),
        candidate_row=torch.zeros(1, 1, dtype=torch.int64),
        candidate_mask=torch.zeros(1, 1, dtype=torch.bool),
        candidate_log_q=torch.zeros(1, 1),
        labels=torch.zeros(1, 1, actions),
        context=torch.zeros(1, context, dtype=torch.int64),
        oracle=None,
        ids={
            name: torch.zeros((1,) if spec.of == "request" else (1, 1), dtype=torch.int64)
            for name, spec in (id_columns or {}).items()
        },
        weight=torch.ones(1, dtype=torch.float64) if weighted else None,
    )


def require_one_table_copy(engine: str, ranks: Ranks | None) -> None:
    """Sees to it that processes of a job do not each train a table of their own.

    Raises:
        ConfigError: They would.
    """
    if engine == "local" and ranks is not None and ranks.size > 1:
        raise ConfigError(
            f"tables.engine is local, and {ranks.size} processes train together",
            "set tables.engine to auto, sharded or torchrec, or start one process",
        )


def _values(losses: Losses) -> list[Any]:
    return [getattr(losses, each.name) for each in fields(losses)]
