"""What scored requests must be before a figure is made of them; the errors name the request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thawline.data.manifest import TIERS
from thawline.errors import DataError, ThawlineError, TrainingError
from thawline.evaluation.scored import Scored

COLD = TIERS.index("cold")


def require_usable(scored: Scored, trivial: Mapping[str, np.ndarray]) -> None:
    """Looks at scores, labels, weights, true probabilities and trivial scorers.

    Raises:
        TrainingError: A score that is NaN or infinite.
        DataError: Labels other than 0 and 1, weights below 0, or an oracle or trivial scorer with
            unusable values.
    """
    for index, action in enumerate(scored.actions):
        _refuse(
            scored,
            ~np.isfinite(scored.logits[:, index]),
            f"the model's {action} score is NaN or infinite",
            TrainingError,
            "lower finetune.learning_rate and tables.item.learning_rate or set "
            "finetune.clip_norm, and fine-tune again",
        )
        _refuse(
            scored,
            (scored.labels[:, index] != 0) & (scored.labels[:, index] != 1),
            f"label_{action} is neither 0 nor 1",
            DataError,
            "build the dataset again",
        )
        if scored.oracle is not None:
            truth = scored.oracle[:, index]
            _refuse(
                scored,
                (truth < 0) | (truth > 1),
                f"oracle_{action} is not a probability",
                DataError,
                "check the file of events.truth and build the dataset again",
            )
    weight = scored.candidate_weight
    if weight is not None:
        _refuse(
            scored,
            ~(np.isfinite(weight) & (weight >= 0)),
            "the weight is not a number from 0 on",
            DataError,
            "give each request a finite weight of at least 0",
        )
    for name, scores in trivial.items():
        if len(scores) != scored.num_candidates:
            raise DataError(
                f"trivial scorer {name} gave {len(scores)} scores for "
                f"{scored.num_candidates} candidates",
                "score the same candidates",
            )
        _refuse(
            scored,
            np.isnan(scores),
            f"trivial scorer {name} gave NaN",
            DataError,
            "check first_seen and support in the dataset's catalog.parquet",
        )


def candidate_tiers(row: np.ndarray, tier: np.ndarray, first_row: int) -> np.ndarray:
    """int8 [K]: index into `TIERS` of each candidate; rows below `first_row` are cold.

    Args:
        row: int64 [K].
        tier: int8 [N]: of the rows from `first_row` on.
        first_row: First row of the catalog.

    Raises:
        DataError: A row beyond the catalog's.
    """
    if len(row) and int(row.max()) >= first_row + len(tier):
        raise DataError(
            f"candidate row {int(row.max())} is beyond the catalog's last row "
            f"{first_row + len(tier) - 1}",
            "evaluate the model with the dataset that it was fine-tuned on",
        )
    known = row >= first_row
    tiers = np.full(len(row), COLD, np.int8)
    tiers[known] = np.asarray(tier)[row[known] - first_row]
    return tiers


def _refuse(
    scored: Scored, bad: np.ndarray, what: str, error: type[ThawlineError], remedy: str
) -> None:
    if bad.any():
        first = int(np.argmax(bad))
        request = int(scored.request_id[scored.request_index[first]])
        count = int(bad.sum())
        raise error(
            f"{what} for request_id {request}, candidate row {int(scored.row[first])} "
            f"({count} of {len(bad)} candidates)",
            remedy,
        )
