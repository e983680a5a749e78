"""Fine-tuning: the loop over epochs and the one training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thawline.data.batches import Batch, RequestReader
from thawline.errors import TrainingError
from thawline.model.ranker import Losses, Ranker
from thawline.tables import IdTable, TableGroup
from thawline.training.components import Network, TableComponent, TrainedTable
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
    trained: dict[str, float]
    """Share of the epoch in which each component trained."""


class Trainer:
    """Trains a ranker and its ID tables by a schedule."""

    def __init__(
        self,
        ranker: Ranker,
        tables: Mapping[str, TrainedTable],
        reader: RequestReader,
        schedule: Schedule,
        *,
        learning_rate: float,
        learning_rates: Mapping[str, float] | None = None,
        content: IdTable | None = None,
        clip_norm: float | None = None,
        device: str = "cpu",
        on_step: Callable[[int, int], None] = lambda step, steps: None,
    ) -> None:
        """Gathers what a run needs; nothing is trained yet.

        Args:
            ranker: The network, on `device`.
            tables: `item` and the ranker's other ID tables.
            reader: Training requests.
            schedule: When each component trains.
            learning_rate: Of Adam, for the network.
            learning_rates: For some of its parts, by name.
            content: The items' content vectors, for a ranker with a content tower; never trained.
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
        self.tables = {name: trained.table for name, trained in tables.items()}
        self.reader = reader
        self.schedule = schedule
        parts = ranker.components()
        self.network = Network(
            parts,
            schedule,
            learning_rate=learning_rate,
            learning_rates=learning_rates,
        )
        self._followers: list[TableComponent | Network] = [
            *(TableComponent(trained, schedule.of(name)) for name, trained in tables.items()),
            self.network,
        ]
        self.components = [*self.tables, *parts]
        """What has a schedule, by name."""
        self._group = TableGroup(self.tables | ({"content": content} if content else {}))
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
            trained={name: self.schedule.of(name).share(epoch) for name in self.components},
        )

    def train_step(self, batch: Batch) -> Losses:
        """One step: read the rows, forward, backward, update the rows, update the network."""
        lookup = self._group.lookup(self.ranker.rows(batch))
        embeddings = lookup.wait()
        losses = self.ranker.loss(batch, embeddings)
        self.network.optimizer.zero_grad()
        losses.total.backward()
        lookup.apply({name: rows.grad for name, rows in embeddings.items()})
        self._step_network()
        return losses

    def _step_network(self) -> None:
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), self.clip_norm)
        self.network.optimizer.step()

    def _follow_schedule(self, steps_per_epoch: int) -> None:
        for follower in self._followers:
            follower.follow(self.step, steps_per_epoch)

    def _check_finite(self, losses: Losses, batch: Batch, epoch: int) -> None:
        if not torch.isfinite(losses.total):
            ids = ", ".join(str(int(value)) for value in batch.request_id[:5])
            raise TrainingError(
                f"the loss became {losses.total.item()} at step {self.step} (epoch {epoch}); "
                f"the batch's first request ids: {ids}",
                "lower finetune.learning_rate or tables.item.learning_rate, "
                "or set finetune.clip_norm",
            )
