"""From a batch and its rows to the losses: as the ranker has them, in bfloat16, or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from thawline.data.batches import Batch
from thawline.model.ranker import Counts, Losses, Ranker


class Forward(Protocol):
    """What `Ranker.loss` answers."""

    def __call__(
        self, batch: Batch, embeddings: Mapping[str, Tensor], whole: Counts | None = None, /
    ) -> Losses:
        """See `Ranker.loss`."""
        ...


def make_forward(
    ranker: Ranker,
    *,
    compiled: bool = False,
    bfloat16: bool = False,
    device: torch.device | str = "cpu",
    backend: str = "inductor",
) -> Forward:
    """The ranker's losses.

    Compiled, the sizes of a batch (requests, candidates, the history's width) are unknowns of one
    graph, so that a narrower batch or an epoch's last one is not compiled anew. A graph is made
    for each set of things that train: one before a thaw and one after it. The longest history that
    the ranker takes has a graph of its own. A size that equals 1, or that equals another of the
    first batch, is taken for a constant of its graph, and costs one more the first time that it
    differs.

    Args:
        ranker: The network.
        compiled: By `torch.compile`, at the first call; without a graph break.
        bfloat16: Matrix products in bfloat16; parameters, rows and losses stay float32.
        device: Where the ranker is.
        backend: Of `torch.compile`.
    """

    def in_bfloat16(
        batch: Batch, embeddings: Mapping[str, Tensor], whole: Counts | None = None, /
    ) -> Losses:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return ranker.loss(batch, embeddings, whole)

    forward: Forward = in_bfloat16 if bfloat16 else ranker.loss
    return torch.compile(forward, dynamic=True, backend=backend) if compiled else forward
