"""Optimizers of single rows: vectorized updates of the touched rows and nothing else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RowOptimizer(Protocol):
    """Turns the summed gradient of each touched row into its update."""

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, learning_rate: float) -> None:
        """Updates `weight[rows]` in place.

        Args:
            weight: The table, `[N, d]`.
            rows: Distinct rows, `[u]`, int64.
            grad: Their summed gradients, `[u, d]`, float32.
            learning_rate: Step size.
        """
        ...

    def reset(self) -> None:
        """Forgets all state, as if freshly made."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The state, by name."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over a state that `state_dict` gave."""
        ...


class RowWiseAdagrad:
    """Adagrad with one accumulator a row, as FBGEMM's EXACT_ROWWISE_ADAGRAD.

    For a touched row with summed gradient `g`: `G += mean(g²)`, then the row moves by
    `-lr · g / (sqrt(G) + eps)`.
    """

    def __init__(self, num_rows: int, *, eps: float = 1e-8) -> None:
        """Makes the state of a table with `num_rows` rows."""
        self.eps = eps
        self.accumulator = torch.zeros(num_rows)

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, learning_rate: float) -> None:
        """See `RowOptimizer.update`."""
        mean_square = torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])
        accumulated = self.accumulator.index_select(0, rows).add_(mean_square)
        self.accumulator.index_copy_(0, rows, accumulated)
        scale = accumulated.sqrt_().add_(self.eps).reciprocal_().mul_(-learning_rate)
        weight.index_add_(0, rows, grad * scale[:, None])

    def reset(self) -> None:
        """See `RowOptimizer.reset`."""
        self.accumulator.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """See `RowOptimizer.state_dict`."""
        return {"accumulator": self.accumulator}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `RowOptimizer.load_state_dict`."""
        self.accumulator.copy_(state["accumulator"])
