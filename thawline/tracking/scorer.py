"""Scores requests in raw ids: Arrow columns in, probabilities out.

`served` puts it behind MLflow, one DataFrame at a time; `stages.score` feeds it from files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from thawline.data.batches import WIDTH_MULTIPLE, Batch
from thawline.data.ids import MISSING, hash_ids
from thawline.data.ragged import Ragged
from thawline.model.bundle import Bundle
from thawline.tracking.ids import ItemIndex
from thawline.tracking.raw import DEFAULT_AGE_HOURS, Problem, Requests, offsets_of

REQUESTS_AT_ONCE = 128
CANDIDATES_AT_ONCE = 4_096
"""Bounds the memory of a batch of any size; a request with more candidates is cut in pieces. What
fits in a core's cache goes fastest."""
FEW = 64
"""Up to so many requests are batched whatever the lengths of their histories: a call costs more
than padding does."""


@dataclass(frozen=True)
class Scores:
    """The probabilities of all candidates, one request after the other."""

    offsets: np.ndarray
    """int64 [n + 1]: where each request's candidates start."""
    probabilities: np.ndarray
    """float64 [offsets[-1], A]."""
    unknown_history: np.ndarray
    """int64 [n]: items of the part of the history that is read which have no row of their own."""
    unknown_candidates: np.ndarray
    """int64 [n]: candidates which have no row of their own."""
    counts: Counter[str]
    """What was scored, and how much of it the model does not know."""


class Scorer:
    """A model and the index of its items."""

    def __init__(self, bundle: Bundle) -> None:
        """Sorts the item ids."""
        self.bundle = bundle
        self.items = ItemIndex(bundle.catalog.item_id, bundle.catalog.rows)
        self._vocabularies = {
            name: {value: code for code, value in enumerate(values, start=1)}
            for name, values in bundle.meta.context.items()
        }

    @property
    def text_columns(self) -> list[str]:
        """Names in `Requests.texts` that the model reads."""
        tables = self.bundle.meta.tables.values()
        ids = [table.column for table in tables if table.of == "request"]
        return list(dict.fromkeys([*self.bundle.meta.context, *ids]))

    def problems(self, requests: Requests) -> Iterator[Problem]:
        """The requests that cannot be scored, by kind of problem and then in order."""
        lengths = requests.history.lengths
        for name, beside in (("history_action", requests.actions), ("history_age", requests.ages)):
            if beside is None:
                continue
            for row in np.flatnonzero(beside.lengths != lengths).tolist():
                yield Problem(
                    row,
                    name,
                    f"the lists of {name} ({beside.lengths[row]} long) and history "
                    f"({lengths[row]}) differ",
                    f"give one value of {name} for each item of history, or leave the column out",
                )
        if requests.actions is None:
            return
        names = self.bundle.meta.actions
        masks = _filled(requests.actions.values, 0)
        wrong = np.flatnonzero((masks < 0) | (masks >= 1 << len(names)))
        rows = np.searchsorted(requests.actions.offsets, wrong, side="right") - 1
        for row, place in zip(rows.tolist(), wrong.tolist(), strict=True):
            yield Problem(
                row,
                "history_action",
                f"the column history_action holds {masks[place]}",
                f"give sums of {', '.join(f'{1 << a} ({n})' for a, n in enumerate(names))}",
            )

    def score(self, requests: Requests) -> Scores:
        """Scores requests without problems, in batches of bounded size."""
        bundle, count = self.bundle, len(requests)
        counts: Counter[str] = Counter(requests=count)
        history, unknown_history = self._histories(requests)
        offsets = requests.candidates.offsets
        rows = self.items.rows(requests.candidates.values)
        unknown = self.items.without_row(rows)
        context = self._context(requests, counts)
        ids = self._ids(requests, counts)
        chosen_of, candidates = _pieces(offsets, rows)
        probabilities = np.empty((len(rows), len(bundle.meta.actions)))
        for chosen in _batches(candidates.lengths, history.lengths[chosen_of]):
            requested = chosen_of[chosen]
            padded = candidates.padded(chosen)
            mask = candidates.mask(chosen, padded["row"].shape[1])
            batch = self._batch(history, requested, padded["row"], mask, context, ids)
            logits = bundle.score(batch).double().sigmoid().cpu().numpy()
            probabilities[padded["place"][mask]] = logits[mask]
        scores = Scores(offsets, probabilities, unknown_history, _sums(unknown, offsets), counts)
        counts["candidates"] = len(rows)
        counts["unknown_candidates"] = int(scores.unknown_candidates.sum())
        counts["history"] = int(history.lengths.sum())
        counts["unknown_history"] = int(unknown_history.sum())
        return scores

    def _histories(self, requests: Requests) -> tuple[Ragged, np.ndarray]:
        """The newest items of each history, and how many of them have no row of their own."""
        meta, whole = self.bundle.meta, requests.history
        lengths = np.minimum(whole.lengths, meta.history_length)
        offsets = offsets_of(lengths)
        kept = None
        if offsets[-1] < whole.offsets[-1]:
            starts = whole.offsets[1:] - lengths - offsets[:-1]
            kept = pa.array(np.repeat(starts, lengths) + np.arange(offsets[-1]))

        def newest(values: pa.Array) -> pa.Array:
            return values if kept is None else values.take(kept)

        rows = self.items.rows(newest(whole.values))
        every = 1 << len(meta.actions)
        actions = np.full(len(rows), every >> 1)
        if requests.actions is not None:
            given = _filled(newest(requests.actions.values), 0)
            actions = np.where(given > 0, given, every >> 1)
        ages = np.full(len(rows), DEFAULT_AGE_HOURS, np.float32)
        if requests.ages is not None:
            hours = _filled(newest(requests.ages.values), np.nan)
            known = np.isfinite(hours)
            ages = np.where(known, np.maximum(hours, 0.0), DEFAULT_AGE_HOURS).astype(np.float32)
        values = {"row": rows, "action": actions, "age": ages}
        unknown = _sums(self.items.without_row(rows), offsets)
        return Ragged(offsets[:-1], lengths, values), unknown

    def _context(self, requests: Requests, counts: Counter[str]) -> np.ndarray:
        """The codes int64 [n, K] of the context's values."""
        codes = np.zeros((len(requests), len(self._vocabularies)), np.int64)
        for column, (name, known) in enumerate(self._vocabularies.items()):
            if name in requests.texts:
                values = requests.texts[name].to_pylist()
                codes[:, column] = [known.get(value, 0) for value in values]
                unknown = sum(value is not None and value not in known for value in values)
                counts[f"unknown_{name}"] += unknown
        return codes

    def _ids(self, requests: Requests, counts: Counter[str]) -> dict[str, np.ndarray]:
        """The rows int64 [n] of the requests' ids by table; of items' ids, those by catalog row."""
        bundle, rows = self.bundle, {}
        for name, table in bundle.meta.tables.items():
            if table.of == "item":
                rows[name] = bundle.ids.of_items[name].numpy()
            elif table.column in requests.texts:
                hashes = hash_ids(requests.texts[table.column])
                rows[name] = bundle.ids.rows(name, table, hashes)
                unknown = (rows[name] == 0) & (hashes != MISSING)
                counts[f"unknown_{name}"] += int(unknown.sum())
            else:
                rows[name] = np.zeros(len(requests), np.int64)
        return rows

    def _batch(
        self,
        history: Ragged,
        requests: np.ndarray,
        rows: np.ndarray,
        mask: np.ndarray,
        context_codes: np.ndarray,
        ids: Mapping[str, np.ndarray],
    ) -> Batch:
        padded = history.padded(requests, multiple=WIDTH_MULTIPLE, least=WIDTH_MULTIPLE)
        none = torch.zeros(len(requests), dtype=torch.int64)
        tables = self.bundle.meta.tables
        return Batch(
            request_id=none,
            timestamp=none,
            history_row=torch.from_numpy(padded["row"]),
            history_action=torch.from_numpy(padded["action"]),
            history_age=torch.from_numpy(padded["age"]),
            candidate_row=torch.from_numpy(rows),
            candidate_log_q=torch.zeros(rows.shape),
            candidate_mask=torch.from_numpy(mask),
            labels=torch.zeros((*rows.shape, len(self.bundle.meta.actions))),
            context=torch.from_numpy(context_codes[requests]),
            oracle=None,
            ids={
                name: torch.from_numpy(own[rows if tables[name].of == "item" else requests])
                for name, own in ids.items()
            },
        )


def _filled(values: pa.Array, missing: float) -> np.ndarray:
    """An array of numbers without nulls."""
    filled = values.fill_null(missing) if values.null_count else values
    return filled.to_numpy(zero_copy_only=False)


def _sums(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How many of each request's flags are set: int64 [n]."""
    return np.diff(offsets_of(flags)[offsets])


def _pieces(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, Ragged]:
    """Each request's candidates in pieces of at most `CANDIDATES_AT_ONCE`.

    Args:
        offsets: int64 [n + 1]: where each request's candidates start.
        rows: int64 [offsets[-1]].

    Returns:
        The request of each piece, and the pieces: `row`, and its `place` among `rows`.
    """
    counts = -(-np.diff(offsets) // CANDIDATES_AT_ONCE)
    requests = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[requests] + piece * CANDIDATES_AT_ONCE
    lengths = np.minimum(offsets[requests + 1] - starts, CANDIDATES_AT_ONCE)
    return requests, Ragged(starts, lengths, {"row": rows, "place": np.arange(len(rows))})


def _batches(lengths: np.ndarray, histories: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of pieces in batches of bounded size, with little padding.

    Args:
        lengths: int64 [n]: candidates of each piece.
        histories: int64 [n]: items of its history.

    Yields:
        int64 [m]: pieces whose histories are padded to one width, unless they are few.
    """
    widths = -(-histories // WIDTH_MULTIPLE) * (len(lengths) > FEW)
    order = np.lexsort((-lengths, -widths))
    ends = np.r_[np.flatnonzero(np.diff(widths[order])) + 1, len(order)]
    start = 0
    for end in ends.tolist():
        while start < end:
            size = max(1, CANDIDATES_AT_ONCE // int(lengths[order[start]]))
            stop = min(start + min(REQUESTS_AT_ONCE, size), end)
            yield order[start:stop]
            start = stop
