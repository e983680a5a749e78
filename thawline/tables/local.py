"""The ID table of one process: a plain tensor and an optimizer of its touched rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from thawline.errors import TrainingError
from thawline.tables.optimizers import RowOptimizer, RowWiseAdagrad
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
        padding_row: int = 0,
    ) -> None:
        """Takes over `weight` (`[N, d]`, float32).

        Args:
            weight: The rows; updated in place.
            optimizer: Row-wise Adagrad where None.
            rules: On how rows may move beside the optimizer's step; none where None.
            learning_rate: Step size of the next update; a schedule may change it at any step.
            trainable: False starts frozen.
            padding_row: Set to zero now and never updated.
        """
        self.weight = weight.detach()
        self.weight[padding_row] = 0.0
        self.padding_row = padding_row
        self.optimizer = optimizer or RowWiseAdagrad(len(weight), device=weight.device)
        self.rules = rules or RowRules()
        self.learning_rate = learning_rate
        self._trainable = trainable

    @classmethod
    def random(cls, num_rows: int, dim: int, *, seed: int) -> LocalTable:
        """A table of normal rows with standard deviation `dim**-0.5`: norms are about 1."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(num_rows, dim, generator=generator) * dim**-0.5)

    @property
    def trainable(self) -> bool:
        """False: lookups carry no graph, and neither rows nor optimizer state change."""
        return self._trainable

    def freeze(self) -> None:
        """Stops training; rows and optimizer state stay bit-identical until a thaw."""
        self._trainable = False

    def thaw(self, *, reset_state: bool) -> None:
        """Starts training; with `reset_state` the next update equals a fresh optimizer's."""
        if reset_state:
            self.optimizer.reset()
        self._trainable = True

    def lookup(self, rows: Tensor) -> LocalLookup:
        """Reads rows `[n]` (int64, duplicates welcome) as they are now.

        Raises:
            TrainingError: A row outside the table; the message names it.
        """
        try:
            read = self.weight.index_select(0, rows)
        except (IndexError, RuntimeError) as error:
            outside = rows[(rows < 0) | (rows >= len(self.weight))]
            if not len(outside):
                raise
            raise TrainingError(
                f"row {int(outside[0])} is outside a table of {len(self.weight)} rows",
                "use the table and the dataset that were made from the same catalog",
            ) from error
        return LocalLookup(self, rows, read.requires_grad_(self._trainable))

    def update(self, rows: Tensor, grad: Tensor) -> None:
        """One step of the distinct rows `[u]`, padding not among them, by gradients `[u, d]`."""
        direction = self.optimizer.direction(rows, grad)
        moved = None if self.optimizer.moves_every_row else rows
        scale = self.rules.step_scale(moved)
        if scale is not None:
            direction = direction * scale
        self.rules.regularize(self.weight, rows, self.learning_rate)
        if moved is None:
            self.weight.add_(direction, alpha=-self.learning_rate)
        else:
            self.weight.index_add_(0, rows, direction, alpha=-self.learning_rate)
        self.rules.cap(self.weight, moved)


@dataclass(frozen=True)
class LocalLookup:
    """Rows read from a `LocalTable`; it implements `thawline.tables.Lookup`."""

    table: LocalTable
    rows: Tensor
    embeddings: Tensor

    def wait(self) -> Tensor:
        """The rows read, as a leaf `[n, d]`; it requires grad only if the table trains."""
        return self.embeddings

    @torch.no_grad()
    def apply(self, grad: Tensor) -> None:
        """One sparse update of the rows read, from gradients `[n, d]` aligned with them.

        Raises:
            TrainingError: The table is frozen.
        """
        if not self.table.trainable:
            raise TrainingError(
                "a frozen table was asked to update its rows", "thaw it first, or skip the update"
            )
        rows, summed = sum_by_row(self.rows, grad)
        real = rows != self.table.padding_row
        if not real.all():
            rows, summed = rows[real], summed[real]
        self.table.update(rows, summed)


def sum_by_row(rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Sums the gradients of equal rows.

    A stable sort brings equal rows together, and each run is one bag of an `embedding_bag` over
    the unsorted gradients: no copy of the gradients is made, and the order of each sum is fixed,
    so the result is the same bits every time.

    Args:
        rows: `[n]`, int64.
        grad: `[n, d]`.

    Returns:
        The distinct rows in ascending order, `[u]`, and their summed gradients, `[u, d]`.
    """
    ordered, order = torch.sort(rows, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    offsets = counts.cumsum(0) - counts
    return distinct, functional.embedding_bag(order, grad, offsets, mode="sum")
