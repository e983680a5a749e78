"""What a hold-out is cut by, beside tiers: context, day, length of the history, age of the item."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from thawline.data.manifest import FIRST_ROW, Catalog
from thawline.data.popularity import MICROSECONDS_PER_HOUR
from thawline.evaluation.scored import Scored

MOST_VALUES = 20
"""The commonest so many values of a context column are slices."""

MISSING = "(missing or unseen)"
"""The slice of a context column's code 0."""

HISTORY_LENGTHS = (0, 1, 5, 10, 20, 50, 100, 200)
"""Least lengths of the slices of histories; the last one is open."""

AGES = {
    "under 1 h": 1.0,
    "1 h to 1 d": 24.0,
    "1 d to 7 d": 24.0 * 7,
    "7 d to 30 d": 24.0 * 30,
    "30 d to 90 d": 24.0 * 90,
    "90 d and more": np.inf,
}
"""Slices of an item's age at the request: hours below which each ends."""


class Slicing(NamedTuple):
    """A way to cut a hold-out: each request or candidate is in one slice or in none."""

    codes: np.ndarray
    """int16 [R] or [K]: index into `names`; -1: in none."""
    names: list[str]
    by_request: bool
    """Whether requests are cut (`codes` is [R]) or candidates ([K])."""


def slicings(
    scored: Scored, context: Mapping[str, Sequence[str]], catalog: Catalog
) -> dict[str, Slicing]:
    """Every slicing by its kind: `context.<column>`, `day`, `history_length`, `item_age`.

    Slices that hold nothing are left out.

    Args:
        scored: A hold-out with its contexts and lengths of histories.
        context: Vocabulary of each context column, in the order of the codes.
        catalog: When each item was first seen.
    """
    found: dict[str, Slicing] = {}
    if scored.context is not None:
        for column, (name, values) in enumerate(context.items()):
            found[f"context.{name}"] = by_value(scored.context[:, column], [MISSING, *values])
    days, codes = np.unique(scored.day, return_inverse=True)
    found["day"] = Slicing(codes.astype(np.int16), [str(day) for day in days], True)
    if scored.history_length is not None:
        found["history_length"] = by_length(scored.history_length)
    found["item_age"] = by_age(scored.row, scored.candidate_timestamp, catalog.first_seen)
    return found


def by_value(codes: np.ndarray, names: Sequence[str]) -> Slicing:
    """Requests by the code of a context column, the commonest value first.

    Args:
        codes: int [R]: indices into `names`.
        names: Values; those that no request has are left out, and so are the rarest where there
            are more than `MOST_VALUES`.
    """
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:MOST_VALUES]
    order = order[counts[order] > 0]
    place = np.full(len(counts), -1, np.int16)
    place[order] = np.arange(len(order))
    return Slicing(place[codes], [names[code] for code in order], True)


def by_length(length: np.ndarray) -> Slicing:
    """Requests by the items of their history, int [R]."""
    names = [
        str(low) if high - low == 1 else f"{low} to {high - 1}"
        for low, high in itertools.pairwise(HISTORY_LENGTHS)
    ]
    names.append(f"{HISTORY_LENGTHS[-1]} and more")
    return _filled(
        np.searchsorted(HISTORY_LENGTHS, length, side="right") - 1, names, by_request=True
    )


def by_age(row: np.ndarray, timestamp: np.ndarray, first_seen: np.ndarray) -> Slicing:
    """Candidates by the age of their item at the request; items not in the catalog are in none.

    Args:
        row: int64 [K].
        timestamp: int64 [K]: of the request, microseconds since 1970 UTC.
        first_seen: int64 [N]: of the catalog's rows, likewise.
    """
    known = row >= FIRST_ROW
    codes = np.full(len(row), -1)
    hours = (timestamp[known] - first_seen[row[known] - FIRST_ROW]) / MICROSECONDS_PER_HOUR
    codes[known] = np.searchsorted(list(AGES.values())[:-1], hours, side="right")
    return _filled(codes, list(AGES), by_request=False)


def _filled(codes: np.ndarray, names: Sequence[str], *, by_request: bool) -> Slicing:
    """Without the slices that hold nothing."""
    used = np.bincount(codes[codes >= 0], minlength=len(names)) > 0
    place = np.where(used, np.cumsum(used) - 1, -1).astype(np.int16)
    kept = [name for name, held in zip(names, used, strict=True) if held]
    return Slicing(np.where(codes >= 0, place[codes], np.int16(-1)), kept, by_request)
