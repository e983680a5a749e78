"""The shared adapter: one small map applied to every row before the network reads it.

`e + eA + b` starts as the identity and trains from the first step, beside a frozen table as well as
beside a training one, so that what fine-tuning teaches all rows alike reaches the cold ones too. It
is part of the network, so a model that is loaded applies it without further ado.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["off", "bias", "diagonal", "full"]


class Adapter(nn.Module):
    """`e + eA + b`, zero-initialised: A is a matrix, a diagonal, or absent."""

    def __init__(self, kind: Kind, dim: int) -> None:
        """Makes an adapter for rows of width `dim`; `full` has dim² + dim parameters."""
        super().__init__()
        self.kind = kind
        self.matrix = nn.Parameter(torch.zeros(dim, dim)) if kind == "full" else None
        self.diagonal = nn.Parameter(torch.zeros(dim)) if kind == "diagonal" else None
        self.bias = nn.Parameter(torch.zeros(dim)) if kind != "off" else None

    def forward(self, rows: Tensor) -> Tensor:
        """`[n, d]` to `[n, d]`."""
        adapted = rows
        if self.matrix is not None:
            adapted = adapted + rows @ self.matrix
        if self.diagonal is not None:
            adapted = adapted + rows * self.diagonal
        if self.bias is not None:
            adapted = adapted + self.bias
        return adapted
