"""Where a training run stands, as named tensors and a few JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """All that a run needs to go on without a changed bit."""

    parts: Mapping[str, Mapping[str, Tensor]]
    """By part, as `table/item` or `ranker`, its tensors by name."""
    facts: Mapping[str, Any]
    """JSON values: the step, the epoch, ..."""


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
