"""Scorers that know only trivial facts: where one of them scores well, the negatives leak."""

from __future__ import annotations

import numpy as np

from thawline.config import Negatives
from thawline.data.manifest import FIRST_ROW, Dataset
from thawline.data.popularity import MICROSECONDS_PER_HOUR, Popularity


def trivial_scores(
    dataset: Dataset,
    rows: np.ndarray,
    timestamps: np.ndarray,
    negatives: Negatives | None = None,
) -> dict[str, np.ndarray]:
    """Scores candidates by facts that need no model.

    Args:
        dataset: Its catalog and popularity file are read.
        rows: int64 [K]: candidates.
        timestamps: int64 [K]: times of their requests, microseconds since 1970 UTC.
        negatives: The config's `negatives`; with decayed popularity, `recent_popularity` is added.

    Returns:
        Scorer to float64 [K]; 0 for rows that are not in the catalog:

        - `never_trained`: 1 if the row had a positive in the fine-tune window, else 0.
        - `item_age`: hours since `first_seen`.
        - `as_of_popularity`: positives of all users in buckets that were over at the request, which
          is what the sampler's `as_of` popularity counts.
        - `recent_popularity`: the same, halved every `negatives.half_life_hours`.

    Raises:
        DataError: The popularity file is missing or damaged.
    """
    catalog = dataset.catalog
    known = (rows >= FIRST_ROW) & (rows < catalog.num_rows)
    place = np.where(known, rows - FIRST_ROW, 0)
    age = (timestamps - catalog.first_seen[place]) / MICROSECONDS_PER_HOUR
    popularity = Popularity.read(dataset)
    scores = {
        "never_trained": (known & (catalog.support[place] > 0)).astype(np.float64),
        "item_age": np.where(known, age, 0.0),
        "as_of_popularity": popularity.at(rows, timestamps, None),
    }
    if negatives is not None and negatives.popularity == "decayed":
        scores["recent_popularity"] = popularity.at(rows, timestamps, negatives.half_life_hours)
    return scores
