"""All ID tables of a model as one: a lookup and an update a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from thawline.errors import TrainingError
from thawline.tables.base import IdTable, Lookup


class TableGroup:
    """ID tables by name, each with its own width, optimizer and open rows."""

    def __init__(self, tables: Mapping[str, IdTable]) -> None:
        """Gathers the tables; they stay usable one by one."""
        self.tables = dict(tables)

    def lookup(self, rows: Mapping[str, Tensor], counts: Tensor | None = None) -> GroupLookup:
        """Reads rows of every table as they are now.

        Args:
            rows: int64 `[n]` by table; `n` may differ between tables.
            counts: Of this process's batch, int64 or float64 `[k]`; see `GroupLookup.total`.

        Raises:
            TrainingError: Names that are not those of the tables, or a row outside its table; the
                message names both.
        """
        self._require_names(rows)
        looked_up = {name: self._lookup(name, rows[name]) for name in self.tables}
        return GroupLookup(looked_up, counts=counts)

    def settle(self) -> None:
        """Waits for lookups and updates that are under way, if there can be any."""

    def _require_names(self, rows: Mapping[str, Tensor]) -> None:
        if rows.keys() != self.tables.keys():
            raise TrainingError(
                f"rows of {_names(rows)} were looked up in the tables {_names(self.tables)}",
                "use the tables and the dataset that were made from the same config",
            )

    def _lookup(self, name: str, rows: Tensor) -> Lookup:
        try:
            return self.tables[name].lookup(rows)
        except TrainingError as error:
            raise TrainingError(f"the table `{name}`: {error.what}", error.remedy) from error


@dataclass(frozen=True)
class GroupLookup:
    """Rows of every table on their way to the network and, as gradients, back."""

    lookups: Mapping[str, Lookup]
    counts: Tensor | None = field(default=None, kw_only=True)
    """Those of this process."""

    def total(self) -> Tensor | None:
        """The sum of the counts that all processes gave with this lookup; they travel with it."""
        return self.counts

    def wait(self) -> dict[str, Tensor]:
        """By table the rows read, as a leaf `[n, d]`; it requires grad only if the table trains."""
        return {name: lookup.wait() for name, lookup in self.lookups.items()}

    def apply(self, grads: Mapping[str, Tensor | None]) -> None:
        """One sparse update of the rows read.

        Args:
            grads: By table, `[n, d]` aligned with the rows looked up. A table whose gradient is
                None or missing (it is frozen, or outside the loss) is left as it is.

        Raises:
            TrainingError: A gradient for a table that is frozen or that was not looked up.
        """
        if strangers := grads.keys() - self.lookups.keys():
            raise TrainingError(
                f"a gradient came for {_names(sorted(strangers))}, "
                f"but the tables {_names(self.lookups)} were looked up",
                "use the lookup that the gradients belong to",
            )
        for name, lookup in self.lookups.items():
            grad = grads.get(name)
            if grad is not None:
                lookup.apply(grad)


def _names(tables: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in tables) or "none"
