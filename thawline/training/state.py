"""Where a training run stands, as named tensors and a few JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """All that a run needs to go on without a changed bit.

    A part is the same in every process of a job, or a process's own (`own`), or a table of which
    each process holds some rows: it then says with `start` which row is its first (`START`).
    """

    parts: Mapping[str, Mapping[str, Tensor]]
    """By part, as `table/item` or `ranker`, its tensors by name."""
    facts: Mapping[str, Any]
    """JSON values: the step, the epoch, ..."""
    own: frozenset[str] = frozenset()
    """Parts of which each process of a job has another one."""


START = "start"
"""In the part of a table whose rows are split: the first row held, int64 `[]`."""


def by_row(name: str) -> bool:
    """Whether a tensor of a table's part has a row for each of the table."""
    return name == "weight" or name.startswith("optimizer.")


def random_state(device: torch.device | str) -> dict[str, Tensor]:
    """The state of torch's generators, from which dropout draws."""
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Takes over what `random_state` gave; a generator without a saved state stays as it is."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def dealt_anew(
    own: Sequence[Mapping[str, Mapping[str, Tensor]]], rank: int
) -> dict[str, dict[str, Tensor]]:
    """What process `rank` of a job takes of the `own` parts of another number of processes.

    Gradients that wait for their step are summed and go to the first process, since every step adds
    up all processes' anyway. Generators go on where there was a process of the same rank. Lookups
    in flight, which are of batches that nobody reads now, are left out.

    Args:
        own: By process, its parts.
        rank: Of the job now.
    """
    parts: dict[str, dict[str, Tensor]] = {"gradients": {}}
    if rank < len(own) and "random" in own[rank]:
        parts["random"] = dict(own[rank]["random"])
    for each in own if rank == 0 else []:
        for name, gradient in each.get("gradients", {}).items():
            known = parts["gradients"].get(name)
            parts["gradients"][name] = gradient if known is None else known + gradient
    return parts
