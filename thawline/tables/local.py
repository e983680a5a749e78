"""The ID table of one process: a plain tensor and an optimizer of its touched rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from thawline.errors import DataError, TrainingError
from thawline.tables.optimizers import RowOptimizer, RowWiseAdagrad
from thawline.tables.rounding import round_stochastically
from thawline.tables.rules import RowRules


class LocalTable:
    """A table held in this process; it implements `thawline.tables.IdTable`."""

    def __init__(
        self,
        weight: Tensor,
        *,
        optimizer: RowOptimizer | None = None,
        rules: RowRules | None = None,
        learning_rate: float = 0.02,
        trainable: bool = True,
        padding_row: int | tuple[int, ...] = 0,
        seed: int = 0,
    ) -> None:
        """Takes over `weight` (`[N, d]`, float32 or bfloat16).

        bfloat16 halves the memory of the rows. Their updates are computed in float32 and rounded
        stochastically, so that steps smaller than a bfloat16's last bit count on average.

        Args:
            weight: The rows; updated in place.
            optimizer: Row-wise Adagrad where None.
            rules: On how rows may move beside the optimizer's step; none where None.
            learning_rate: Step size of the next update; a schedule may change it at any step.
            trainable: False starts frozen.
            padding_row: Set to zero now and never updated; one row or several.
            seed: Of the rounding of bfloat16.

        Raises:
            DataError: A row that is not finite, or weights of another type.
        """
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise DataError(
                f"a table cannot hold its rows as {weight.dtype}",
                "convert them to float32 or bfloat16",
            )
        _require_finite(weight)
        self.weight = weight.detach()
        self.padding_rows = padding_row if isinstance(padding_row, tuple) else (padding_row,)
        self.optimizer = optimizer or RowWiseAdagrad(len(weight), device=weight.device)
        self.rules = rules or RowRules()
        self.learning_rate = learning_rate
        self._trainable = trainable
        self._open: Tensor | None = None
        """Bool `[N]`, padding left out, where some rows train and others do not."""
        self._generator = torch.Generator(weight.device).manual_seed(seed)
        self._clear_padding()

    @classmethod
    def random(cls, num_rows: int, dim: int, *, seed: int) -> LocalTable:
        """A table of normal rows with standard deviation `dim**-0.5`: norms are about 1."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(num_rows, dim, generator=generator) * dim**-0.5)

    @property
    def trainable(self) -> bool:
        """See `IdTable.trainable`."""
        return self._trainable

    def freeze(self, rows: Tensor | None = None) -> None:
        """See `IdTable.freeze`.

        Raises:
            TrainingError: `rows` is no mask of this table's rows.
        """
        if rows is None:
            self._open_rows(None, trainable=False)
        elif self._trainable:
            self._open_rows(self._are_open() & ~self._as_mask(rows))

    def thaw(self, *, reset_state: bool, rows: Tensor | None = None) -> None:
        """See `IdTable.thaw`.

        Raises:
            TrainingError: `rows` is no mask of this table's rows.
        """
        if rows is None:
            if reset_state:
                self.optimizer.reset()
            self._open_rows(None)
            return
        before, opened = self._are_open(), self._as_mask(rows)
        if reset_state:
            self.optimizer.reset(opened & ~before)
        self._open_rows(before | opened)

    def replace(self, weight: Tensor, *, reset_state: bool) -> None:
        """See `IdTable.replace`.

        Raises:
            DataError: Another shape, or a row that is not finite.
        """
        if weight.shape != self.weight.shape:
            raise DataError(
                f"rows of shape {list(weight.shape)} do not fit a table of "
                f"{list(self.weight.shape)}",
                "use rows that were made for the same catalog, and as wide",
            )
        _require_finite(weight)
        self.weight.copy_(weight)
        self._clear_padding()
        if reset_state:
            self.optimizer.reset()

    def lookup(self, rows: Tensor) -> LocalLookup:
        """See `IdTable.lookup`.

        Raises:
            TrainingError: A row outside the table; the message names it. On CUDA a check would make
                the host wait for the lookup before it can launch a backward to hide it, so there
                it is made under `torch.autograd.detect_anomaly()` alone (see `gather`).
        """
        if rows.is_cuda and torch.is_anomaly_enabled():
            self._require_inside(rows)
        try:
            read = self.read(rows)
        except (IndexError, RuntimeError):
            self._require_inside(rows)
            raise
        return LocalLookup(self, rows, read.requires_grad_(self._trainable))

    def read(self, rows: Tensor) -> Tensor:
        """A copy of rows `[n]` as they are now: `[n, d]`, float32."""
        return self.weight.index_select(0, rows).float()

    def state_dict(self) -> dict[str, Tensor]:
        """See `IdTable.state_dict`."""
        is_open = torch.tensor(self._trainable) if self._open is None else self._open
        return {
            "weight": self.weight,
            "open": is_open,
            "learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64),
            "generator": self._generator.get_state(),
            **{f"optimizer.{name}": value for name, value in self.optimizer.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `IdTable.load_state_dict`.

        Raises:
            DataError: A state of another table or optimizer.
        """
        weight = state.get("weight")
        if weight is None or (weight.shape, weight.dtype) != (self.weight.shape, self.weight.dtype):
            found = "none" if weight is None else f"{list(weight.shape)} ({weight.dtype})"
            raise DataError(
                f"a saved table of {found} does not fit one of {list(self.weight.shape)} "
                f"({self.weight.dtype})",
                "go on with the table that the state was saved from",
            )
        prefix = "optimizer."
        self.optimizer.load_state_dict(
            {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        )
        self.weight.copy_(weight)
        self.learning_rate = float(state["learning_rate"])
        if "generator" in state:  # A sharded table rounds nothing.
            self._generator.set_state(state["generator"].cpu())
        if state["open"].dim():
            self._open_rows(self._as_mask(state["open"]))
        else:
            self._open_rows(None, trainable=bool(state["open"]))

    @torch.no_grad()
    def update(self, rows: Tensor, grad: Tensor) -> None:
        """One step from gradients `[n, d]` of rows `[n]`; those of closed rows are dropped."""
        rows, grad = sum_by_row(rows, grad, keep=self._open, drop=self.padding_rows)
        moved = rows
        if self.optimizer.moves_every_row:
            moved, grad = self._spread(rows, grad)
        step = self.optimizer.direction(moved, grad)
        scale = self.rules.step_scale(moved)
        if scale is not None:
            step = step * scale
        if self.rules.has_force:
            force = self.rules.force(self.read(rows), rows)
            step = step.index_add(0, torch.searchsorted(moved, rows), force)
        self._move(moved, step)

    def _require_inside(self, rows: Tensor) -> None:
        outside = rows[(rows < 0) | (rows >= len(self.weight))]
        if len(outside):
            raise TrainingError(
                f"row {int(outside[0])} is outside a table of {len(self.weight)} rows",
                "use the table and the dataset that were made from the same catalog",
            )

    def _move(self, rows: Tensor, step: Tensor) -> None:
        """Moves distinct rows `[u]`, in ascending order, by `-lr · step`, within the drift cap."""
        every = len(rows) == len(self.weight)
        if every and self.weight.dtype == torch.float32 and self.rules.drift_cap is None:
            self.weight.add_(step, alpha=-self.learning_rate)
            return
        # Not index_add_, which goes row by row in one thread.
        moved = self.read(rows).add_(step, alpha=-self.learning_rate)
        self.rules.cap(moved, rows)
        if self.weight.dtype == torch.bfloat16:
            moved = round_stochastically(moved, self._generator)
        self.weight.index_put_((rows,), moved)

    def _spread(self, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Every open row, and its gradient: zero where it is not among `rows`."""
        whole = grad.new_zeros(self.weight.shape).index_copy_(0, rows, grad)
        if self._open is None:
            return torch.arange(len(whole), device=whole.device), whole
        every = self._open.nonzero().squeeze(1)
        return every, whole.index_select(0, every)

    def _are_open(self) -> Tensor:
        """Bool `[N]`."""
        if self._open is not None:
            return self._open
        return torch.full((len(self.weight),), self._trainable, device=self.weight.device)

    def _open_rows(self, rows: Tensor | None, *, trainable: bool = True) -> None:
        """Opens exactly these rows; None: all, or none unless `trainable`."""
        if rows is not None:
            padding = torch.zeros_like(rows)
            padding[list(self.padding_rows)] = True
            rows = rows & ~padding
            trainable = bool(rows.any())
            if not trainable or bool((rows | padding).all()):
                rows = None
        self._open, self._trainable = rows, trainable

    def _as_mask(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.bool or rows.shape != (len(self.weight),):
            raise TrainingError(
                f"rows to open or close came as {rows.dtype} of shape {list(rows.shape)}",
                f"give a mask: bool, of shape [{len(self.weight)}]",
            )
        return rows.to(self.weight.device)

    def _clear_padding(self) -> None:
        self.weight[list(self.padding_rows)] = 0.0


@dataclass(frozen=True)
class LocalLookup:
    """Rows read from a `LocalTable`; it implements `thawline.tables.Lookup`."""

    table: LocalTable
    rows: Tensor
    embeddings: Tensor

    def wait(self) -> Tensor:
        """See `Lookup.wait`."""
        return self.embeddings

    def apply(self, grad: Tensor) -> None:
        """See `Lookup.apply`.

        Raises:
            TrainingError: The table is frozen.
        """
        if not self.table.trainable:
            raise TrainingError(
                "a frozen table was asked to update its rows", "thaw it first, or skip the update"
            )
        self.table.update(self.rows, grad)


def sum_by_row(
    rows: Tensor, grad: Tensor, *, keep: Tensor | None = None, drop: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Sums the gradients of equal rows.

    A stable sort brings equal rows together, and each run is one bag of an `embedding_bag` over
    the unsorted gradients: no copy of the gradients is made, and the order of each sum is fixed,
    so the result is the same bits every time.

    Args:
        rows: `[n]`, int32 or int64.
        grad: `[n, d]`.
        keep: Rows whose gradients count, bool `[N]`; None: all.
        drop: Rows whose gradients do not count.

    Returns:
        The distinct rows that count in ascending order, `[u]` int64, and their summed gradients,
        `[u, d]`.
    """
    ordered, order = torch.sort(rows, stable=True)
    counted = None if keep is None else keep.index_select(0, ordered)
    for row in drop:
        other = ordered != row
        counted = other if counted is None else counted & other
    if counted is not None and not counted.all():
        ordered, order = ordered[counted], order[counted]
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    offsets = counts.cumsum(0) - counts
    return distinct.long(), functional.embedding_bag(order, grad, offsets, mode="sum")


def _require_finite(weight: Tensor) -> None:
    """Reads the rows once and makes no copy, as a mask over a large table would be."""
    if not weight.numel() or all(bool(torch.isfinite(end)) for end in weight.aminmax()):
        return
    row = next(row for row, values in enumerate(weight) if not torch.isfinite(values).all())
    raise DataError(
        f"row {row} of a table holds NaN or inf",
        "lower the learning rate that the rows were trained with, and train them again",
    )
