"""Retrieval: where the items that a user took stand among the whole catalog.

The ranker's contrastive head is a two-tower model: a user's vector (`Ranker.user_vectors`) and the
items' rows after the adapter, compared by cosine. That is what is ranked here, not the ranking
head, which would have to score every item for every request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from thawline.data.batches import RequestReader
from thawline.data.manifest import FIRST_ROW, Dataset, Split
from thawline.evaluation.ranking import defined_mean
from thawline.model.bundle import Bundle

BATCH = 256
AT_ONCE = 1 << 21
"""Scores that are held at a time: 8 MiB, which a processor's cache holds."""


@dataclass(frozen=True)
class Queries:
    """Q requests, and what they are ranked by and against."""

    vectors: Tensor
    """float32 [Q, d], of length 1."""
    timestamp: Tensor
    """int64 [Q]: microseconds since 1970 UTC."""
    target: Tensor
    """int64 [T, 2]: request and row of each positive that the catalog knows."""
    known: Tensor
    """int64 [P, 2]: request and row of what is not ranked against: its history, its positives."""
    positives: np.ndarray
    """int64 [Q]: positives of each request, those that the catalog does not know included."""
    weight: np.ndarray | None = None
    """float64 [Q]; None: all count alike."""


@torch.inference_mode()
def retrieval_metrics(
    bundle: Bundle, dataset: Dataset, split: Split, *, requests: int, k: int
) -> dict[str, Any] | None:
    """Recall, NDCG and MRR over the catalog.

    Every positive of a request (of any action) is ranked among the rows that had been seen when
    the request came, without the user's history and the request's other positives. A tie costs half
    a place. A positive that the catalog does not know is missed.

    Args:
        bundle: The model.
        dataset: The one that it was trained on.
        split: The hold-out.
        requests: At most so many, evenly spread; those without a positive are passed over.
        k: Of recall and NDCG.

    Returns:
        `{"recall@k", "ndcg@k", "mrr", "k", "requests"}`, means over the requests with a positive;
        None without one, or where the contrastive loss had no weight, so that no user vector was
        trained.
    """
    if not bundle.meta.model.contrastive_weight or not requests:
        return None
    queries = _queries(bundle, dataset, split, requests)
    if queries is None:
        return None
    place = places(queries, bundle, torch.tensor(dataset.catalog.first_seen))
    request = queries.target[:, 0].cpu().numpy()
    return summary(queries.positives, request, place, k, queries.weight)


def summary(
    positives: np.ndarray,
    request: np.ndarray,
    place: np.ndarray,
    k: int,
    weight: np.ndarray | None = None,
) -> dict[str, Any] | None:
    """The figures from the places of the positives.

    Args:
        positives: int64 [Q]: positives of each request.
        request: int64 [T]: whose positives were ranked.
        place: float64 [T]: their places among all items, from 1 on.
        k: Of recall and NDCG.
        weight: float64 [Q]: of each request; None: all count alike.

    Returns:
        As `retrieval_metrics`.
    """
    some = positives > 0
    if not some.any():
        return None
    found = np.bincount(request, place <= k, len(positives))
    gain = np.bincount(request, np.where(place <= k, 1 / np.log2(place + 1), 0.0), len(positives))
    best = np.append(0.0, np.cumsum(1 / np.log2(np.arange(k) + 2.0)))[np.minimum(positives, k)]
    first = np.full(len(positives), np.inf)
    np.minimum.at(first, request, place)
    own = None if weight is None else weight[some]
    return {
        f"recall@{k}": defined_mean(found[some] / positives[some], own),
        f"ndcg@{k}": defined_mean(gain[some] / best[some], own),
        "mrr": defined_mean(1 / first[some], own),
        "k": k,
        "requests": int(some.sum()),
    }


def places(queries: Queries, bundle: Bundle, first_seen: Tensor) -> np.ndarray:
    """float64 [T]: the place of each target, from 1 on.

    Args:
        queries: The requests.
        bundle: Holds the items' rows.
        first_seen: int64 [N]: of the rows from `FIRST_ROW` on, microseconds since 1970 UTC.
    """
    request, row = queries.target.unbind(1)
    if not len(row):
        return np.empty(0)
    own = (queries.vectors[request] * _items(bundle, row)).sum(1)
    before = torch.zeros(len(row), dtype=torch.float64, device=own.device)
    seen = first_seen.to(own.device)
    earliest = queries.timestamp.min()
    one_each = torch.equal(request, torch.arange(len(queries.vectors), device=own.device))
    hidden = queries.known[queries.known[:, 1].argsort()]
    hidden_rows = hidden[:, 1].contiguous()
    width = max(1, AT_ONCE // max(len(row), len(queries.vectors)))
    for start in range(0, len(seen), width):
        part = slice(start, min(start + width, len(seen)))
        rows = torch.arange(part.start, part.stop, device=own.device) + FIRST_ROW
        scores = queries.vectors @ _items(bundle, rows).T
        late = (seen[part] > earliest).nonzero()[:, 0]
        if len(late):
            unseen = seen[part][late] > queries.timestamp[:, None]
            scores[:, late] = scores[:, late].masked_fill(unseen, -torch.inf)
        ends = torch.tensor([int(rows[0]), int(rows[-1]) + 1], device=own.device)
        low, high = torch.searchsorted(hidden_rows, ends).tolist()
        scores[hidden[low:high, 0], hidden_rows[low:high] - rows[0]] = -torch.inf
        against = scores if one_each else scores[request]
        above = torch.count_nonzero(against > own[:, None], dim=1)
        before += (above + torch.count_nonzero(against >= own[:, None], dim=1)) / 2
    return (1 + before + _own_positives(request, own)).cpu().numpy()


def _own_positives(request: Tensor, scores: Tensor) -> Tensor:
    """float64 [T]: positives of the same request before each, half for a tie."""
    before = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    # Targets come request by request, so others of the same one are a few places away.
    for away in range(1, len(scores)):
        same = request[away:] == request[:-away]
        if not same.any():
            break
        earlier, later = scores[:-away], scores[away:]
        tied = (earlier == later).double() / 2
        before[away:] += same * ((earlier > later).double() + tied)
        before[:-away] += same * ((later > earlier).double() + tied)
    return before


def _queries(bundle: Bundle, dataset: Dataset, split: Split, requests: int) -> Queries | None:
    device = bundle.weights["item"].device
    reader = RequestReader(
        dataset,
        split,
        batch_size=BATCH,
        sampler=None,
        shuffle=False,
        limit=requests,
        id_columns=bundle.meta.tables,
    )
    vectors, times, positives, weights = [], [], [], []
    targets: list[Tensor] = []
    known: list[Tensor] = []
    done = 0
    for on_host in reader.epoch(0):
        batch = on_host.to(device)
        embeddings = bundle.read(batch)
        vectors.append(functional.normalize(bundle.ranker.user_vectors(batch, embeddings), dim=-1))
        times.append(batch.timestamp)
        positive = (batch.labels > 0).any(-1) & batch.candidate_mask
        positives.append(positive.sum(1).cpu().numpy())
        if on_host.weight is not None:
            weights.append(on_host.weight.numpy())
        for chosen, rows, into in (
            (positive, batch.candidate_row, targets),
            (positive, batch.candidate_row, known),
            (batch.history_row >= FIRST_ROW, batch.history_row, known),
        ):
            own = chosen & (rows >= FIRST_ROW)
            into.append(torch.stack([own.nonzero()[:, 0] + done, rows[own]], dim=1))
        done += len(batch)
    if not done:
        return None
    return Queries(
        torch.cat(vectors).float(),
        torch.cat(times),
        torch.cat(targets),
        torch.cat(known),
        np.concatenate(positives),
        np.concatenate(weights) if weights else None,
    )


def _items(bundle: Bundle, rows: Tensor) -> Tensor:
    """float32 [n, d]: the items' vectors, of length 1."""
    vectors = bundle.ranker.adapter(bundle.weights["item"].index_select(0, rows).float())
    return functional.normalize(vectors, dim=-1)
