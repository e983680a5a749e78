"""Tables split by rows over the processes of a job: what they do whoever moves the rows.

Each process holds one block of consecutive rows. Every call that reads or writes rows is
collective: each process makes it, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thawline.errors import DataError, TrainingError
from thawline.tables.base import IdTable, Lookup
from thawline.tables.group import GroupLookup, TableGroup
from thawline.tables.optimizers import OptimizerName

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

    def block(self, group: dist.ProcessGroup) -> int:
        """Rows of each process; the last ones may be beyond the table's end."""
        return -(-len(self.rows) // dist.get_world_size(group))

    def own(self, group: dist.ProcessGroup) -> slice:
        """The rows of this process."""
        block, rank = self.block(group), dist.get_rank(group)
        return slice(*(min(block * at, len(self.rows)) for at in (rank, rank + 1)))


class PartTable:
    """A table of which this process holds some rows; it implements `thawline.tables.IdTable`."""

    def __init__(
        self,
        tables: PartTables,
        name: str,
        spec: Shards,
        local: Tensor,
        states: Mapping[str, Tensor],
    ) -> None:
        """Copies this process's rows to where they are kept; the group of tables calls this.

        Args:
            tables: All tables that are split.
            name: Of this one.
            spec: What it is to be.
            local: Where its own rows are kept, `[n, d]`.
            states: Where its optimizer keeps their state, `[n, ...]` each, by name.
        """
        self.num_rows, self.dim = spec.rows.shape
        self.learning_rate = spec.learning_rate
        self.padding_rows = spec.padding_rows
        self.name = name
        self.own = spec.own(tables.group)
        """The rows of this process."""
        self._tables = tables
        self._local, self._states = local, dict(states)
        self._open = torch.zeros(self.num_rows, dtype=torch.bool, device=local.device)
        self._trainable = False
        self.replace(spec.rows, reset_state=True)
        if spec.trainable:
            self.thaw(reset_state=False)

    @property
    def local(self) -> Tensor:
        """The values of this process's rows, `[n, d]`, when no update is under way."""
        self._tables.settle()
        return self._local

    @property
    def trainable(self) -> bool:
        """See `IdTable.trainable`."""
        return self._trainable

    def freeze(self, rows: Tensor | None = None) -> None:
        """See `IdTable.freeze`."""
        self._tables.settle()
        self._open &= False if rows is None else ~self._as_mask(rows)
        self._opened()

    def thaw(self, *, reset_state: bool, rows: Tensor | None = None) -> None:
        """See `IdTable.thaw`."""
        self._tables.settle()
        opened = torch.ones_like(self._open) if rows is None else self._as_mask(rows).clone()
        opened[list(self.padding_rows)] = False
        if reset_state:
            self._forget(opened if rows is None else opened & ~self._open)
        self._open |= opened
        self._opened()

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
        own = weight[self.own].to(self._local)
        bad = (~torch.isfinite(own)).any(1).nonzero()
        if len(bad):
            raise DataError(
                f"row {int(bad[0]) + self.own.start} of a table holds NaN or inf",
                "lower the learning rate that the rows were trained with, and train them again",
            )
        self.local.copy_(own)
        for row in self.padding_rows:
            if self.own.start <= row < self.own.stop:
                self._local[row - self.own.start] = 0.0
        if reset_state:
            self._forget(torch.ones_like(self._open))

    def lookup(self, rows: Tensor) -> Lookup:
        """See `IdTable.lookup`; the other tables are asked for no row."""
        none = rows.new_empty(0)
        asked = {name: rows if name == self.name else none for name in self._tables.tables}
        return _OneOf(self._tables.lookup(asked), self.name)

    def chunks(self) -> Iterator[Tensor]:
        """All rows in order, `[at most CHUNK_ROWS, d]` at a time, in every process; collective."""
        group, local = self._tables.group, self.local
        block = -(-self.num_rows // dist.get_world_size(group))
        for owner in range(dist.get_world_size(group)):
            start, stop = (min(block * at, self.num_rows) for at in (owner, owner + 1))
            for first in range(start, stop, CHUNK_ROWS):
                count = min(CHUNK_ROWS, stop - first)
                if owner == dist.get_rank(group):
                    part = local[first - start : first - start + count].contiguous()
                else:
                    part = local.new_empty(count, self.dim)
                dist.broadcast(part, dist.get_global_rank(group, owner), group=group)
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
            **{f"optimizer.{name}": state for name, state in self._states.items()},
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
        for name, each in self._states.items():
            each.copy_(state[f"optimizer.{name}"])
        # Of a local table it may be one value for all rows.
        self._open.copy_(state["open"].expand_as(self._open))
        self._open[list(self.padding_rows)] = False
        self._opened()
        self.learning_rate = float(state["learning_rate"])

    def _opened(self) -> None:
        """Other rows are open than before."""
        self._trainable = bool(self._open.any())

    def _forget(self, rows: Tensor) -> None:
        """Makes the state of some rows, bool `[N]`, a fresh optimizer's."""
        for state in self._states.values():
            state[rows[self.own]] = 0.0

    def _as_mask(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.bool or rows.shape != (self.num_rows,):
            raise TrainingError(
                f"rows to open or close came as {rows.dtype} of shape {list(rows.shape)}",
                f"give a mask: bool, of shape [{self.num_rows}]",
            )
        return rows.to(self._open.device)


class PartTables(TableGroup, ABC):
    """ID tables split by rows over the processes of a group, and any others beside them."""

    def __init__(self, tables: Mapping[str, Shards], group: dist.ProcessGroup) -> None:
        """Takes note of the group, of which every process makes the same tables.

        Raises:
            DataError: Rows that are not float32.
        """
        for name, spec in tables.items():
            if spec.rows.dtype != torch.float32:
                raise DataError(
                    f"the sharded table `{name}` cannot hold its rows as {spec.rows.dtype}",
                    "give float32 rows",
                )
        super().__init__({})
        self.group = group
        self.sharded: dict[str, PartTable] = {}
        """Those of the tables that are split."""

    def beside(self, tables: Mapping[str, IdTable]) -> TableGroup:
        """The same tables, with those of `tables` that this process holds whole beside them."""
        whole = {name: own for name, own in tables.items() if name not in self.sharded}
        self.tables = {**self.sharded, **whole}
        return self

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """How many exchanges may be under way."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for all that is under way, so that another collective may be launched."""


@dataclass(frozen=True)
class _OneOf:
    """One table's part of a lookup; it implements `thawline.tables.Lookup`."""

    lookup: GroupLookup
    name: str

    def wait(self) -> Tensor:
        return self.lookup.wait()[self.name]

    def apply(self, grad: Tensor) -> None:
        self.lookup.apply({self.name: grad})


def require_inside(name: str, distinct: Tensor, num_rows: int) -> None:
    """Sees to it that rows in ascending order are those of a table.

    Raises:
        TrainingError: One is not; the message names it and the table.
    """
    if not len(distinct):
        return
    low, high = int(distinct[0]), int(distinct[-1])
    if low < 0 or high >= num_rows:
        raise TrainingError(
            f"the table `{name}`: row {low if low < 0 else high} is outside a table of "
            f"{num_rows} rows",
            "use the table and the dataset that were made from the same catalog",
        )


def require_trains(name: str, trains: bool, grad: Tensor | None) -> None:
    """Sees to it that no gradient comes for a table that did not train when it was looked up.

    Raises:
        TrainingError: One does.
    """
    if grad is not None and not trains:
        raise TrainingError(
            f"the frozen table `{name}` was asked to update its rows",
            "thaw it first, or skip the update",
        )
