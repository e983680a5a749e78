"""Closed forms: what a schedule, an optimizer and stale lookups do to the rows of an ID table.

Nothing here trains or reads a file: numbers in, numbers out.
"""

from thawline.theory.displacement import dense_adam, lazy_adam, row_wise_adagrad
from thawline.theory.popularity import Popularity
from thawline.theory.stability import largest_stable_step
from thawline.theory.staleness import effective_rows, effective_rows_limit, stale_share
from thawline.theory.timing import replayed_by_epoch, written_then_replayed

__all__ = [
    "Popularity",
    "dense_adam",
    "effective_rows",
    "effective_rows_limit",
    "largest_stable_step",
    "lazy_adam",
    "replayed_by_epoch",
    "row_wise_adagrad",
    "stale_share",
    "written_then_replayed",
]
