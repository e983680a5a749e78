"""ID tables split by rows over the processes of a job, by TorchRec. Only this room knows TorchRec.

A table answers the calls of `thawline.tables.IdTable`, all tables together those of `TableGroup`;
every call that reads or writes rows is collective: each process makes it, in the same order.

- Ids are deduplicated before they travel, and gradients of equal ids summed.
- TorchRec holds tables of one width in one collection, so a lookup takes one exchange a width.
- Optimizers are fused into the backward of FBGEMM's kernel, which `ShardedLookup.apply` runs. While
  no table trains there is none: that is the freeze. A frozen table beside one that trains gets
  gradients of zero, which move neither its rows nor its state.
- The kernel takes its learning rate when it reads rows, which prefetch does some updates before the
  backward. So `apply` reads the rows, where they lie, once more, at the rate of the present step.
- TorchRec divides gradients by the number of processes; here they are multiplied by it before. So
  an update is by the sum over the processes, as one process's by its whole batch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as fuse

from thawline.errors import ConfigError, DataError, TrainingError
from thawline.tables.base import IdTable, Lookup
from thawline.tables.group import GroupLookup, TableGroup
from thawline.tables.local import sum_by_row
from thawline.tables.optimizers import OptimizerName

with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
    import torchrec
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

FUSED: dict[OptimizerName, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "row-wise-adagrad": (RowWiseAdagrad, {"eps": 1e-8}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
    "sgd": (torch.optim.SGD, {}),
}
"""Optimizers that the backward can hold, and whose state can be made fresh for some rows."""
RESERVED = 0.15
"""Share of the memory that the planner leaves to everything but the tables."""
CHUNK_ROWS = 1 << 16
"""Rows that travel at once when a whole table is gathered."""


@dataclass(frozen=True)
class Shards:
    """A table to be split."""

    rows: Tensor
    """`[N, d]`, float32, the same in every process; each keeps a copy of its own part."""
    optimizer: OptimizerName = "row-wise-adagrad"
    learning_rate: float = 0.02
    trainable: bool = True
    padding_rows: tuple[int, ...] = (0,)


class ShardedTable:
    """A table of which this process holds some rows; it implements `thawline.tables.IdTable`."""

    def __init__(
        self, tables: ShardedTables, name: str, spec: Shards, kernel: Any, index: int, start: int
    ) -> None:
        """Copies this process's rows, from `start` on, to where TorchRec keeps them.

        `ShardedTables` calls this; `kernel` is FBGEMM's module and `index` the table's place in it.
        """
        self.num_rows, self.dim = spec.rows.shape
        self.learning_rate = spec.learning_rate
        self.padding_rows = spec.padding_rows
        self._tables, self._name, self._kernel = tables, name, kernel
        held: Tensor = kernel.split_embedding_weights()[index].detach()
        self.own = slice(start, min(start + len(held), self.num_rows))
        """The rows of this process."""
        count = self.own.stop - start
        self.local = held[:count]
        """Their values, `[n, d]`."""
        states = kernel.split_optimizer_states()
        self._states: list[Tensor] = (
            [each.detach()[:count] for each in states[index]] if states else []
        )
        self._open = torch.zeros(self.num_rows, dtype=torch.bool, device=self.local.device)
        self._trainable = False
        self.replace(spec.rows, reset_state=True)
        if spec.trainable:
            self.thaw(reset_state=False)

    @property
    def trainable(self) -> bool:
        """See `IdTable.trainable`."""
        return self._trainable

    def freeze(self, rows: Tensor | None = None) -> None:
        """See `IdTable.freeze`."""
        self._open &= False if rows is None else ~self._as_mask(rows)
        self._trainable = bool(self._open.any())

    def thaw(self, *, reset_state: bool, rows: Tensor | None = None) -> None:
        """See `IdTable.thaw`."""
        opened = torch.ones_like(self._open) if rows is None else self._as_mask(rows).clone()
        opened[list(self.padding_rows)] = False
        if reset_state:
            self._forget(opened if rows is None else opened & ~self._open)
        self._open |= opened
        self._trainable = bool(self._open.any())

    def replace(self, weight: Tensor, *, reset_state: bool) -> None:
        """See `IdTable.replace`.

        Raises:
            DataError: Another shape, or a row that is not finite.
        """
        if weight.shape != (self.num_rows, self.dim):
            raise DataError(
                f"rows of shape {list(weight.shape)} do not fit a table of "
                f"[{self.num_rows}, {self.dim}]",
                "use rows that were made for the same catalog, and as wide",
            )
        own = weight[self.own].to(self.local)
        bad = (~torch.isfinite(own)).any(1).nonzero()
        if len(bad):
            raise DataError(
                f"row {int(bad[0]) + self.own.start} of a table holds NaN or inf",
                "lower the learning rate that the rows were trained with, and train them again",
            )
        self.local.copy_(own)
        for row in self.padding_rows:
            if self.own.start <= row < self.own.stop:
                self.local[row - self.own.start] = 0.0
        if reset_state:
            self._forget(torch.ones_like(self._open))

    def lookup(self, rows: Tensor) -> Lookup:
        """See `IdTable.lookup`; the other sharded tables are asked for no row."""
        none = rows.new_empty(0)
        asked = {name: rows if name == self._name else none for name in self._tables.tables}
        return _OneOf(self._tables.lookup(asked), self._name)

    def chunks(self) -> Iterator[Tensor]:
        """All rows in order, `[at most CHUNK_ROWS, d]` at a time, in every process; collective."""
        starts = self._tables.gather_starts(self.own)
        for owner, (start, stop) in enumerate(starts):
            for first in range(start, stop, CHUNK_ROWS):
                count = min(CHUNK_ROWS, stop - first)
                if owner == dist.get_rank(self._tables.group):
                    part = self.local[first - start : first - start + count].contiguous()
                else:
                    part = self.local.new_empty(count, self.dim)
                source = dist.get_global_rank(self._tables.group, owner)
                dist.broadcast(part, source, group=self._tables.group)
                yield part

    def gather(self) -> Tensor:
        """The whole table, `[N, d]`, in the group's first process, on the CPU; `[0, d]` elsewhere.

        No process holds more than the table (the first) or a chunk of it; collective.
        """
        first = dist.get_rank(self._tables.group) == 0
        whole = torch.empty(self.num_rows if first else 0, self.dim)
        done = 0
        for part in self.chunks():
            if first:
                whole[done : done + len(part)].copy_(part)
            done += len(part)
        return whole

    def state_dict(self) -> dict[str, Tensor]:
        """See `IdTable.state_dict`: of this process's rows, but for `open`, bool `[N]`.

        Names are those of `LocalTable`, which can go on from the rows of all processes.
        """
        return {
            "weight": self.local,
            "start": torch.tensor(self.own.start),
            "open": self._open,
            "learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64),
            # None of the optimizers keeps more.
            **{"optimizer.accumulator": state for state in self._states},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `IdTable.load_state_dict`; of a `LocalTable`, these rows of its state will do.

        Raises:
            DataError: The state of another table or optimizer, or of other rows.
        """
        own, given = (
            {
                name: list(each.shape)
                for name, each in states.items()
                if name == "weight" or name.startswith("optimizer.")
            }
            for states in (self.state_dict(), state)
        )
        if own != given or int(state["start"]) != self.own.start:
            raise DataError(
                f"a saved part {given} of a table does not fit this process's {own}",
                "go on with the table and the optimizer that it was saved from",
            )
        self.local.copy_(state["weight"])
        for each in self._states:
            each.copy_(state["optimizer.accumulator"])
        # Of a local table it may be one value for all rows.
        self._open.copy_(state["open"].expand_as(self._open))
        self._open[list(self.padding_rows)] = False
        self._trainable = bool(self._open.any())
        self.learning_rate = float(state["learning_rate"])

    def push_learning_rate(self) -> None:
        """Tells FBGEMM the learning rate; its own optimizers do so in a `zero_grad()` alone."""
        self._kernel.set_learning_rate(self.learning_rate)

    def gradient(self, rows: Tensor, grad: Tensor | None, like: Tensor) -> Tensor:
        """The gradient of the distinct rows among `rows` `[n]`, in ascending order.

        Args:
            rows: What was looked up.
            grad: `[n, d]`, or None for zeros.
            like: The distinct rows' values, `[u, d]`.
        """
        if grad is None or not len(rows):
            return torch.zeros_like(like)
        distinct, summed = sum_by_row(rows, grad)
        closed = ~self._open.index_select(0, distinct)
        summed.masked_fill_(closed[:, None], 0.0)
        return summed.mul_(dist.get_world_size(self._tables.group))

    def _forget(self, rows: Tensor) -> None:
        for state in self._states:
            state[rows[self.own]] = 0.0

    def _as_mask(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.bool or rows.shape != (self.num_rows,):
            raise TrainingError(
                f"rows to open or close came as {rows.dtype} of shape {list(rows.shape)}",
                f"give a mask: bool, of shape [{self.num_rows}]",
            )
        return rows.to(self._open.device)


class ShardedTables(TableGroup):
    """ID tables split by rows over the processes of a group, and any others beside them."""

    def __init__(
        self,
        tables: Mapping[str, Shards],
        *,
        group: dist.ProcessGroup,
        device: str | torch.device = "cpu",
    ) -> None:
        """Plans and splits the tables; collective.

        Args:
            tables: By name; the same in every process.
            group: The processes. Nothing else is to use this group.
            device: Where this process keeps its rows.

        Raises:
            ConfigError: An optimizer that cannot be fused, or a width that FBGEMM does not take.
            DataError: Rows that are not float32 or not finite.
        """
        for name, spec in tables.items():
            if spec.optimizer not in FUSED:
                raise ConfigError(
                    f"tables.{name}.optimizer is {spec.optimizer}, which a sharded table does not "
                    f"have",
                    f"set it to {', '.join(FUSED)}, or train in one process (tables.engine=local)",
                )
            if spec.rows.shape[1] % 4:
                raise ConfigError(
                    f"the sharded table `{name}` is {spec.rows.shape[1]} wide, no multiple of 4",
                    "set its dim (model.dim for `item`) to a multiple of 4",
                )
            if spec.rows.dtype != torch.float32:
                raise DataError(
                    f"the sharded table `{name}` cannot hold its rows as {spec.rows.dtype}",
                    "give float32 rows",
                )
        self.group = group
        self.device = torch.device(device)
        self._in_flight: list[ShardedLookup] = []
        made: dict[str, ShardedTable] = {}
        self._collections: list[_Collection] = []
        for width in sorted({spec.rows.shape[1] for spec in tables.values()}):
            same = {name: spec for name, spec in tables.items() if spec.rows.shape[1] == width}
            module = _shard(same, width, group, self.device)
            kernels = _kernels(module)
            for name, spec in same.items():
                kernel, index = kernels[name]
                start = min(_block(spec, group) * dist.get_rank(group), len(spec.rows))
                made[name] = ShardedTable(self, name, spec, kernel, index, start)
            self._collections.append(_Collection(module, {name: made[name] for name in same}))
        super().__init__({name: made[name] for name in tables})
        self.sharded = {name: made[name] for name in tables}
        """Those of the tables that are split."""

    def beside(self, tables: Mapping[str, IdTable]) -> TableGroup:
        """The same tables, with those of `tables` that this process holds whole beside them."""
        whole = {name: own for name, own in tables.items() if name not in self.sharded}
        self.tables = {**self.sharded, **whole}
        return self

    def lookup(self, rows: Mapping[str, Tensor]) -> ShardedLookup:
        """See `TableGroup.lookup`; collective."""
        self._require_names(rows)
        distinct: dict[str, Tensor] = {}
        inverse: dict[str, Tensor] = {}
        for name, table in self.sharded.items():
            distinct[name], inverse[name] = torch.unique(rows[name], return_inverse=True)
            _require_inside(name, distinct[name], table.num_rows)
        whole = {
            name: self._lookup(name, rows[name]) for name in self.tables if name not in self.sharded
        }
        pending = [own.look_up(distinct) for own in self._collections]
        asked = {name: rows[name] for name in self.sharded}
        found = ShardedLookup(whole, self, pending, asked, inverse)
        self._in_flight.append(found)
        return found

    def settle(self) -> None:
        """Waits for every lookup that is under way, so that another collective may be launched."""
        for lookup in list(self._in_flight):
            lookup.finish()

    def arrived(self, lookup: ShardedLookup) -> None:
        """Takes note that a lookup is no longer under way."""
        self._in_flight = [own for own in self._in_flight if own is not lookup]

    def gather_starts(self, own: slice) -> list[tuple[int, int]]:
        """The first row and the one after the last of each process; collective."""
        mine = torch.tensor([own.start, own.stop], device=self.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, mine, group=self.group)
        return [(int(start), int(stop)) for start, stop in every]


@dataclass(frozen=True)
class ShardedLookup(GroupLookup):
    """Rows of sharded tables on their way to the network and, as gradients, back."""

    owner: ShardedTables
    pending: Sequence[_Pending]
    rows: Mapping[str, Tensor]
    """What was asked for, int64 `[n]` by table."""
    inverse: Mapping[str, Tensor]
    """The place of each among the distinct ones."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """What `wait` gave."""

    def finish(self) -> None:
        """Waits until the rows are here."""
        for each in self.pending:
            each.finish()
        self.owner.arrived(self)

    def wait(self) -> dict[str, Tensor]:
        """See `GroupLookup.wait`."""
        if not self.read:
            self.finish()
            values = {name: own for each in self.pending for name, own in each.values.items()}
            for name, rows in self.inverse.items():
                trains = any(each.trains.get(name, False) for each in self.pending)
                leaf = values[name].detach().index_select(0, rows)
                self.read[name] = leaf.requires_grad_(trains)
            self.read.update(super().wait())
        return self.read

    def apply(self, grads: Mapping[str, Tensor | None]) -> None:
        """See `GroupLookup.apply`; collective: every process calls it, with gradients or without.

        Raises:
            TrainingError: A gradient for a table that is frozen or that was not looked up.
        """
        self.owner.settle()
        super().apply({name: own for name, own in grads.items() if name not in self.inverse})
        given = {name: grads.get(name) for name in self.inverse}
        for each in self.pending:
            each.update(self.rows, given)


class _Collection:
    """Tables of one width."""

    def __init__(self, module: Any, tables: Mapping[str, ShardedTable]) -> None:
        self.module = module
        self.tables = dict(tables)

    def look_up(self, rows: Mapping[str, Tensor]) -> _Pending:
        """Asks for distinct rows `[u]` by table."""
        asked = [rows[name] for name in self.tables]
        # One sample whose features are the tables: there is one even where no row is asked for.
        features = torchrec.KeyedJaggedTensor(
            keys=list(self.tables),
            values=torch.cat(asked),
            lengths=torch.tensor([len(own) for own in asked], device=asked[0].device),
        )
        trains = {name: table.trainable for name, table in self.tables.items()}
        with torch.no_grad():
            context = self.module.create_context()
            arrived = self.module.input_dist(context, features).wait().wait()
            sent = self.module.compute(context, arrived)
        with torch.set_grad_enabled(any(trains.values())):
            sent = [rows.detach().requires_grad_(any(trains.values())) for rows in sent]
            awaited = self.module.output_dist(context, sent)
        return _Pending(self, context, arrived, sent, awaited, trains)


@dataclass
class _Pending:
    """Rows of one collection under way."""

    collection: _Collection
    context: Any
    arrived: Any
    """What the processes asked this one for."""
    sent: list[Tensor]
    """The answer, a leaf."""
    awaited: Any
    trains: dict[str, bool]
    """Whether each table trained when it was looked up."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """`[u, d]` by table, with the graph that leads to `sent`, in whatever process."""

    def finish(self) -> None:
        """Waits until the rows are here."""
        if self.awaited is None:
            return
        with torch.set_grad_enabled(any(self.trains.values())):
            found = self.awaited.wait()
            self.values = {name: found[name].values() for name in self.collection.tables}
        self.awaited = None

    def update(self, rows: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> None:
        """Runs the backward, if any table of the collection trained at the lookup."""
        for name, trains in self.trains.items():
            if not trains and grads[name] is not None:
                raise TrainingError(
                    f"the frozen table `{name}` was asked to update its rows",
                    "thaw it first, or skip the update",
                )
        if not any(self.trains.values()):
            return
        tables = self.collection.tables
        torch.autograd.backward(
            [self.values[name] for name in tables],
            [
                table.gradient(rows[name], grads[name], self.values[name])
                for name, table in tables.items()
            ],
        )
        for table in tables.values():
            table.push_learning_rate()
        with torch.enable_grad():
            again = self.collection.module.compute(self.context, self.arrived)
        torch.autograd.backward(again, [own.grad for own in self.sent])


@dataclass(frozen=True)
class _OneOf:
    """One table's part of a lookup; it implements `thawline.tables.Lookup`."""

    lookup: ShardedLookup
    name: str

    def wait(self) -> Tensor:
        return self.lookup.wait()[self.name]

    def apply(self, grad: Tensor) -> None:
        self.lookup.apply({self.name: grad})


def _shard(
    tables: Mapping[str, Shards], width: int, group: dist.ProcessGroup, device: torch.device
) -> Any:
    """TorchRec's collection of tables of one width, split as its planner says."""
    module = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(
                name=name,
                embedding_dim=width,
                # FBGEMM's CPU kernel takes no empty part, so all are of the same size.
                num_embeddings=_block(spec, group) * dist.get_world_size(group),
                feature_names=[name],
            )
            for name, spec in tables.items()
        ],
        device=torch.device("meta"),
    )
    for name, spec in tables.items():
        optimizer, options = FUSED[spec.optimizer]
        weight = module.embeddings[name].weight
        fuse(optimizer, [weight], {"lr": spec.learning_rate, **options})
    # A kernel has one learning rate, so each table has a kernel.
    sharder = EmbeddingCollectionSharder(fused_params={"use_one_tbe_per_table": True})
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(group),
            local_world_size=dist.get_world_size(group),
            compute_device=device.type,
        ),
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        constraints=dict.fromkeys(tables, constraint),
    )
    plan = planner.collective_plan(module, [sharder], group)
    own = plan.get_plan_for_module("")
    return sharder.shard(module, own, ShardingEnv.from_process_group(group), device)


def _block(spec: Shards, group: dist.ProcessGroup) -> int:
    """Rows of each process; the last ones may be beyond the table's end."""
    return -(-len(spec.rows) // dist.get_world_size(group))


def _kernels(module: Any) -> dict[str, tuple[Any, int]]:
    """FBGEMM's module of each table, and its place in it."""
    return {
        name: (kernel, index)
        for part in module._lookups  # TorchRec hides them from `modules()`; its version is pinned.
        for kernel in part.modules()
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
        for index, name in enumerate(kernel.table_names)
    }


def _require_inside(name: str, distinct: Tensor, num_rows: int) -> None:
    if not len(distinct):
        return
    low, high = int(distinct[0]), int(distinct[-1])
    if low < 0 or high >= num_rows:
        raise TrainingError(
            f"the table `{name}`: row {low if low < 0 else high} is outside a table of "
            f"{num_rows} rows",
            "use the table and the dataset that were made from the same catalog",
        )
