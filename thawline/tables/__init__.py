"""ID tables: rows looked up as a leaf, updated when and where the training loop says."""

from thawline.tables.base import IdTable, Lookup
from thawline.tables.group import GroupLookup, TableGroup
from thawline.tables.local import LocalTable
from thawline.tables.memory import TableSize, require_memory
from thawline.tables.optimizers import RowOptimizer, make_optimizer
from thawline.tables.rules import RowRules

__all__ = [
    "GroupLookup",
    "IdTable",
    "LocalTable",
    "Lookup",
    "RowOptimizer",
    "RowRules",
    "TableGroup",
    "TableSize",
    "make_optimizer",
    "require_memory",
]
