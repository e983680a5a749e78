"""Which of the training requests an epoch shows: all, the same part again, or another part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from thawline.data.draws import mix

NO_PART = -1
"""Of rows that no part holds."""


@dataclass(frozen=True)
class Examples:
    """What each epoch of a run shows.

    `replay` and `fresh` cut the requests into as many equal parts as there are epochs. An epoch
    shows one part: the first one each time, or one after the other. Runs of the two take the same
    number of steps and differ only in whether a request is ever seen again.
    """

    kind: Literal["all", "replay", "fresh"] = "all"
    epochs: int = 1

    @property
    def parts(self) -> int:
        """Into how many parts the requests are cut."""
        return 1 if self.kind == "all" else self.epochs

    def part(self, epoch: int) -> int:
        """The part that an epoch (counted from 0) shows."""
        return epoch % self.parts if self.kind == "fresh" else 0


def split_by_id(request_id: np.ndarray, parts: int) -> np.ndarray:
    """Cuts requests into equal parts in the order of a hash of their ids.

    Args:
        request_id: int64 [N]; requests that share an id are taken in the order given.
        parts: How many.

    Returns:
        int16 [N]: the part of each request. Each part has N // parts of them; the last N % parts
        in the hash's order are in none (`NO_PART`), since all epochs take equally many steps.
    """
    order = np.argsort(mix(request_id.astype(np.int64).view(np.uint64)), kind="stable")
    size = len(order) // parts
    found = np.full(len(order), NO_PART, np.int16)
    found[order[: size * parts]] = np.repeat(np.arange(parts, dtype=np.int16), size)
    return found
