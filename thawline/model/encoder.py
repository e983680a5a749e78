"""The history encoder: a causal transformer over a user's last items."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Multi-head attention.

    Only queries have a bias: a key's would cancel in the softmax, and a value's is the output
    projection's.
    """

    def __init__(self, dim: int, heads: int) -> None:
        """Makes projections for `heads` heads over vectors of width `dim`."""
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim)

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attends from `queries` `[B, Q, d]` to `memory` `[B, M, d]`.

        Args:
            queries: What asks.
            memory: What is asked.
            mask: Added to the scores before the softmax: 0 where memory may be read and -inf
                where not; anything that broadcasts to `[B, heads, Q, M]`. For causal attention
                too: on a CPU, a mask is several times faster than `is_causal`.

        Returns:
            `[B, Q, d]`.
        """
        key, value = self.key_value(memory).chunk(2, dim=-1)
        attended = functional.scaled_dot_product_attention(
            self._split(self.query(queries)), self._split(key), self._split(value), attn_mask=mask
        )
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split(self, vectors: Tensor) -> Tensor:
        batch, length, dim = vectors.shape
        return vectors.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm transformer layer, of self-attention or of cross-attention."""

    def __init__(
        self, dim: int, heads: int, ffn: int, dropout: float, *, recompute: bool = False
    ) -> None:
        """Makes a layer of width `dim` with a feed-forward part of width `ffn`.

        With `recompute` the backward computes the layer's activations once more, rather than that
        the forward keeps them: same gradients, less memory, more time.
        """
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn), nn.ReLU(), nn.Linear(ffn, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """`[B, Q, d]` to `[B, Q, d]`; self-attention where `memory` is None."""
        if self.recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._forward, queries, mask, memory, use_reentrant=False)
            return again
        return self._forward(queries, mask, memory)

    def _forward(self, queries: Tensor, mask: Tensor, memory: Tensor | None) -> Tensor:
        normed = self.attention_norm(queries)
        attended = self.attention(normed, normed if memory is None else memory, mask)
        queries = queries + self.dropout(attended)
        return queries + self.dropout(self.ffn(self.ffn_norm(queries)))


class HistoryEncoder(nn.Module):
    """Encodes item vectors, oldest first, after a learned start token.

    The start token gives an empty history something to be read, so no query is ever without
    memory. Padding stands at the end, where causal attention keeps it from every real position.
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: int,
        heads: int,
        ffn: int,
        dropout: float,
        max_length: int,
        recompute: bool = False,
    ) -> None:
        """Makes an encoder for histories of at most `max_length` items of width `dim`.

        `recompute` is as in `Block`.
        """
        super().__init__()
        self.start = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.position = nn.Parameter(torch.randn(max_length + 1, dim) * 0.02)
        self.layers = nn.ModuleList(
            Block(dim, heads, ffn, dropout, recompute=recompute) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.causal: Tensor
        future = torch.full((max_length + 1, max_length + 1), -torch.inf).triu(1)
        self.register_buffer("causal", future, persistent=False)

    def forward(self, items: Tensor) -> Tensor:
        """Encodes `[B, L, d]` into `[B, L + 1, d]`: output `i` has read the first `i` items."""
        batch, length, _ = items.shape
        start = self.start.expand(batch, 1, -1)
        hidden = torch.cat([start, items], dim=1) + self.position[: length + 1]
        for layer in self.layers:
            hidden = layer(hidden, self.causal[: length + 1, : length + 1])
        return self.norm(hidden)
