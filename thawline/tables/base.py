"""The calls that every ID table answers, whatever holds its rows."""

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
    """A large table of rows, one an id, that trains apart from the network.

    A row is open while it trains. Of a closed row gradients are dropped: it and its optimizer
    state stay bit-identical. Padding rows are zero and never move.
    """

    learning_rate: float

    @property
    def trainable(self) -> bool:
        """Whether any row is open. If none is, lookups carry no graph."""
        ...

    def lookup(self, rows: Tensor) -> Lookup:
        """Reads rows `[n]` (int64, duplicates welcome) as they are now."""
        ...

    def freeze(self, rows: Tensor | None = None) -> None:
        """Closes rows until a thaw.

        Args:
            rows: Which, bool `[N]`; None: all.
        """
        ...

    def thaw(self, *, reset_state: bool, rows: Tensor | None = None) -> None:
        """Opens rows; those that are open already stay so.

        Args:
            reset_state: The next update of each newly opened row equals a fresh optimizer's. Rows
                that were open keep their state, unless `rows` is None: then all of it is reset.
            rows: Which, bool `[N]`; None: all.
        """
        ...

    def replace(self, weight: Tensor, *, reset_state: bool) -> None:
        """Gives every row, open or not, another value, in place; padding stays zero.

        Args:
            weight: `[N, d]`.
            reset_state: The next update equals a fresh optimizer's.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next updates depend on, by name; no copies."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave, in place: training goes on bit for bit."""
        ...
