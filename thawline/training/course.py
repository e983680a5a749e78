"""How the training loss goes within an epoch: its mean over each twentieth of the steps.

Where examples are seen again, the loss steps down at an epoch's start; `evaluation.staircase` reads
that off.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 20


def begun(loss: Tensor) -> Tensor:
    """An empty course `[2, PARTS]`: sums of a loss, and the steps they are of."""
    return loss.new_zeros((2, PARTS), dtype=torch.float32)


def added(course: Tensor, loss: Tensor, step: int, steps: int) -> Tensor:
    """The course with one step more; nothing waits for a GPU.

    Args:
        course: `[2, PARTS]`.
        loss: Of the step, a scalar.
        step: Steps of the epoch before it.
        steps: Steps of the epoch.
    """
    part = min(step * PARTS // steps, PARTS - 1)
    longer = course.clone()
    longer[0, part] += loss
    longer[1, part] += 1
    return longer


def means(course: Tensor) -> list[float | None]:
    """The mean loss of each part; None for one that holds no step."""
    sums, steps = course.tolist()
    return [total / count if count else None for total, count in zip(sums, steps, strict=True)]
