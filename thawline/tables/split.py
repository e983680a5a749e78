"""ID tables split by rows over the processes of a job, whose rows travel by gloo.

`thawline.tables.sharded` does the same with TorchRec, and is the engine on GPUs. On CPUs this one
is the quicker: a process's rows are a `LocalTable`, whose update takes a fraction of the time of
FBGEMM's CPU kernel; all tables, of whatever widths and optimizers, share one exchange; and no
exchange keeps the computation waiting.

- A lookup is one exchange for all tables: how many rows each process wants of each other one, which
  they are, and then their values. Rows are deduplicated before they travel. Numbers that are to be
  summed over the processes (`counts`) ride along with the first part.
- An update sums the gradients of equal rows, sends them the same way back, and the row's owner adds
  those of the processes up, in their order, and updates the row once: as one process does that
  trains on all their requests.
- Lookups and updates run in a thread, in the order of the calls, which is the same in every
  process. So a read sees every update that was asked for before it and none that was asked for
  later, and the result has the same bits however long an exchange takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from thawline.errors import ConfigError
from thawline.tables.group import GroupLookup
from thawline.tables.local import LocalTable
from thawline.tables.optimizers import make_optimizer
from thawline.tables.parts import PartTable, PartTables, Shards, require_inside, require_trains

T = TypeVar("T")


class SplitTable(PartTable):
    """A table of which this process holds some rows, as a `LocalTable`."""

    def __init__(self, tables: SplitTables, name: str, spec: Shards) -> None:
        """Copies this process's rows; `SplitTables` calls this."""
        own = spec.own(tables.group)
        rows = spec.rows[own].clone()
        optimizer = make_optimizer(spec.optimizer, *rows.shape)
        padding = tuple(row - own.start for row in spec.padding_rows if own.start <= row < own.stop)
        self.part = LocalTable(rows, optimizer=optimizer, padding_row=padding, trainable=False)
        self.block = spec.block(tables.group)
        processes = range(1, dist.get_world_size(tables.group) + 1)
        self.ends = torch.tensor([min(self.block * at, len(spec.rows)) for at in processes])
        """The row after the last one of each process."""
        super().__init__(tables, name, spec, self.part.weight, optimizer.state_dict())

    def update(self, rows: Tensor, grad: Tensor, learning_rate: float) -> None:
        """One step of own rows `[n]`, counted from the first own one, from gradients `[n, d]`."""
        if self.part.trainable:
            self.part.learning_rate = learning_rate
            self.part.update(rows, grad)

    def _opened(self) -> None:
        super()._opened()
        self.part.freeze()
        self.part.thaw(reset_state=False, rows=self._open[self.own])


class SplitTables(PartTables):
    """ID tables split by rows over the processes of a gloo group, and any others beside them."""

    def __init__(self, tables: Mapping[str, Shards], *, group: dist.ProcessGroup) -> None:
        """Splits the tables.

        Args:
            tables: By name; the same in every process.
            group: The processes. Nothing else is to use this group.

        Raises:
            ConfigError: Another backend than gloo.
            DataError: Rows that are not float32 or not finite.
        """
        super().__init__(tables, group)
        if (backend := dist.get_backend(group)) != "gloo":
            raise ConfigError(
                f"this engine moves rows by gloo, and the processes talk by {backend}",
                "set tables.engine=torchrec, or runtime.device=cpu",
            )
        self._tasks: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "rows")
        for name, spec in tables.items():
            self.sharded[name] = SplitTable(self, name, spec)
        self.tables = dict(self.sharded)

    @property
    def split(self) -> dict[str, SplitTable]:
        """The tables that are split."""
        return {name: own for name, own in self.sharded.items() if isinstance(own, SplitTable)}

    @property
    def in_flight(self) -> int:
        """See `PartTables.in_flight`."""
        return sum(not task.done() for task in self._tasks)

    def lookup(self, rows: Mapping[str, Tensor], counts: Tensor | None = None) -> SplitLookup:
        """See `TableGroup.lookup`; collective."""
        self._require_names(rows)
        split = self.split
        wanted = {name: Wanted.of(rows[name], table) for name, table in split.items()}
        for name, table in split.items():
            require_inside(name, wanted[name].distinct, table.num_rows)
        whole = {name: self._lookup(name, rows[name]) for name in self.tables if name not in split}
        trains = {name: table.trainable for name, table in split.items()}
        exchange = Exchange(self.group, split, wanted, counts)
        return SplitLookup(whole, self, exchange, self.submit(exchange.read), trains)

    def submit(self, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Runs a task in the thread, after all that came before."""
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()
        future = self._thread.submit(task, *arguments)
        self._tasks.append(future)
        return future

    def settle(self) -> None:
        """See `PartTables.settle`."""
        while self._tasks:
            self._tasks.popleft().result()


@dataclass(frozen=True)
class Wanted:
    """What a process wants of one table."""

    distinct: Tensor
    """Rows in ascending order, so one owner's after the other's: int64 `[u]`."""
    places: Tensor
    """Of each row asked for among the distinct ones, `[n]`."""
    order: Tensor
    """Rows asked for by place, `[n]`."""
    starts: Tensor
    """Where the rows of a place start in `order`, `[u]`."""
    counts: Tensor
    """Distinct rows of each owner, `[W]`."""

    @classmethod
    def of(cls, rows: Tensor, table: SplitTable) -> Wanted:
        """Of rows `[n]`, duplicates welcome."""
        ordered, order = torch.sort(rows, stable=True)
        distinct, place, counts = torch.unique_consecutive(
            ordered, return_inverse=True, return_counts=True
        )
        places = torch.empty_like(place).index_copy_(0, order, place)
        until = torch.searchsorted(distinct, table.ends)
        counted = until.diff(prepend=until.new_zeros(1))
        return cls(distinct, places, order, counts.cumsum(0) - counts, counted)

    def sum(self, grad: Tensor | None, width: int) -> Tensor:
        """Sums gradients `[n, d]` of the rows asked for by distinct row, `[u, d]`; None: zeros."""
        if grad is None or not len(self.order):
            return torch.zeros(len(self.distinct), width)
        return functional.embedding_bag(self.order, grad, self.starts, mode="sum")


class Exchange:
    """What travels for one step: rows to those who want them, and gradients back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Mapping[str, SplitTable],
        wanted: Mapping[str, Wanted],
        counts: Tensor | None,
    ) -> None:
        """Prepares; nothing travels yet.

        Args:
            group: The processes.
            tables: All that are split.
            wanted: What this process wants of each.
            counts: What is to be summed over the processes, int64 or float64 `[k]`.
        """
        self.group = group
        self.tables = tables
        self.wanted = wanted
        self.counts = counts
        """Once the rows are here, the processes' sum."""
        self._asked: dict[str, Tensor] = {}
        """How many of the own rows each process wants, `[W]` by table."""
        self._rows: dict[str, Tensor] = {}
        """Which, one process's after the other's."""

    def read(self) -> dict[str, Tensor]:
        """The rows that were asked for, `[n, d]` by table."""
        names = list(self.tables)
        wanted = {name: own.counts for name, own in self.wanted.items()}
        header = list(wanted.values())
        if self.counts is not None:
            # Bit for bit, whatever they are: one tensor is all that travels here.
            header += self.counts.view(torch.int64).expand(len(header[0]), -1).unbind(1)
        sent = torch.stack(header, 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self._asked = dict(zip(names, received.unbind(1), strict=False))
        if self.counts is not None:
            told = received[:, len(names) :].contiguous().view(self.counts.dtype)
            self.counts = told.sum(0)
        self._rows = self._send(
            {name: self.wanted[name].distinct % self.tables[name].block for name in names},
            wanted,
            self._asked,
        )
        values = self._send(
            {name: self.tables[name].part.read(rows) for name, rows in self._rows.items()},
            self._asked,
            wanted,
        )
        return {name: own.index_select(0, self.wanted[name].places) for name, own in values.items()}

    def update(self, grads: Mapping[str, Tensor | None], rates: Mapping[str, float]) -> None:
        """Updates the rows of the tables that `rates` names by all processes' gradients.

        Args:
            grads: By table, `[n, d]`; None: zeros.
            rates: Their learning rates.
        """
        found = self._send(
            {name: self.wanted[name].sum(grads.get(name), self.tables[name].dim) for name in rates},
            {name: self.wanted[name].counts for name in rates},
            {name: self._asked[name] for name in rates},
        )
        for name, rate in rates.items():
            self.tables[name].update(self._rows[name], found[name], rate)

    def _send(
        self, parts: Mapping[str, Tensor], here: Mapping[str, Tensor], there: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sends each process its rows of every part, and gives what came from all of them.

        Args:
            parts: `[n, ...]` each, one process's rows after the other's.
            here: How many of each part go to each process, `[W]`.
            there: How many come from each.
        """
        widths = {name: own.shape[1:].numel() for name, own in parts.items()}
        sizes, awaited = (
            torch.stack([counts[name] * width for name, width in widths.items()], 1)
            for counts in (here, there)
        )
        flat = [own.flatten() for own in parts.values()]
        sent = flat[0]
        if len(flat) > 1:
            by_part = [own.split(size.tolist()) for own, size in zip(flat, sizes.T, strict=True)]
            sent = torch.cat([own for process in zip(*by_part, strict=True) for own in process])
        received = sent.new_empty(int(awaited.sum()))
        dist.all_to_all_single(
            received, sent, awaited.sum(1).tolist(), sizes.sum(1).tolist(), group=self.group
        )
        if len(flat) == 1:
            found = [received]
        else:
            pieces = received.split(awaited.flatten().tolist())
            found = [torch.cat(pieces[index :: len(flat)]) for index in range(len(flat))]
        return {
            name: own.view(-1, *parts[name].shape[1:])
            for name, own in zip(parts, found, strict=True)
        }


@dataclass(frozen=True)
class SplitLookup(GroupLookup):
    """Rows of split tables on their way to the network and, as gradients, back."""

    owner: SplitTables
    exchange: Exchange
    rows: Future[dict[str, Tensor]]
    trains: Mapping[str, bool]
    """Whether each table trained when it was looked up."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """What `wait` gave."""

    def wait(self) -> dict[str, Tensor]:
        """See `GroupLookup.wait`."""
        if not self.read:
            for name, rows in self.rows.result().items():
                self.read[name] = rows.requires_grad_(self.trains[name])
            self.read.update(super().wait())
        return self.read

    def total(self) -> Tensor | None:
        """See `GroupLookup.total`."""
        self.rows.result()
        return self.exchange.counts

    def apply(self, grads: Mapping[str, Tensor | None]) -> None:
        """See `GroupLookup.apply`; collective: every process calls it, with gradients or without.

        Raises:
            TrainingError: A gradient for a table that is frozen or that was not looked up.
        """
        super().apply({name: own for name, own in grads.items() if name not in self.trains})
        for name, trains in self.trains.items():
            require_trains(name, trains, grads.get(name))
        tables = self.owner.sharded
        rates = {name: tables[name].learning_rate for name, own in self.trains.items() if own}
        if rates:
            self.owner.submit(self.exchange.update, dict(grads), rates)
