"""Scored requests: what a model said about the candidates, flat, beside what the users did.

Padding of batches ends here: metrics see valid candidates only. Who asked is read where the
requests are (`users`), since batches do not carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from thawline.errors import DataError


class ScorableBatch(Protocol):
    """The part of a batch that scoring needs; each is a tensor or an array."""

    @property
    def request_id(self) -> Any:
        """[B]."""

    @property
    def timestamp(self) -> Any:
        """[B]: microseconds since 1970 UTC."""

    @property
    def history_row(self) -> Any:
        """[B, L]: 0 at padding."""

    @property
    def context(self) -> Any:
        """[B, X]: codes of the context columns."""

    @property
    def candidate_row(self) -> Any:
        """[B, C]."""

    @property
    def candidate_mask(self) -> Any:
        """[B, C]: False at padding."""

    @property
    def labels(self) -> Any:
        """[B, C, A]: 0 or 1."""

    @property
    def oracle(self) -> Any:
        """[B, C, A], or None."""

    @property
    def weight(self) -> Any:
        """[B]: of the requests, or None."""


@dataclass(frozen=True)
class Scored:
    """R requests with K candidates in all; request `r` owns `offsets[r]:offsets[r + 1]`."""

    actions: list[str]
    """Names of the A heads, the primary one first."""
    request_id: np.ndarray
    """int64 [R]."""
    timestamp: np.ndarray
    """int64 [R]: microseconds since 1970 UTC."""
    offsets: np.ndarray
    """int64 [R + 1]: starts of the requests, then K."""
    row: np.ndarray
    """int64 [K]: rows of the item table."""
    labels: np.ndarray
    """int8 [K, A]: 0 or 1."""
    logits: np.ndarray
    """float32 [K, A]."""
    oracle: np.ndarray | None
    """float32 [K, A]: true probabilities of a simulated log; NaN where one is not known."""
    history_length: np.ndarray | None = None
    """int64 [R]: items of the history before the request."""
    context: np.ndarray | None = None
    """int64 [R, X]: codes in the order of the dataset's context columns; 0 is missing or unseen."""
    user_id: pa.Array | None = None
    """[R]: who asked, int64 or string as in the log; None: not known."""
    weight: np.ndarray | None = None
    """float64 [R]: how much each request counts, at least 0; None: all alike."""

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.request_id)

    @property
    def num_candidates(self) -> int:
        """K."""
        return len(self.row)

    @cached_property
    def request_index(self) -> np.ndarray:
        """int64 [K]: which request (0 to R - 1) owns each candidate."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.offsets))

    @cached_property
    def user(self) -> np.ndarray | None:
        """int64 [R]: the users numbered from 0 in order of their first request."""
        if self.user_id is None:
            return None
        return self.user_id.dictionary_encode().indices.to_numpy().astype(np.int64)

    @property
    def num_users(self) -> int | None:
        """How many users asked; None where they are not known."""
        return None if self.user is None else int(self.user.max(initial=-1)) + 1

    @property
    def day(self) -> np.ndarray:
        """datetime64[D] [R]: UTC day of each request."""
        return self.timestamp.astype("datetime64[us]").astype("datetime64[D]")

    @property
    def candidate_weight(self) -> np.ndarray | None:
        """float64 [K]: the request's weight at each candidate."""
        return None if self.weight is None else self.weight[self.request_index]

    @property
    def candidate_timestamp(self) -> np.ndarray:
        """int64 [K]: the request's timestamp at each candidate."""
        return self.timestamp[self.request_index]


def empty(actions: Sequence[str]) -> Scored:
    """No request at all: what a hold-out without requests scores to."""
    width = len(actions)
    return Scored(
        actions=list(actions),
        request_id=np.empty(0, np.int64),
        timestamp=np.empty(0, np.int64),
        offsets=np.zeros(1, np.int64),
        row=np.empty(0, np.int64),
        labels=np.empty((0, width), np.int8),
        logits=np.empty((0, width), np.float32),
        oracle=None,
    )


def from_batch(actions: Sequence[str], batch: ScorableBatch, logits: Any) -> Scored:
    """Flattens a batch and its logits (tensors on any device, or arrays) to valid candidates.

    Args:
        actions: The A heads, in the order of the last axis.
        batch: B requests with at most C candidates.
        logits: [B, C, A], float of any width.
    """
    mask = _array(batch.candidate_mask).astype(bool)
    oracle, weight = batch.oracle, batch.weight
    return Scored(
        actions=list(actions),
        request_id=_array(batch.request_id).astype(np.int64),
        timestamp=_array(batch.timestamp).astype(np.int64),
        offsets=np.concatenate(([0], np.cumsum(mask.sum(axis=1)))).astype(np.int64),
        row=_array(batch.candidate_row)[mask].astype(np.int64),
        labels=_array(batch.labels)[mask].astype(np.int8),
        logits=_array(logits, as_float=True)[mask].astype(np.float32),
        oracle=None if oracle is None else _array(oracle)[mask].astype(np.float32),
        history_length=(_array(batch.history_row) != 0).sum(axis=1),
        context=_array(batch.context).astype(np.int64),
        weight=None if weight is None else _array(weight).astype(np.float64),
    )


def concat(parts: Sequence[Scored]) -> Scored:
    """Joins scored batches in order.

    Raises:
        DataError: No part, or parts that do not share actions and the presence of an oracle.
    """
    if not parts:
        raise DataError("no request was scored", "use a hold-out that holds requests")
    first = parts[0]
    for part in parts:
        if part.actions != first.actions or (part.oracle is None) != (first.oracle is None):
            raise DataError(
                "scored batches differ in their actions or in holding an oracle",
                "score them with one model on one dataset",
            )
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    oracles = [part.oracle for part in parts if part.oracle is not None]

    def joined(name: str) -> np.ndarray | None:
        known = [getattr(part, name) for part in parts if part.num_requests]
        return np.concatenate(known) if known and all(v is not None for v in known) else None

    return Scored(
        actions=first.actions,
        request_id=np.concatenate([part.request_id for part in parts]),
        timestamp=np.concatenate([part.timestamp for part in parts]),
        offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        row=np.concatenate([part.row for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        logits=np.concatenate([part.logits for part in parts]),
        oracle=np.concatenate(oracles) if oracles else None,
        history_length=joined("history_length"),
        context=joined("context"),
        weight=joined("weight"),
    )


def _array(values: Any, *, as_float: bool = False) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # NumPy has no bfloat16.
        values = values.float() if as_float else values
    return np.asarray(values)
