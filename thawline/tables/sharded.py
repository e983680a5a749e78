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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as fuse

from thawline.errors import ConfigError
from thawline.tables.group import GroupLookup
from thawline.tables.local import sum_by_row
from thawline.tables.optimizers import OptimizerName
from thawline.tables.parts import PartTable, PartTables, Shards, require_inside, require_trains

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


class ShardedTable(PartTable):
    """A table of which this process holds some rows, where TorchRec keeps them."""

    def __init__(
        self, tables: ShardedTables, name: str, spec: Shards, kernel: Any, index: int
    ) -> None:
        """Copies this process's rows.

        `ShardedTables` calls this; `kernel` is FBGEMM's module and `index` the table's place in it.
        """
        self._kernel, self._group = kernel, tables.group
        own = spec.own(tables.group)
        count = own.stop - own.start
        kept = kernel.split_optimizer_states()[index] if spec.optimizer != "sgd" else ()
        super().__init__(
            tables,
            name,
            spec,
            kernel.split_embedding_weights()[index].detach()[:count],
            # None of the optimizers keeps more than one.
            dict(zip(["accumulator"], [own.detach()[:count] for own in kept], strict=False)),
        )

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
        return summed.mul_(dist.get_world_size(self._group))


class ShardedTables(PartTables):
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
                    f"tables.{name}.optimizer is {spec.optimizer}, which TorchRec cannot fuse",
                    f"set it to {', '.join(FUSED)}, or tables.engine=sharded on CPUs, or train in "
                    "one process (tables.engine=local)",
                )
            if spec.rows.shape[1] % 4:
                raise ConfigError(
                    f"the sharded table `{name}` is {spec.rows.shape[1]} wide, no multiple of 4",
                    "set its dim (model.dim for `item`) to a multiple of 4",
                )
        super().__init__(tables, group)
        self.device = torch.device(device)
        self._in_flight: list[ShardedLookup] = []
        self._collections: list[_Collection] = []
        made: dict[str, ShardedTable] = {}
        for width in sorted({spec.rows.shape[1] for spec in tables.values()}):
            same = {name: spec for name, spec in tables.items() if spec.rows.shape[1] == width}
            module = _shard(same, width, group, self.device)
            kernels = _kernels(module)
            made |= {
                name: ShardedTable(self, name, spec, *kernels[name]) for name, spec in same.items()
            }
            self._collections.append(_Collection(module, {name: made[name] for name in same}))
        self.sharded = {name: made[name] for name in tables}
        self.tables = dict(self.sharded)

    @property
    def in_flight(self) -> int:
        """See `PartTables.in_flight`."""
        return len(self._in_flight)

    def lookup(self, rows: Mapping[str, Tensor], counts: Tensor | None = None) -> ShardedLookup:
        """See `TableGroup.lookup`; collective."""
        self._require_names(rows)
        distinct: dict[str, Tensor] = {}
        inverse: dict[str, Tensor] = {}
        for name, table in self.sharded.items():
            distinct[name], inverse[name] = torch.unique(rows[name], return_inverse=True)
            require_inside(name, distinct[name], table.num_rows)
        whole = {
            name: self._lookup(name, rows[name]) for name in self.tables if name not in self.sharded
        }
        pending = [own.look_up(distinct) for own in self._collections]
        counting = None
        if counts is not None:
            counts = counts.clone()
            counting = dist.all_reduce(counts, group=self.group, async_op=True)
        asked = {name: rows[name] for name in self.sharded}
        found = ShardedLookup(whole, self, pending, asked, inverse, counting, counts=counts)
        self._in_flight.append(found)
        return found

    def settle(self) -> None:
        """See `PartTables.settle`."""
        for lookup in list(self._in_flight):
            lookup.finish()

    def arrived(self, lookup: ShardedLookup) -> None:
        """Takes note that a lookup is no longer under way."""
        self._in_flight = [own for own in self._in_flight if own is not lookup]


@dataclass(frozen=True)
class ShardedLookup(GroupLookup):
    """Rows of sharded tables on their way to the network and, as gradients, back."""

    owner: ShardedTables
    pending: Sequence[_Pending]
    rows: Mapping[str, Tensor]
    """What was asked for, int64 `[n]` by table."""
    inverse: Mapping[str, Tensor]
    """The place of each among the distinct ones."""
    counting: dist.Work | None
    """The sum of the counts, if there are any."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """What `wait` gave."""

    def finish(self) -> None:
        """Waits until the rows are here."""
        for each in self.pending:
            each.finish()
        if self.counting is not None:
            self.counting.wait()
        self.owner.arrived(self)

    def total(self) -> Tensor | None:
        """See `GroupLookup.total`."""
        self.finish()
        return self.counts

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
            require_trains(name, trains, grads[name])
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
                num_embeddings=spec.block(group) * dist.get_world_size(group),
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


def _kernels(module: Any) -> dict[str, tuple[Any, int]]:
    """FBGEMM's module of each table, and its place in it."""
    return {
        name: (kernel, index)
        for part in module._lookups  # TorchRec hides them from `modules()`; its version is pinned.
        for kernel in part.modules()
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
        for index, name in enumerate(kernel.table_names)
    }
