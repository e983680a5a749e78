"""The served model, as MLflow's "model from code": this file travels with the model folder.

One row of the input is one request, in raw ids and raw values:

| column | holds | where absent |
|---|---|---|
| `history` | list of item ids, oldest first, any length; empty for a new user | an error |
| `candidates` | list of item ids to score, any number | an error |
| `history_action` | list of ints, beside `history`: bit `a` is `actions[a]` | the last action |
| `history_age` | list of hours between the event and the request | 24 hours |
| a context column | one value, compared as text with the training log's | missing |
| the column of an ID table `of: request` | one id, taken as text, such as `user_id` | missing |

Item ids have the type of the training log's, integer or string. An unknown or null id gets the
table's row for unknown items, an unknown context value the code for missing ones, an unknown id of
another table its row 0. What else belongs to an item (ids of other tables, content) comes with the
model. The output holds one column an action: the list of probabilities, in the order of
`candidates`.

Reads safetensors, Parquet and JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from thawline.data.batches import WIDTH_MULTIPLE, Batch
from thawline.data.ids import hash_ids
from thawline.data.ragged import Ragged
from thawline.errors import DataError
from thawline.model.bundle import Bundle
from thawline.tracking.ids import ItemIndex

DEFAULT_AGE_HOURS = 24.0
REQUESTS_AT_ONCE = 512
CANDIDATES_AT_ONCE = 16_384
"""Bounds the memory of a batch of any size; a request with more candidates is cut in pieces."""


class ServedRanker(PythonModel):
    """Scores the candidates of requests."""

    def load_context(self, context: Any) -> None:
        """Reads the model folder that was registered."""
        self.load(context.artifacts["model"])

    def load(self, folder: str | Path) -> None:
        """Reads a model folder.

        Raises:
            DataError: A missing, damaged or unfitting file.
        """
        self.bundle = Bundle.load(folder)
        self.items = ItemIndex(self.bundle.catalog.item_id, self.bundle.catalog.rows)

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Probabilities of each action (see the module's docstring for the columns).

        Raises:
            DataError: A column that is missing or holds something else; names column and row.
        """
        meta = self.bundle.meta
        history = self._histories(model_input)
        offsets, rows = self._items(model_input, "candidates")
        context_codes = self._context(model_input)
        ids = self._ids(model_input)
        requests, candidates = _pieces(offsets, rows)
        probabilities = np.empty((len(rows), len(meta.actions)))
        for chosen in _batches(candidates.lengths):
            padded = candidates.padded(chosen)
            mask = candidates.mask(chosen, padded["row"].shape[1])
            batch = self._batch(history, requests[chosen], padded["row"], mask, context_codes, ids)
            logits = self.bundle.score(batch)[torch.from_numpy(mask)]
            probabilities[padded["place"][mask]] = logits.double().sigmoid().numpy()
        return pd.DataFrame(
            {
                action: _lists(probabilities[:, column], offsets)
                for column, action in enumerate(meta.actions)
            },
            index=model_input.index,
        )

    def _histories(self, requests: pd.DataFrame) -> Ragged:
        meta = self.bundle.meta
        offsets, rows = self._items(requests, "history")
        actions = self._parallel(requests, "history_action", pa.int64(), offsets)
        ages = self._parallel(requests, "history_age", pa.float64(), offsets)
        known = actions.fill_null(0).to_numpy()
        allowed = 1 << len(meta.actions)
        wrong = np.flatnonzero((known < 0) | (known >= allowed))
        if len(wrong):
            row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            raise DataError(
                f"the column history_action holds {known[wrong[0]]} in row {row}",
                f"give sums of {', '.join(f'{1 << a} ({n})' for a, n in enumerate(meta.actions))}",
            )
        hours = ages.fill_null(np.nan).to_numpy()
        hours = np.where(np.isfinite(hours), np.maximum(hours, 0.0), DEFAULT_AGE_HOURS)
        lengths = np.minimum(np.diff(offsets), meta.history_length)
        return Ragged(
            offsets[1:] - lengths,
            lengths,
            {
                "row": rows,
                "action": np.where(known > 0, known, allowed >> 1),
                "age": hours.astype(np.float32),
            },
        )

    def _items(self, requests: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name not in requests:
            raise DataError(f"the column {name} is missing", "give history and candidates")
        offsets, ids = _flatten(requests[name], name, self.items.type)
        return offsets, self.items.rows(ids)

    def _parallel(
        self, requests: pd.DataFrame, name: str, kind: pa.DataType, offsets: np.ndarray
    ) -> pa.Array:
        if name not in requests:
            return pa.nulls(int(offsets[-1]), kind)
        own, values = _flatten(requests[name], name, kind)
        uneven = np.flatnonzero(np.diff(own) != np.diff(offsets))
        if len(uneven):
            row = int(uneven[0])
            raise DataError(
                f"the lists of {name} ({np.diff(own)[row]} long) and history "
                f"({np.diff(offsets)[row]}) differ in row {row}",
                f"give one value of {name} for each item of history, or leave the column out",
            )
        return values

    def _context(self, requests: pd.DataFrame) -> np.ndarray:
        columns = self.bundle.meta.context
        codes = np.zeros((len(requests), len(columns)), np.int64)
        for column, (name, vocabulary) in enumerate(columns.items()):
            if name in requests:
                values = pa.array([_text(value) for value in requests[name]], pa.string())
                places = pc.index_in(values, pa.array(vocabulary, pa.string()))
                codes[:, column] = places.fill_null(-1).to_numpy() + 1
        return codes

    def _ids(self, requests: pd.DataFrame) -> dict[str, np.ndarray]:
        """The rows int64 [n] of the requests' ids by table; of items' ids, those by catalog row."""
        bundle, rows = self.bundle, {}
        for name, table in bundle.meta.tables.items():
            if table.of == "item":
                rows[name] = bundle.ids.of_items[name].numpy()
            elif table.column in requests:
                texts = pa.array([_text(value) for value in requests[table.column]], pa.string())
                rows[name] = bundle.ids.rows(name, table, hash_ids(texts))
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


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of pieces of similar length, in batches of bounded size."""
    order = np.argsort(-lengths, kind="stable")
    done = 0
    while done < len(order):
        size = max(1, CANDIDATES_AT_ONCE // int(lengths[order[done]]))
        yield order[done : done + min(REQUESTS_AT_ONCE, size)]
        done += min(REQUESTS_AT_ONCE, size)


def _flatten(column: pd.Series, name: str, kind: pa.DataType) -> tuple[np.ndarray, pa.Array]:
    """The lists of a column as offsets `[n + 1]` and one array; no list counts as an empty one."""
    lists = [() if _absent(value) else value for value in column]
    try:
        array = pa.array(lists, pa.list_(kind))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the column {name} cannot be read as lists of {kind}: {error}",
            f"give a list of {kind} in each row",
        ) from error
    return array.offsets.to_numpy().astype(np.int64), array.values


def _lists(values: np.ndarray, offsets: np.ndarray) -> list[list[float]]:
    everything = values.tolist()
    return [everything[start:stop] for start, stop in pairwise(offsets.tolist())]


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value))


def _text(value: Any) -> str | None:
    # As DuckDB writes the training log's values: a column of integers with gaps becomes floats in
    # pandas, but its values are still 13, not 13.0.
    if _absent(value):
        return None
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


set_model(ServedRanker())
