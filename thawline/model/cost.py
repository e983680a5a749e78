"""What the ranker costs: parameters, floating point operations, and activations kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from thawline.config import Model

FLOAT = 4
"""Bytes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch and of what the ranker reads beside the item table."""

    batch: int
    """Requests."""
    history: int
    """Items of a history, padding included."""
    candidates: int
    actions: int = 1
    context: int = 0
    """Context columns."""
    side: Sequence[int] = ()
    """Widths of the candidates' rows of other ID tables."""


@dataclass(frozen=True)
class Cost:
    """Of one step of one process."""

    parameters: int
    """Of the network without its tables of tens of rows, adapter and content tower."""
    forward: float
    """Floating point operations of the matrix products; a backward takes twice as many."""
    kept: float
    """Bytes that the forward keeps for the backward, in float32."""
    backward: float
    """Floating point operations, those of computing activations again included."""


def ranker_cost(settings: Model, shape: Shape) -> Cost:
    """The ranker's cost in closed form.

    With d the width of a row, f that of the feed-forward layers, T = history + 1 tokens (the start
    token), C candidates, and w = 3d + context + side the width of the feature cross, a request
    takes, two operations a multiplication and addition,

    - a transformer layer: T (8 d² + 4 d f) + 4 T² d;
    - the cross-attention: C (4 d² + 4 d f) + 4 T d² + 4 C T d;
    - cross layers, MLP and heads: 2 C (layers w² + the products of neighbouring widths);
    - the age, the next item and its B negatives: 2 T' d + 2 d² + 2 B d, T' = T - 1.

    What is not a matrix product (norms, softmax, losses) is left out; it is memory traffic more
    than arithmetic. A backward computes two products for each of the forward's; where activations
    are computed again, the transformer's forward comes once more on top.

    Kept are the inputs of products, norms and nonlinearities, with an attention that keeps no
    scores (as PyTorch's fused ones do not): about 6 d + f a query and 2 d a token of its memory in
    a layer, the widths of the tower's layers a candidate, and five bytes for each pair of requests
    in the contrastive loss. With `checkpoint_activations` a layer keeps its input alone, beside
    one layer's worth while it is computed again. It is an estimate: tests hold it within 15 % of
    what PyTorch keeps.

    Args:
        settings: The config's `model` section.
        shape: Sizes of the batch.
    """
    d, ffn, layers = settings.dim, settings.ffn, settings.layers
    size, history, count = shape.batch, shape.history, shape.candidates
    tokens = history + 1
    width = 3 * d + settings.context_dim * shape.context + sum(shape.side)
    if settings.content_tower is not None:
        width += d
    tower = list(itertools.pairwise([width, *settings.mlp]))
    last = width + (settings.mlp[-1] if settings.mlp else width)

    layer = tokens * (8 * d**2 + 4 * d * ffn) + 4 * tokens**2 * d
    cross = count * (4 * d**2 + 4 * d * ffn) + 4 * tokens * d**2 + 4 * count * tokens * d
    products = settings.cross_layers * width**2 + sum(a * b for a, b in tower)
    heads = 2 * count * (products + last * shape.actions)
    ends = 2 * history * d + 2 * d**2 + 2 * size * d
    transformer = size * (layers * layer + cross)
    forward = transformer + size * (heads + ends)

    block = 4 * d**2 + 2 * d + 2 * d * ffn + ffn + d + 4 * d
    parameters = (
        (layers + 1) * block
        + d + (history + 1) * d + 2 * d  # start token, positions, last norm
        + 2 * d  # age
        + 2 * d  # norm of the cross-attention
        + d**2 + d  # next item
        + settings.cross_layers * (width**2 + width)
        + sum(a * b + b for a, b in tower)
        + (last + 1) * shape.actions
    )  # fmt: skip

    def kept_by(queries: int, memory: int) -> int:
        return queries * (6 * d + ffn) + memory * 2 * d

    blocks = [kept_by(tokens, tokens)] * layers + [kept_by(count, tokens)]
    if settings.checkpoint_activations:
        transformer_kept = layers * tokens * d + count * d + max(blocks)
    else:
        transformer_kept = sum(blocks)
    tower_kept = count * (width * (1 + 2 * settings.cross_layers) + sum(settings.mlp) + last)
    ends_kept = 3 * tokens * d + 2 * count * d + history
    pairs = 5 * size**2
    kept = FLOAT * size * (transformer_kept + tower_kept + ends_kept) + pairs
    again = transformer if settings.checkpoint_activations else 0
    return Cost(parameters, forward, kept, 2 * forward + again)
