"""Rules on how rows may move, beside the optimizer: decay, pull, cap, frequency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowRules:
    """What holds for each touched row, beside the optimizer's step.

    With `w` the row, `w₀` its pretrained value and `r = (1 + support)^-½` its rarity, a step adds
    `-lr · (weight_decay · w + pull · r · (w - w₀))` and then, if `drift_cap` is set, brings the row
    back onto the ball `‖w - w₀‖ ≤ drift_cap · ‖w₀‖`. The optimizer's own step is scaled by
    `((1 + support) / (1 + max support))^frequency_scaling`.
    """

    weight_decay: float = 0.0
    pull: float = 0.0
    drift_cap: float | None = None
    frequency_scaling: float = 0.0
    anchor: Tensor | None = None
    """`[N, d]`: the pretrained rows; needed by `pull` and `drift_cap`."""
    support: Tensor | None = None
    """`[N]`: how often each row occurs; needed by `pull` and `frequency_scaling`."""

    def step_scale(self, rows: Tensor | None) -> Tensor | None:
        """Factors `[u, 1]` on the optimizer's step of `rows` (None: every row); None is 1."""
        if not self.frequency_scaling or self.support is None:
            return None
        support = self.support if rows is None else self.support.index_select(0, rows)
        share = (1 + support.float()) / (1 + self.support.max().float())
        return share.pow_(self.frequency_scaling)[:, None]

    def regularize(self, weight: Tensor, rows: Tensor, learning_rate: float) -> None:
        """Decays and pulls `weight[rows]` in place."""
        if not self.weight_decay and not self.pull:
            return
        current = weight.index_select(0, rows)
        force = self.weight_decay * current
        if self.pull and self.anchor is not None and self.support is not None:
            rarity = (1 + self.support.index_select(0, rows).float()).rsqrt_()[:, None]
            force += self.pull * rarity * (current - self.anchor.index_select(0, rows))
        weight.index_add_(0, rows, force, alpha=-learning_rate)

    def cap(self, weight: Tensor, rows: Tensor | None) -> None:
        """Brings `weight[rows]` (every row: None) back within the drift cap, in place."""
        if self.drift_cap is None or self.anchor is None:
            return
        every = torch.arange(len(weight), device=weight.device) if rows is None else rows
        anchor = self.anchor.index_select(0, every)
        drift = weight.index_select(0, every) - anchor
        length = torch.linalg.vector_norm(drift, dim=1)
        most = self.drift_cap * torch.linalg.vector_norm(anchor, dim=1)
        beyond = length > most
        if beyond.any():
            inside = anchor + drift * (most / length.clamp(min=1e-30))[:, None]
            weight.index_copy_(0, every[beyond], inside[beyond])
