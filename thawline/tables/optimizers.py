"""Optimizers of single rows: vectorized directions for the touched rows and nothing else.

Every update here is linear in the learning rate, so an optimizer gives a direction and the table
multiplies it: the step is `-lr · direction`. State is float32.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from thawline.errors import DataError

OptimizerName = Literal["row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd"]


class RowOptimizer(Protocol):
    """Turns the summed gradient of each touched row into the direction of its step."""

    moves_every_row: bool
    """True: it is to be asked for every row that trains, since momentum moves them all."""

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Updates the state and gives the direction of the step.

        Args:
            rows: Distinct rows in ascending order, `[u]`, int64.
            grad: Their summed gradients, `[u, d]`, float32; they may be overwritten.

        Returns:
            `[u, d]`.
        """
        ...

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets the state of some rows (bool, `[N]`), or all of it, as if freshly made."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The state, by name."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over a state that `state_dict` gave.

        Raises:
            DataError: It is another optimizer's, or that of a table of another shape.
        """
        ...


class _Stateful:
    """State as tensors by name, all zero when fresh."""

    moves_every_row = False

    def __init__(self, **state: Tensor) -> None:
        self.state = state

    def reset(self, rows: Tensor | None = None) -> None:
        """See `RowOptimizer.reset`."""
        for tensor in self.state.values():
            if rows is None:
                tensor.zero_()
            else:
                tensor[rows] = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """See `RowOptimizer.state_dict`."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `RowOptimizer.load_state_dict`."""
        own, given = (
            {name: list(tensor.shape) for name, tensor in tensors.items()}
            for tensors in (self.state, state)
        )
        if own != given:
            raise DataError(
                f"an optimizer state of {given} does not fit one of {own}",
                "go on with the optimizer and the table that the state was saved from",
            )
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


class Sgd(_Stateful):
    """The direction is the gradient."""

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        return grad


class RowWiseAdagrad(_Stateful):
    """Adagrad with one accumulator a row, as FBGEMM's EXACT_ROWWISE_ADAGRAD.

    For a touched row with summed gradient `g`: `G += mean(g²)`, direction `g / (sqrt(G) + eps)`.
    """

    def __init__(
        self, num_rows: int, *, eps: float = 1e-8, device: torch.device | None = None
    ) -> None:
        """Makes the state of a table with `num_rows` rows: 4 bytes a row."""
        super().__init__(accumulator=torch.zeros(num_rows, device=device))
        self.eps = eps

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        accumulator = self.state["accumulator"]
        mean_square = torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])
        accumulated = accumulator.index_select(0, rows).add_(mean_square)
        accumulator.index_copy_(0, rows, accumulated)
        return grad.mul_(accumulated.sqrt_().add_(self.eps).reciprocal_()[:, None])


class Adagrad(_Stateful):
    """Adagrad (Duchi et al. 2011) with an accumulator a coordinate, on the touched rows."""

    def __init__(
        self, num_rows: int, dim: int, *, eps: float = 1e-8, device: torch.device | None = None
    ) -> None:
        """Makes the state of a table `[num_rows, dim]`: as large as the table."""
        super().__init__(accumulator=torch.zeros(num_rows, dim, device=device))
        self.eps = eps

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        accumulator = self.state["accumulator"]
        accumulated = accumulator.index_select(0, rows).addcmul_(grad, grad)
        accumulator.index_copy_(0, rows, accumulated)
        return grad / accumulated.sqrt_().add_(self.eps)


class LazyAdam(_Stateful):
    """Adam (Kingma & Ba 2015) on the touched rows alone, each with its own step count.

    A row's moments and bias correction advance only when it has a gradient, so a row that thaws
    late takes a first step of one learning rate a coordinate, as a fresh optimizer's would.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        device: torch.device | None = None,
    ) -> None:
        """Makes the state of a table `[num_rows, dim]`: twice as large as the table."""
        super().__init__(
            first=torch.zeros(num_rows, dim, device=device),
            second=torch.zeros(num_rows, dim, device=device),
            steps=torch.zeros(num_rows, 1, device=device),
        )
        self.betas = betas
        self.eps = eps

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        if len(rows) == len(self.state["steps"]):
            return self._advance(self.state, grad)
        touched = {name: tensor.index_select(0, rows) for name, tensor in self.state.items()}
        direction = self._advance(touched, grad)
        for name, value in touched.items():
            self.state[name].index_copy_(0, rows, value)
        return direction

    def _advance(self, state: dict[str, Tensor], grad: Tensor) -> Tensor:
        """Updates the state of some rows in place and gives their direction."""
        first, second = state["first"], state["second"]
        steps = state["steps"].add_(1)
        first.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        correction = [1 - beta**steps for beta in self.betas]
        scale = (second / correction[1]).sqrt_().add_(self.eps)
        return (first / correction[0]).div_(scale)


class DenseAdam(LazyAdam):
    """`torch.optim.Adam` on the whole table: momentum moves every row that ever had a gradient.

    Its cost grows with the table. It is here to be studied, since it is what many scripts use.
    Steps are counted by row, so that a row that starts to train later is corrected for bias as a
    fresh optimizer's would be.
    """

    moves_every_row = True


def make_optimizer(
    name: OptimizerName, num_rows: int, dim: int, *, device: torch.device | None = None
) -> RowOptimizer:
    """The optimizer of that name for a table `[num_rows, dim]`."""
    match name:
        case "row-wise-adagrad":
            return RowWiseAdagrad(num_rows, device=device)
        case "adagrad":
            return Adagrad(num_rows, dim, device=device)
        case "lazy-adam":
            return LazyAdam(num_rows, dim, device=device)
        case "dense-adam":
            return DenseAdam(num_rows, dim, device=device)
        case "sgd":
            return Sgd()
