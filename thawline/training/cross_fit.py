"""Cross-fitted item rows: the network never reads what the request at hand wrote.

The table holds two copies of every item's row, one after the other, and each request belongs to a
fold, 0 or 1. Requests of fold `f` write copy `f`, and the network reads the other copy for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thawline.data.batches import Batch, RequestReader
from thawline.data.draws import mix
from thawline.model.ranker import Counts, Losses, Ranker
from thawline.tables import IdTable
from thawline.training.components import TrainedTable
from thawline.training.loop import Group, Trainer
from thawline.training.schedule import Schedule

FOLDS = (0, 1)


class CrossFitTrainer(Trainer):
    """Trains a ranker on rows that requests of the other fold have written.

    With `L(f, copy)` what the requests of a fold add to the batch's mean objective (in-batch
    negatives come from them alone), a step follows the gradients of

    - `L(0, copy 1) + L(1, copy 0)` for the network and the other ID tables, the item rows held
      fixed, and
    - `L(f, copy f)` for the rows of copy `f`, everything else held fixed.

    Both are taken at the values before the step. The loop is closed: a copy's gradient is that of
    a loss evaluated at the copy itself, so the copies cannot drift apart without bound, as they do
    where each is moved by the gradient at the other.

    Until the item table first trains both copies are equal, and steps are those of `Trainer`.
    """

    def __init__(
        self,
        ranker: Ranker,
        tables: Mapping[str, TrainedTable],
        reader: RequestReader,
        schedule: Schedule,
        *,
        num_rows: int,
        **options: Any,
    ) -> None:
        """Gathers what a run needs; nothing is trained yet.

        Args:
            ranker: As for `Trainer`, like what follows.
            tables: `item` holds `2 * num_rows` rows: the copies, equal at first.
            reader: Training requests.
            schedule: When each component trains.
            num_rows: Rows of one copy.
            options: The other ones of `Trainer`.
        """
        super().__init__(ranker, tables, reader, schedule, **options)
        self.num_rows = num_rows
        self._item: IdTable = tables["item"].table
        windows = [window.steps(reader.num_batches) for window in schedule.of("item").windows]
        self._first_write = min((steps.start for steps in windows if steps), default=None)

    def _steps(self, epoch: int) -> Iterator[tuple[Group, Losses]]:
        for group in self._groups(epoch):
            self._follow_schedule(self.step)
            yield group, self.train_step(group[0])

    def train_step(self, batch: Batch) -> Losses:
        """One step; the losses are those of the network's reads."""
        if self._first_write is None or self.step < self._first_write:
            return super().train_step(batch)
        folds = _by_fold(batch)
        rows = [self.ranker.rows(part) for _, part in folds]
        item = [own["item"] for own in rows]
        outside = self.prefetcher.tables.lookup(
            {name: torch.cat([own[name] for own in rows]) for name in rows[0]}
            | {"item": self._in_copies(item, [1 - fold for fold, _ in folds])}
        )
        embeddings = outside.wait()
        detached = {name: read.detach() for name, read in embeddings.items()}
        sizes = [{name: len(own) for name, own in each.items()} for each in rows]

        gradient = None
        if self._item.trainable:
            inside = self._item.lookup(self._in_copies(item, [fold for fold, _ in folds]))
            own_rows = inside.wait()
            own = self._losses(batch, folds, sizes, detached | {"item": own_rows})
            self._check_finite(own, [batch], self.step // self.reader.num_batches)
            # Through the rows alone: the network's parameters get no gradient here.
            (gradient,) = torch.autograd.grad(own.total, own_rows, allow_unused=True)
        losses = self._losses(batch, folds, sizes, embeddings | {"item": detached["item"]})
        self.network.optimizer.zero_grad()
        if losses.total.requires_grad:  # Not where only the item table trains.
            losses.total.backward()
        outside.apply({name: read.grad for name, read in embeddings.items()})  # None of the item's.
        if gradient is not None:
            inside.apply(gradient)
        return self._step_network(losses)

    def _in_copies(self, rows: list[Tensor], copies: list[int]) -> Tensor:
        """Rows of the table for rows of items, part by part."""
        return torch.cat(
            [own + copy * self.num_rows for own, copy in zip(rows, copies, strict=True)]
        )

    def _losses(
        self,
        batch: Batch,
        folds: list[tuple[int, Batch]],
        sizes: list[dict[str, int]],
        embeddings: Mapping[str, Tensor],
    ) -> Losses:
        """The batch's losses: the sum of its folds'."""
        parts = {
            name: read.split([own[name] for own in sizes]) for name, read in embeddings.items()
        }
        whole = Counts.of(batch)
        losses = [
            self.forward(part, {name: own[at] for name, own in parts.items()}, whole)
            for at, (_, part) in enumerate(folds)
        ]
        return Losses(
            **{
                each.name: torch.stack([getattr(own, each.name) for own in losses]).sum()
                for each in fields(Losses)
            }
        )


def fold_of(request_id: Tensor) -> Tensor:
    """The fold of each request, 0 or 1, int64 `[B]`: a bit of a hash of its id."""
    hashed = mix(request_id.cpu().numpy().astype(np.uint64))
    return torch.from_numpy((hashed >> np.uint64(63)).astype(np.int64)).to(request_id.device)


def mean_of_copies(weight: Tensor) -> Tensor:
    """The rows `[N, d]` that a model keeps of a cross-fitted table `[2 * N, d]`, in its type."""
    first, second = weight.chunk(len(FOLDS))
    return ((first.float() + second.float()) / 2).to(weight.dtype)


def _by_fold(batch: Batch) -> list[tuple[int, Batch]]:
    """The folds that have requests in a batch, with these."""
    fold = fold_of(batch.request_id)
    chosen = [(each, fold == each) for each in FOLDS]
    return [(each, batch.select(requests)) for each, requests in chosen if requests.any()]
