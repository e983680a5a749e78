"""The metrics tree of a hold-out, and the small curves of a report.

Everything returned is JSON-able: an undefined figure is None, never NaN and never 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thawline.data.manifest import FIRST_ROW, TIERS
from thawline.evaluation import calibration
from thawline.evaluation.auc import auc, roc_curve_points
from thawline.evaluation.checks import candidate_tiers, require_usable
from thawline.evaluation.figures import Column, Measured, request_slices
from thawline.evaluation.intervals import UserSums, intervals
from thawline.evaluation.scored import Scored
from thawline.evaluation.slices import Slicing


def holdout_metrics(
    scored: Scored,
    tier: np.ndarray,
    *,
    hit_at: int,
    trivial: Mapping[str, np.ndarray] | None = None,
    first_row: int = FIRST_ROW,
    slicings: Mapping[str, Slicing] | None = None,
    resamples: int = 0,
) -> dict[str, Any]:
    """The metrics tree of one hold-out.

    A tier's slice holds the candidates whose item is of that tier; rows below `first_row` (items
    that the catalog does not know) are cold.

    Args:
        scored: The hold-out, scored.
        tier: int8 [num_rows - first_row]: index into `TIERS` of each row from `first_row` on.
        hit_at: The k of HIT@k and NDCG@k.
        trivial: Scores [K] of scorers that know next to nothing, by name.
        first_row: First row of the catalog.
        slicings: What else to cut by, by kind (`slices.slicings`).
        resamples: Of the bootstrap over users; 0, or users that are not known: no intervals.

    Returns:
        `{"requests", "users", "pooled": {action: M}, "tiers": {tier: {action: M}}, "slices":
        {kind: {value: {action: M}}}, "intervals": {"pooled": {action: {figure: [low, high]}},
        "tiers": {tier: ...}} or None, "oracle": {action: M} or None, "trivial": {scorer: AUC of
        the primary action}}` with M = `{"auc", "user_auc", "request_auc", "log_loss",
        "normalized_entropy", "calibration", "ece", "hit@k", "ndcg@k", "mrr", "positive_logit",
        "positives", "candidates"}`; `docs/evaluation.md` says what each is.

    Raises:
        TrainingError: A score that is NaN or infinite; the message names the request.
        DataError: Labels other than 0 and 1, rows beyond `tier`, or an oracle or trivial scorer
            with unusable values.
    """
    require_usable(scored, trivial or {})
    tiers = candidate_tiers(scored.row, tier, first_row)
    user = scored.user if resamples else None
    sums: dict[tuple[str, ...], UserSums] = {}

    def keep(measured: Measured, *name: str) -> dict[str, Any]:
        if user is not None and len(user):
            sums[name] = UserSums(measured, user)
        return measured.figures()

    tree: dict[str, Any] = {
        "requests": scored.num_requests,
        "users": scored.num_users,
        "pooled": {},
        "tiers": {name: {} for name in TIERS},
        "slices": {
            kind: {value: {} for value in slicing.names}
            for kind, slicing in (slicings or {}).items()
        },
    }
    oracle: dict[str, Any] = {}
    for index, action in enumerate(scored.actions):
        labels = scored.labels[:, index]
        column = Column(scored, scored.logits[:, index], labels, hit_at)
        whole = column.measure(column.whole)
        tree["pooled"][action] = keep(whole, "pooled", action)
        for name, part in zip(TIERS, column.parts(tiers, len(TIERS)), strict=True):
            tree["tiers"][name][action] = keep(column.measure(part), "tiers", name, action)
        for kind, slicing in (slicings or {}).items():
            for value, figures in zip(slicing.names, _cut(whole, slicing), strict=True):
                tree["slices"][kind][value][action] = figures
        truth = _oracle(scored, index)
        if truth is not None:
            known = Column(scored, calibration.logit(truth), labels, hit_at)
            oracle[action] = known.measure(known.whole).figures()
    weight = scored.candidate_weight
    return tree | {
        "intervals": _nested(intervals(sums, resamples)) if sums else None,
        "oracle": oracle or None,
        "trivial": {
            name: auc(scores, scored.labels[:, 0], weight)
            for name, scores in (trivial or {}).items()
        },
    }


def holdout_curves(
    scored: Scored, *, points: int = 101, bins: int = calibration.BINS
) -> dict[str, Any]:
    """The ROC (the model's and, where known, the oracle's) and the reliability of each action.

    Returns:
        `{action: {"roc": ROC, "oracle_roc": ROC or None, "reliability": [bin, ...]}}`, see
        `auc.roc_curve_points` and `calibration.reliability`.

    Raises:
        TrainingError: A score that is NaN or infinite.
        DataError: Labels or an oracle that cannot be used.
    """
    require_usable(scored, {})
    weight = scored.candidate_weight
    curves = {}
    for index, action in enumerate(scored.actions):
        probability = calibration.sigmoid(scored.logits[:, index])
        labels = scored.labels[:, index]
        truth = _oracle(scored, index)
        curves[action] = {
            "roc": roc_curve_points(probability, labels, points, weight),
            "oracle_roc": (
                None if truth is None else roc_curve_points(truth, labels, points, weight)
            ),
            "reliability": calibration.reliability(probability, labels, bins, weight),
        }
    return curves


def _cut(whole: Measured, slicing: Slicing) -> list[dict[str, Any]]:
    """M of each slice of an action."""
    column, count = whole.column, len(slicing.names)
    if not slicing.by_request:
        return [column.measure(part).figures() for part in column.parts(slicing.codes, count)]
    own = request_slices(whole.requests, slicing.codes, count)
    parts = column.parts(slicing.codes[column.request], count)
    return [
        column.measure(part, requests).figures() for part, requests in zip(parts, own, strict=True)
    ]


def _nested(found: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in found.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def _oracle(scored: Scored, index: int) -> np.ndarray | None:
    """True probabilities [K] of an action; None unless they are known for every candidate."""
    if scored.oracle is None or np.isnan(scored.oracle[:, index]).any():
        return None
    return scored.oracle[:, index]
