"""Small random batches for tests of the model and of training."""

from __future__ import annotations

import dataclasses

import torch

from thawline.config import Model
from thawline.data.batches import Batch
from thawline.model.ranker import Ranker

NUM_ROWS = 30
SETTINGS = Model(dim=8, heads=2, layers=2, ffn=16, mlp=(16,), context_dim=4)


def make_batch(size=6, *, history=8, candidates=4, actions=2, seed=0, longest=None) -> Batch:
    """Histories of 0 to `longest` items (request 0 has none, request 1 the longest)."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    longest = history if longest is None else longest
    lengths = integers(0, longest + 1, size)
    lengths[0], lengths[-1] = 0, longest
    real = torch.arange(history) < lengths[:, None]
    mask = torch.ones(size, candidates, dtype=torch.bool)
    mask[-1, -1] = False
    labels = integers(0, 2, size, candidates, actions).float() * mask[..., None]
    return Batch(
        request_id=torch.arange(100, 100 + size),
        timestamp=torch.zeros(size, dtype=torch.int64),
        history_row=integers(2, NUM_ROWS, size, history) * real,
        history_action=integers(1, 2**actions, size, history) * real,
        history_age=torch.rand(size, history, generator=generator) * 50 * real,
        candidate_row=integers(2, NUM_ROWS, size, candidates) * mask,
        candidate_mask=mask,
        candidate_log_q=-torch.rand(size, candidates, generator=generator) - 1,
        labels=labels,
        context=integers(0, 3, size, 2),
        oracle=None,
    )


def widen_history(batch: Batch, more: int) -> Batch:
    """The same requests with `more` columns of padding after the history."""
    return dataclasses.replace(
        batch,
        **{
            name: torch.nn.functional.pad(getattr(batch, name), (0, more))
            for name in ("history_row", "history_action", "history_age")
        },
    )


def make_ranker(*, seed=0, actions=2, history=32, settings=SETTINGS) -> Ranker:
    torch.manual_seed(seed)
    return Ranker(settings, actions=actions, context_sizes=[3, 3], history_length=history)


def to_double(batch: Batch) -> Batch:
    """The same batch with its floats in float64."""
    return dataclasses.replace(
        batch,
        **{
            field.name: value.double()
            for field in dataclasses.fields(batch)
            if (value := getattr(batch, field.name)) is not None and value.is_floating_point()
        },
    )


def make_weight(seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(NUM_ROWS, SETTINGS.dim, generator=generator) * 0.5
    weight[0] = 0
    return weight


class ListReader:
    """A reader over given batches: the same ones each epoch."""

    def __init__(self, batches):
        self.batches = batches
        self.num_batches = len(batches)

    def epoch(self, index):
        return iter(self.batches)
