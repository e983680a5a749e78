"""Two models' scores of the same candidates, side by side: what comparisons are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thawline.errors import DataError
from thawline.evaluation.compare import Sides
from thawline.evaluation.score_file import Scores
from thawline.evaluation.scored import Scored

SHOWN = 3
"""Requests of a kind that are named."""


@dataclass(frozen=True)
class Pairing:
    """What two files have in common, and what was left out."""

    sides: Sides
    left_out: list[str]
    """In words, with the first request ids of each kind."""


def pair(first: Scores, second: Scores) -> Pairing:
    """Pairs the scores of two files by request, and within it by item, whatever the order.

    Requests that share an id are paired in order. Items without an id are paired in order too.
    Left out, and named, are requests that one file lacks, and those whose candidates, labels or
    weights differ. Where one file has no weights, those of the other count.

    Args:
        first: Scores of one model, A.
        second: Scores of the one that is asked about, B.

    Raises:
        DataError: No request or no action in common, or item ids of other types.
    """
    actions = [action for action in first.actions if action in second.actions]
    if not actions:
        raise DataError(
            f"one side scored {', '.join(first.actions)}, the other {', '.join(second.actions)}",
            "compare models of the same actions",
        )
    if first.item_id.type != second.item_id.type:
        raise DataError(
            f"item ids are {first.item_id.type} on one side and {second.item_id.type} on the other",
            "compare scores of one dataset",
        )
    left_out: list[str] = []
    one, two = _shared(first, second, left_out)
    columns = [first.actions.index(action) for action in actions]
    there = [second.actions.index(action) for action in actions]
    marks = _marks(first.labels[:, columns]), _marks(second.labels[:, there])
    one, two, order_one, order_two, sizes = _candidates(first, second, marks, one, two, left_out)
    labels = first.labels[order_one][:, columns]
    request = np.repeat(np.arange(len(one)), sizes)
    changed = (labels != second.labels[order_two][:, there]).any(axis=1)
    weight, reweighted = _weights(first, second, one, two)
    for what, bad in (
        ("have other labels", np.unique(request[changed])),
        ("have other weights", np.flatnonzero(reweighted)),
    ):
        if len(bad):
            left_out.append(_named(what, first.request_id[one[bad]]))
    if changed.any() or reweighted.any():
        good = ~reweighted
        good[request[changed]] = False
        kept = good[request]
        one, labels = one[good], labels[kept]
        weight = None if weight is None else weight[good]
        order_one, order_two = order_one[kept], order_two[kept]
        request = np.repeat(np.arange(len(one)), sizes[good])
    if not len(one):
        raise DataError(
            "no request is on both sides with the same candidates and labels"
            + (f": {'; '.join(left_out)}" if left_out else ""),
            "score both models on the same hold-out of the same dataset, with the same negatives",
        )
    # Of the requests that are left.
    sizes = np.bincount(request, minlength=len(one))
    scored = Scored(
        actions=actions,
        request_id=first.request_id[one],
        timestamp=first.timestamp[one],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        row=np.zeros(len(request), np.int64),
        labels=labels,
        logits=second.logits[order_two][:, there],
        oracle=None,
        user_id=first.user_id.take(pa.array(one)),
        weight=weight,
    )
    return Pairing(
        Sides(scored, first.tier[order_one], first.logits[order_one][:, columns]), left_out
    )


def _shared(first: Scores, second: Scores, left_out: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Places of the requests that both have, in the first one's order."""
    ids = np.concatenate([first.request_id, second.request_id])
    _, codes = np.unique(ids, return_inverse=True)
    split = len(first.request_id)
    keys = [_numbered(codes[:split]), _numbered(codes[split:])]
    wide = 1 + max(int(occurrence.max(initial=0)) for _, occurrence in keys)
    one, two = (code * wide + occurrence for code, occurrence in keys)
    _, at_one, at_two = np.intersect1d(one, two, assume_unique=True, return_indices=True)
    for side, scores, found in (("first", first, at_one), ("second", second, at_two)):
        alone = np.ones(len(scores.request_id), bool)
        alone[found] = False
        if alone.any():
            left_out.append(_named(f"are on the {side} side only", scores.request_id[alone]))
    order = np.argsort(at_one)
    return at_one[order], at_two[order]


def _numbered(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes, and how often each has come before."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    new = np.ones(len(codes), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(new)
    occurrence = np.empty(len(codes), np.int64)
    occurrence[order] = np.arange(len(codes)) - np.repeat(starts, np.diff([*starts, len(codes)]))
    return codes, occurrence


def _candidates(
    first: Scores,
    second: Scores,
    marks: tuple[np.ndarray, np.ndarray],
    one: np.ndarray,
    two: np.ndarray,
    left_out: list[str],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The shared requests with equal items, their candidates' places on both sides, and sizes."""
    sizes_one, sizes_two = np.diff(first.offsets)[one], np.diff(second.offsets)[two]
    equal = sizes_one == sizes_two
    codes = _item_codes(first.item_id, second.item_id)
    kept_one, kept_two, sizes = one[equal], two[equal], sizes_one[equal]
    request = np.repeat(np.arange(len(kept_one)), sizes)
    at_one = _places(first.offsets, kept_one, sizes)
    at_two = _places(second.offsets, kept_two, sizes)
    if not (
        np.array_equal(codes[0][at_one], codes[1][at_two])
        and np.array_equal(marks[0][at_one], marks[1][at_two])
    ):
        # An item that a request holds twice is told apart by its labels.
        at_one = at_one[np.lexsort((marks[0][at_one], codes[0][at_one], request))]
        at_two = at_two[np.lexsort((marks[1][at_two], codes[1][at_two], request))]
        differs = codes[0][at_one] != codes[1][at_two]
        if differs.any():
            good = np.ones(len(kept_one), bool)
            good[request[differs]] = False
            kept = good[request]
            at_one, at_two = at_one[kept], at_two[kept]
            kept_one, kept_two, sizes = kept_one[good], kept_two[good], sizes[good]
    if len(kept_one) < len(one):
        lost = np.setdiff1d(one, kept_one, assume_unique=True)
        left_out.append(_named("have other candidates", first.request_id[lost]))
    return kept_one, kept_two, at_one, at_two, sizes


def _weights(
    first: Scores, second: Scores, one: np.ndarray, two: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """The weights of the shared requests, and where the sides differ on them: bool [n]."""
    here = None if first.weight is None else first.weight[one]
    there = None if second.weight is None else second.weight[two]
    if here is None or there is None:
        return (there if here is None else here), np.zeros(len(one), bool)
    return here, here != there


def _marks(labels: np.ndarray) -> np.ndarray:
    """int64 [K]: the labels of a candidate as bits."""
    marks: np.ndarray = labels.astype(np.int64) @ (1 << np.arange(labels.shape[1]))
    return marks


def _item_codes(first: pa.Array, second: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the items that are equal where the ids are; -1 for none."""
    coded = pc.unique(pa.chunked_array([first, second])).drop_null()

    def codes(ids: pa.Array) -> np.ndarray:
        place = pc.index_in(ids, value_set=coded, skip_nulls=True)
        return np.asarray(place.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)

    return codes(first), codes(second)


def _places(offsets: np.ndarray, requests: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Places of the candidates of some requests, request after request."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(offsets[requests] - starts, sizes)


def _named(what: str, request_ids: np.ndarray) -> str:
    shown = ", ".join(str(each) for each in request_ids[:SHOWN].tolist())
    more = ", ..." if len(request_ids) > SHOWN else ""
    return f"{len(request_ids):,} requests {what} (request_id {shown}{more})"
