"""Small random batches for tests of the model and of training."""

from __future__ import annotations

import dataclasses

import torch

from thawline.config import IdTableSettings, Model
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


USER = IdTableSettings(column="user_id", rows=5, dim=3)
AUTHOR = IdTableSettings(column="author_id", of="item", rows=7, dim=2)


def with_ids(batch: Batch, seed=0) -> Batch:
    """The same requests with ids of `USER` and `AUTHOR`, 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    author = torch.randint(0, AUTHOR.rows, batch.candidate_row.shape, generator=generator)
    user = torch.randint(0, USER.rows, (len(batch),), generator=generator)
    return dataclasses.replace(batch, ids={"user": user, "author": author})


def make_ranker(*, seed=0, actions=2, history=32, settings=SETTINGS, **more) -> Ranker:
    torch.manual_seed(seed)
    return Ranker(
        settings,
        actions=actions,
        context_sizes={"a": 3, "b": 3},
        history_length=history,
        **more,
    )


def to_double(batch: Batch) -> Batch:
    """The same batch with its floats in float64."""
    return dataclasses.replace(
        batch,
        **{
            name: value.double()
            for name, value in batch.tensors().items()
            if value.is_floating_point()
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

    def epoch(self, index, start=0):
        return iter(self.batches[start:])
