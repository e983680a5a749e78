"""The content tower: from an item's content vector to a feature of the candidate.

Content vectors (of images, text, ...) come with the items and never train; the tower does. It has a
schedule of its own, so that it can learn for more epochs than the item table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn


class ContentTower(nn.Module):
    """Layer norm, then a perceptron; an item without content has a vector of zeros."""

    def __init__(self, content_dim: int, hidden: Sequence[int], dim: int) -> None:
        """Makes a tower from vectors of width `content_dim` to features of width `dim`.

        Args:
            content_dim: Width of the content vectors.
            hidden: Widths of the hidden layers; empty for a linear map.
            dim: Width of the features.
        """
        super().__init__()
        self.norm = nn.LayerNorm(content_dim)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise([content_dim, *hidden, dim]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, vectors: Tensor) -> Tensor:
        """`[n, content_dim]` to `[n, dim]`."""
        return self.layers(self.norm(vectors))
