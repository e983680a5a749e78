"""The article's ranker: history transformer, cross-attention, feature crosses, a head an action.

It holds no ID table: it says which rows of which table a batch needs (`Ranker.rows`), and they come
in as one tensor a table, in that order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thawline.config import GRADIENT_PATHS, IdTableSettings, Model
from thawline.data.batches import Batch
from thawline.model.adapter import Adapter
from thawline.model.content import ContentTower
from thawline.model.encoder import Block, HistoryEncoder
from thawline.model.losses import (
    contrastive_loss,
    count_candidates,
    count_pairs,
    head_loss,
    pairwise_loss,
)
from thawline.tables.small import SmallTable


@dataclass(frozen=True)
class Losses:
    """The objectives of one batch; `total` is what is minimised."""

    total: Tensor
    head: Tensor
    pairwise: Tensor
    contrastive: Tensor


@dataclass(frozen=True)
class Counts:
    """What the objectives of a batch are means over: int64, or weights in float64."""

    candidates: Tensor
    pairs: Tensor
    positives: Tensor
    """Requests with a positive candidate."""

    @classmethod
    def of(cls, batch: Batch) -> Counts:
        """Those of one batch."""
        return cls(
            count_candidates(batch.candidate_mask, batch.weight),
            count_pairs(batch.labels, batch.candidate_mask, batch.weight),
            count_candidates(_are_positive(batch).any(1), batch.weight),
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.candidates + other.candidates,
            self.pairs + other.pairs,
            self.positives + other.positives,
        )


class CrossNetwork(nn.Module):
    """DCN v2: `x ← x₀ ⊙ (W x + b) + x`, a layer (Wang et al. 2021)."""

    def __init__(self, width: int, layers: int) -> None:
        """Makes `layers` full-rank cross layers over features of width `width`."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        """`[..., width]` to `[..., width]`."""
        crossed = features
        for layer in self.layers:
            crossed = features * layer(crossed) + crossed
        return crossed


class Ranker(nn.Module):
    """Scores the candidates of a request from the user's history and the context."""

    def __init__(
        self,
        settings: Model,
        *,
        actions: int,
        context_sizes: Mapping[str, int],
        history_length: int,
        tables: Mapping[str, IdTableSettings] | None = None,
        content_dim: int = 0,
    ) -> None:
        """Makes a ranker with fresh parameters from torch's global generator.

        Args:
            settings: The config's `model` section.
            actions: Number of heads.
            context_sizes: Codes of each context column, 0 (missing) included.
            history_length: Longest history.
            tables: ID tables beside the item table.
            content_dim: Width of the content vectors, if there is a content tower.
        """
        super().__init__()
        dim = settings.dim
        self.settings = settings
        self.tables = dict(tables or {})
        self.adapter = Adapter(settings.adapter, dim)
        self.action = SmallTable(2**actions, dim, backward=settings.small_table_backward)
        self.age = nn.Linear(1, dim)
        self.encoder = HistoryEncoder(
            dim,
            layers=settings.layers,
            heads=settings.heads,
            ffn=settings.ffn,
            dropout=settings.dropout,
            max_length=history_length,
            recompute=settings.checkpoint_activations,
        )
        self.cross_attention = Block(
            dim,
            settings.heads,
            settings.ffn,
            settings.dropout,
            recompute=settings.checkpoint_activations,
        )
        self.cross_attention_norm = nn.LayerNorm(dim)
        self.next_item = nn.Linear(dim, dim)
        self.context = nn.ModuleDict(
            {
                f"ctx_{name}": SmallTable(
                    size, settings.context_dim, backward=settings.small_table_backward
                )
                for name, size in context_sizes.items()
            }
        )
        width = 3 * dim + settings.context_dim * len(context_sizes)
        width += sum(table.dim for table in self.tables.values())
        self.content_tower = None
        if settings.content_tower is not None:
            self.content_tower = ContentTower(content_dim, settings.content_tower, dim)
            width += dim
        self.cross = CrossNetwork(width, settings.cross_layers)
        widths = [width, *settings.mlp]
        self.mlp = nn.Sequential(
            *(
                module
                for fan_in, fan_out in itertools.pairwise(widths)
                for module in (nn.Linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(settings.dropout))
            )
        )
        self.heads = nn.Linear(width + widths[-1], actions)
        nn.init.normal_(self.action.weight, std=0.02)
        for table in self.context.values():
            nn.init.normal_(table.get_parameter("weight"), std=0.1)

    def components(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each part that may have a schedule of its own, by its name there."""
        parts: dict[str, nn.Module] = {"history_action": self.action, **self.context}
        if self.settings.adapter != "off":
            parts["adapter"] = self.adapter
        if self.content_tower is not None:
            parts["content_tower"] = self.content_tower
        named = {name: list(part.parameters()) for name, part in parts.items()}
        apart = {id(parameter) for parameters in named.values() for parameter in parameters}
        named["dense"] = [own for own in self.parameters() if id(own) not in apart]
        return named

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """The rows of each table, int64 `[n]`, that `forward` and `loss` want for a batch.

        `content` stands for the items' content vectors.
        """
        rows = {"item": batch.rows}
        rows |= {name: batch.ids[name].flatten() for name in self.tables}
        if self.content_tower is not None:
            rows["content"] = batch.candidate_row.flatten()
        return rows

    def forward(self, batch: Batch, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, C, A]`, from the rows that `rows` names as `embeddings`, `[n, d]` each."""
        history, candidates = self._read(batch, embeddings["item"])
        encoded = self._encode(batch, history)
        return self._score(batch, candidates, encoded, self._side(batch, embeddings))

    def user_vectors(self, batch: Batch, embeddings: Mapping[str, Tensor]) -> Tensor:
        """What the contrastive loss predicts the next item by, `[B, d]`: its cosine with items.

        An item's vector there is its row after `adapter`.
        """
        history, _ = self._read(batch, embeddings["item"])
        return self.next_item(self._user_state(batch, self._encode(batch, history)))

    def loss(
        self, batch: Batch, embeddings: Mapping[str, Tensor], whole: Counts | None = None
    ) -> Losses:
        """The training losses.

        Args:
            batch: The requests.
            embeddings: The rows that `rows` names, `[n, d]` each.
            whole: Counts of a larger batch that this one is part of; the sum over the parts is
                then its loss, but for the contrastive one, whose negatives are the part's own.
        """
        history, candidates = self._read(batch, embeddings["item"])
        encoded = self._encode(batch, history)
        logits = self._score(batch, candidates, encoded, self._side(batch, embeddings))
        counts = Counts.of(batch) if whole is None else whole
        labels, mask, weight = batch.labels, batch.candidate_mask, batch.weight
        head = head_loss(logits, labels, mask, counts.candidates, weight)
        pairwise = pairwise_loss(logits, labels, mask, counts.pairs, weight)
        contrastive = self._next_item_loss(
            batch, candidates["contrastive"], encoded, counts.positives
        )
        total = (
            head
            + self.settings.pairwise_weight * pairwise
            + self.settings.contrastive_weight * contrastive
        )
        return Losses(total, head, pairwise, contrastive)

    def _read(self, batch: Batch, embeddings: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The history's vectors and, for each gradient path, the candidates'.

        A path that is cut reads the same values through the same adapter, which still trains, but
        gives the rows no gradient.
        """
        history, candidates = _split_rows(batch, embeddings)
        open_paths = self.settings.gradient_paths
        adapted = self.adapter(candidates)
        cut = self.adapter(candidates.detach()) if len(open_paths) < len(GRADIENT_PATHS) else None
        paths = {
            path: adapted if path in open_paths or cut is None else cut
            for path in ("contrastive", "transformer", "feature_cross")
        }
        return self.adapter(history if "history" in open_paths else history.detach()), paths

    def _encode(self, batch: Batch, history: Tensor) -> Tensor:
        age = self.age(torch.log1p(batch.history_age).unsqueeze(-1))
        return self.encoder(history + self.action(batch.history_action) + age)

    def _side(self, batch: Batch, embeddings: Mapping[str, Tensor]) -> list[Tensor]:
        """Features `[B, C, d]` of each candidate from the other ID tables and its content."""
        size, count = batch.candidate_row.shape
        features = []
        for name, table in self.tables.items():
            rows = embeddings[name].view(size, -1, table.dim)
            features.append(rows.expand(-1, count, -1))
        if self.content_tower is not None:
            features.append(self.content_tower(embeddings["content"]).view(size, count, -1))
        return features

    def _score(
        self, batch: Batch, candidates: dict[str, Tensor], encoded: Tensor, side: list[Tensor]
    ) -> Tensor:
        attended = self.cross_attention(candidates["transformer"], _padding_mask(batch), encoded)
        count = attended.shape[1]
        features = [
            candidates["feature_cross"],
            self.cross_attention_norm(attended),
            self._user_state(batch, encoded).unsqueeze(1).expand(-1, count, -1),
            *side,
        ]
        for column, table in enumerate(self.context.values()):
            features.append(table(batch.context[:, column]).unsqueeze(1).expand(-1, count, -1))
        crossed = torch.cat(features, dim=-1)
        return self.heads(torch.cat([self.cross(crossed), self.mlp(crossed)], dim=-1))

    def _user_state(self, batch: Batch, encoded: Tensor) -> Tensor:
        length = (batch.history_row != 0).sum(1)
        return encoded[torch.arange(len(encoded), device=encoded.device), length]

    def _next_item_loss(
        self, batch: Batch, candidates: Tensor, encoded: Tensor, count: Tensor
    ) -> Tensor:
        positive = _are_positive(batch)
        some = positive.any(1)
        request = torch.arange(len(positive), device=positive.device)
        # The first positive; of a request without one, a candidate that the mask leaves out.
        first = positive.int().argmax(1)
        targets = candidates[request, first]
        rows = batch.candidate_row[request, first]
        return contrastive_loss(
            self.next_item(self._user_state(batch, encoded)),
            targets,
            rows,
            targets,
            rows,
            batch.candidate_log_q[request, first],
            temperature=self.settings.temperature,
            mask=some,
            negative_mask=some,
            count=count,
            weight=batch.weight,
        )


def _are_positive(batch: Batch) -> Tensor:
    """Candidates with any action: bool `[B, C]`."""
    return (batch.labels > 0).any(-1) & batch.candidate_mask


def _split_rows(batch: Batch, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    size, length = batch.history_row.shape
    count = batch.candidate_row.shape[1]
    history, candidates = embeddings.split([size * length, size * count])
    return history.view(size, length, -1), candidates.view(size, count, -1)


def _padding_mask(batch: Batch) -> Tensor:
    """`[B, 1, 1, L + 1]`: -inf at padding, 0 at the start token and at items."""
    padding = torch.zeros_like(batch.history_age).masked_fill(batch.history_row == 0, -torch.inf)
    return nn.functional.pad(padding, (1, 0))[:, None, None, :]
