"""Rules on how rows may move, beside the optimizer: decay, pull, cap, frequency."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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

    def step_scale(self, rows: Tensor) -> Tensor | None:
        """Factors `[u, 1]` on the optimizer's step of `rows` `[u]`; None is 1."""
        if not self.frequency_scaling or self.support is None:
            return None
        support = self.support.index_select(0, rows)
        share = (1 + support.float()) / (1 + self._most_support)
        return share.pow_(self.frequency_scaling)[:, None]

    @property
    def has_force(self) -> bool:
        """Whether `force` is anything but zero."""
        return self.weight_decay > 0 or self.pull > 0

    def force(self, current: Tensor, rows: Tensor) -> Tensor:
        """Decay and pull `[u, d]` on `rows` `[u]`, which are now `current` `[u, d]`."""
        force = self.weight_decay * current
        if self.pull and self.anchor is not None and self.support is not None:
            rarity = (1 + self.support.index_select(0, rows).float()).rsqrt_()[:, None]
            force += self.pull * rarity * (current - self.anchor.index_select(0, rows))
        return force

    def cap(self, moved: Tensor, rows: Tensor) -> None:
        """Brings the values `moved` `[u, d]` of `rows` `[u]` within the drift cap, in place."""
        if self.drift_cap is None or self.anchor is None:
            return
        anchor = self.anchor.index_select(0, rows).float()
        drift = moved - anchor
        length = torch.linalg.vector_norm(drift, dim=1)
        most = self.drift_cap * torch.linalg.vector_norm(anchor, dim=1)
        beyond = (length > most).nonzero().squeeze(1)
        if len(beyond):
            shrink = (most / length.clamp(min=1e-30))[:, None]
            inside = torch.addcmul(anchor, drift, shrink)
            moved.index_copy_(0, beyond, inside.index_select(0, beyond))

    @cached_property
    def _most_support(self) -> float:
        """Read once: a maximum a step would grow with the table."""
        return 0.0 if self.support is None else float(self.support.max())
