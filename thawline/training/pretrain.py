"""Contrastive pretraining: next-item InfoNCE over every position of a sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thawline.config import Model, Pretrain
from thawline.data.batches import SequenceBatch, SequenceReader
from thawline.data.manifest import FIRST_ROW
from thawline.errors import TrainingError
from thawline.model.encoder import HistoryEncoder
from thawline.model.losses import contrastive_loss
from thawline.tables.local import LocalTable


@dataclass(frozen=True)
class PretrainEpoch:
    """What an epoch of pretraining did."""

    epoch: int
    """Counted from 0."""
    loss: float
    recall: float | None
    """Recall@k of held-out next items; None where no held-out sequence exists."""
    seconds: float


class NextItemModel(nn.Module):
    """The encoder and the projection that predict the next item; thrown away afterwards."""

    def __init__(self, model: Model, max_length: int) -> None:
        """Makes an encoder of the ranker's shape for sequences of at most `max_length` items."""
        super().__init__()
        self.encoder = HistoryEncoder(
            model.dim,
            layers=model.layers,
            heads=model.heads,
            ffn=model.ffn,
            dropout=model.dropout,
            max_length=max_length,
            recompute=model.checkpoint_activations,
        )
        self.next_item = nn.Linear(model.dim, model.dim)

    def forward(self, items: Tensor) -> Tensor:
        """States `[B, T, d]` of items `[B, T, d]`: state `i` has read the items before `i`."""
        return self.next_item(self.encoder(items)[:, :-1])


class Pretrainer:
    """Trains the item table, and an encoder beside it, to predict next items."""

    def __init__(
        self,
        table: LocalTable,
        reader: SequenceReader,
        held_out: SequenceReader,
        *,
        model: Model,
        settings: Pretrain,
        max_length: int,
        seed: int,
        device: str = "cpu",
        on_step: Callable[[int, int], None] = lambda step, steps: None,
    ) -> None:
        """Gathers what a run needs; nothing is trained yet.

        Args:
            table: The item rows; they train from the first step.
            reader: Training sequences.
            held_out: Sequences of held-out users, for recall.
            model: The config's `model` section.
            settings: The config's `pretrain` section.
            max_length: Longest sequence, padding included.
            seed: Of the encoder's parameters and of the negatives.
            device: Where the encoder is.
            on_step: Called after each step with the steps done and those of the whole run.

        Raises:
            TrainingError: There is no sequence to train on.
        """
        if settings.epochs and reader.num_batches == 0:
            raise TrainingError(
                "the pretraining window holds no training sequence of two items",
                "widen windows.pretrain_days, or set pretrain.epochs to 0",
            )
        torch.manual_seed(seed)
        self.table = table
        self.reader = reader
        self.held_out = held_out
        self.settings = settings
        self.network = NextItemModel(model, max_length).to(device)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=settings.learning_rate, fused=True
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.on_step = on_step
        table.learning_rate = settings.table_learning_rate
        table.thaw(reset_state=True)

    def epochs(self) -> Iterator[PretrainEpoch]:
        """Trains an epoch at a time and yields its summary."""
        steps = self.reader.num_batches
        for epoch in range(self.settings.epochs):
            self.network.train()
            started = time.perf_counter()
            total = 0.0
            for index, batch in enumerate(self.reader.epoch(epoch)):
                loss = self.train_step(batch.to(self.device))
                if not torch.isfinite(loss):
                    raise TrainingError(
                        f"the pretraining loss became {float(loss)} at epoch {epoch}, step {index}",
                        "lower pretrain.learning_rate or pretrain.table_learning_rate",
                    )
                total += float(loss)
                self.on_step(epoch * steps + index + 1, self.settings.epochs * steps)
            yield PretrainEpoch(epoch, total / steps, self.recall(), time.perf_counter() - started)

    def train_step(self, batch: SequenceBatch) -> Tensor:
        """One step over a batch of sequences; returns its loss."""
        lookup = self.table.lookup(batch.item_row.flatten())
        embeddings = lookup.wait()
        items = embeddings.view(*batch.item_row.shape, -1)
        predicted = _predicted_positions(batch.item_row)
        chosen = self._choose_negatives(batch.item_row)
        rows = batch.item_row.flatten()
        loss = contrastive_loss(
            self.network(items)[predicted],
            items[predicted],
            batch.item_row[predicted],
            embeddings.index_select(0, chosen),
            rows[chosen],
            batch.log_q.flatten()[chosen],
            temperature=self.settings.temperature,
        )
        self.optimizer.zero_grad()
        loss.backward()
        if embeddings.grad is not None:
            lookup.apply(embeddings.grad)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def recall(self) -> float | None:
        """Share of held-out sequences whose last item is in the top k of the whole catalog."""
        self.network.eval()
        catalog = functional.normalize(self.table.weight[FIRST_ROW:], dim=-1)
        hits = total = 0
        for batch in self.held_out.epoch(0):
            batch = batch.to(self.device)
            last = (batch.item_row != 0).sum(1) - 1
            every = torch.arange(len(last), device=last.device)
            target = batch.item_row[every, last] - FIRST_ROW
            items = self.table.lookup(batch.item_row.flatten()).wait()
            states = self.network(items.view(*batch.item_row.shape, -1))[every, last]
            scores = functional.normalize(states, dim=-1) @ catalog.T
            top = scores.topk(min(self.settings.recall_at, len(catalog))).indices
            hits += int((top == target[:, None]).any(1).sum())
            total += len(last)
        return hits / total if total else None

    def _choose_negatives(self, item_row: Tensor) -> Tensor:
        real = (item_row.flatten() != 0).nonzero().squeeze(1)
        drawn = torch.randint(len(real), (self.settings.negatives,), generator=self.generator)
        return real[drawn.to(real.device)]


def _predicted_positions(item_row: Tensor) -> Tensor:
    predicted = item_row != 0
    predicted[:, 0] = False
    return predicted
