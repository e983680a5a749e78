"""The two calls that every ID table answers, whatever holds its rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Lookup(Protocol):
    """Rows on their way from a table to the network and, as a gradient, back."""

    def wait(self) -> Tensor:
        """The rows read, as a leaf `[n, d]`; it requires grad only if the table trains."""
        ...

    def apply(self, grad: Tensor) -> None:
        """One sparse update of the rows read.

        Args:
            grad: `[n, d]`, aligned with the looked-up rows; the gradients of a row that was
                looked up several times are summed before its one update.
        """
        ...


class IdTable(Protocol):
    """A large table of rows, one an id, that trains apart from the network."""

    learning_rate: float

    @property
    def trainable(self) -> bool:
        """False: lookups carry no graph, and neither rows nor optimizer state change."""
        ...

    def lookup(self, rows: Tensor) -> Lookup:
        """Reads rows `[n]` (int64, duplicates welcome) as they are now."""
        ...

    def freeze(self) -> None:
        """Stops training; rows and optimizer state stay bit-identical until a thaw."""
        ...

    def thaw(self, *, reset_state: bool) -> None:
        """Starts training; with `reset_state` the next update equals a fresh optimizer's."""
        ...
