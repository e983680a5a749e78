"""Fine-tuning: the loop over epochs and the one training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thawline.data.batches import Batch, RequestReader
from thawline.errors import TrainingError
from thawline.model.ranker import Losses, Ranker
from thawline.tables.base import IdTable
from thawline.training.schedule import Schedule


@dataclass(frozen=True)
class EpochSummary:
    """What an epoch of training did."""

    epoch: int
    """Counted from 0."""
    losses: dict[str, float]
    """Mean over steps of each objective."""
    steps: int
    requests: int
    seconds: float
    waiting: float
    """Seconds of `seconds` spent waiting for batches."""
    item_share: float
    """Share of the epoch in which the item table trained."""


class Trainer:
    """Trains a ranker and an item table by a schedule."""

    def __init__(
        self,
        ranker: Ranker,
        table: IdTable,
        reader: RequestReader,
        schedule: Schedule,
        *,
        learning_rate: float,
        reset_state_at_thaw: bool = True,
        clip_norm: float | None = None,
        device: str = "cpu",
        on_step: Callable[[int, int], None] = lambda step, steps: None,
    ) -> None:
        """Gathers what a run needs; nothing is trained yet.

        Args:
            ranker: The network, on `device`.
            table: The item rows.
            reader: Training requests.
            schedule: When the table trains.
            learning_rate: Of Adam, for the network.
            reset_state_at_thaw: The first update after a thaw equals a fresh optimizer's.
            clip_norm: Clips the norm of the network's gradient.
            device: Where the network is.
            on_step: Called after each step with the steps done and those of the whole run.

        Raises:
            TrainingError: There is no request to train on.
        """
        if reader.num_batches == 0:
            raise TrainingError(
                "the fine-tune window holds no training request",
                "widen windows.finetune_days or lower windows.holdout_users",
            )
        self.ranker = ranker
        self.table = table
        self.reader = reader
        self.schedule = schedule
        self.optimizer = torch.optim.Adam(ranker.parameters(), lr=learning_rate, fused=True)
        self.reset_state_at_thaw = reset_state_at_thaw
        self.clip_norm = clip_norm
        self.device = device
        self.on_step = on_step
        self.step = 0

    def epochs(self) -> Iterator[EpochSummary]:
        """Trains an epoch at a time and yields its summary; the caller may evaluate between."""
        for epoch in range(self.schedule.epochs):
            yield self._train_epoch(epoch)

    def _train_epoch(self, epoch: int) -> EpochSummary:
        self.ranker.train()
        steps = self.reader.num_batches
        totals: dict[str, Tensor] = {}
        requests = 0
        waiting = 0.0
        started = asked = time.perf_counter()
        for batch in self.reader.epoch(epoch):
            batch = batch.to(self.device)
            waiting += time.perf_counter() - asked
            self._follow_schedule(steps)
            losses = self.train_step(batch)
            self._check_finite(losses, batch, epoch)
            for name in ("total", "head", "pairwise", "contrastive"):
                value = getattr(losses, name).detach()
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
            requests += len(batch)
            self.step += 1
            self.on_step(self.step, steps * self.schedule.epochs)
            asked = time.perf_counter()
        return EpochSummary(
            epoch=epoch,
            losses={name: float(total) / steps for name, total in totals.items()},
            steps=steps,
            requests=requests,
            seconds=time.perf_counter() - started,
            waiting=waiting,
            item_share=self.schedule.item_share(epoch),
        )

    def train_step(self, batch: Batch) -> Losses:
        """One step: read the rows, forward, backward, update the rows, update the network."""
        lookup = self.table.lookup(batch.rows)
        embeddings = lookup.wait()
        losses = self.ranker.loss(batch, embeddings)
        self.optimizer.zero_grad()
        losses.total.backward()
        if embeddings.grad is not None:
            lookup.apply(embeddings.grad)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), self.clip_norm)
        self.optimizer.step()
        return losses

    def _follow_schedule(self, steps_per_epoch: int) -> None:
        trains = self.schedule.item_trains(self.step, steps_per_epoch)
        if trains and not self.table.trainable:
            self.table.thaw(reset_state=self.reset_state_at_thaw)
        elif not trains and self.table.trainable:
            self.table.freeze()

    def _check_finite(self, losses: Losses, batch: Batch, epoch: int) -> None:
        if not torch.isfinite(losses.total):
            ids = ", ".join(str(int(value)) for value in batch.request_id[:5])
            raise TrainingError(
                f"the loss became {losses.total.item()} at step {self.step} (epoch {epoch}); "
                f"the batch's first request ids: {ids}",
                "lower finetune.learning_rate or tables.item.learning_rate, "
                "or set finetune.clip_norm",
            )
