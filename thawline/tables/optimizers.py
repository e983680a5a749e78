"""Optimizers of single rows: vectorized directions for the touched rows and nothing else.

Every update here is linear in the learning rate, so an optimizer gives a direction and the table
multiplies it: the step is `-lr · direction`. State is float32.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

OptimizerName = Literal["row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd"]


class RowOptimizer(Protocol):
    """Turns the summed gradient of each touched row into the direction of its step."""

    moves_every_row: bool
    """True: directions come for the whole table, since rows without a gradient move too."""

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Updates the state and gives the direction of the step.

        Args:
            rows: Distinct rows, `[u]`, int64.
            grad: Their summed gradients, `[u, d]`, float32.

        Returns:
            `[u, d]`; `[N, d]` where `moves_every_row`.
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


class _Stateful:
    """State as tensors by name, all zero when fresh."""

    moves_every_row = False

    def __init__(self, **state: Tensor) -> None:
        self.state = state

    def reset(self) -> None:
        """See `RowOptimizer.reset`."""
        for tensor in self.state.values():
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """See `RowOptimizer.state_dict`."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `RowOptimizer.load_state_dict`."""
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
        return grad * accumulated.sqrt_().add_(self.eps).reciprocal_()[:, None]


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


class _Adam(_Stateful):
    """Two moments of the table's shape and step counts of a shape of their own."""

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
            steps=torch.zeros(self._steps_shape(num_rows), device=device),
        )
        self.betas = betas
        self.eps = eps

    def _steps_shape(self, num_rows: int) -> tuple[int, ...]:
        return ()

    def _advance(self, first: Tensor, second: Tensor, steps: Tensor, grad: Tensor) -> Tensor:
        """Updates the moments in place and gives the direction; `steps` are counted already."""
        first.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        correction = [1 - beta**steps for beta in self.betas]
        return first / correction[0] / (second / correction[1]).sqrt_().add_(self.eps)


class LazyAdam(_Adam):
    """Adam (Kingma & Ba 2015) on the touched rows alone, each with its own step count.

    A row's moments and bias correction advance only when it has a gradient, so a row that thaws
    late takes a first step of one learning rate a coordinate, as a fresh optimizer's would.
    """

    def _steps_shape(self, num_rows: int) -> tuple[int, ...]:
        return (num_rows, 1)

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        touched = {name: tensor.index_select(0, rows) for name, tensor in self.state.items()}
        touched["steps"] += 1
        direction = self._advance(touched["first"], touched["second"], touched["steps"], grad)
        for name, value in touched.items():
            self.state[name].index_copy_(0, rows, value)
        return direction


class DenseAdam(_Adam):
    """`torch.optim.Adam` on the whole table: momentum moves every row that ever had a gradient.

    Its cost grows with the table. It is here to be studied, since it is what many scripts use.
    """

    moves_every_row = True

    def direction(self, rows: Tensor, grad: Tensor) -> Tensor:
        """See `RowOptimizer.direction`."""
        first, second, steps = (self.state[name] for name in ("first", "second", "steps"))
        steps += 1
        whole = torch.zeros_like(first).index_copy_(0, rows, grad)
        return self._advance(first, second, steps, whole)


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
