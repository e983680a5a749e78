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

With `params={"counts": True}`, `unknown_history` and `unknown_candidates` stand beside them: how
many items of each request the model does not know. `ServedRanker.counts` has the sums of all calls,
which go to the log `thawline.served` once a minute.

Reads safetensors, Parquet and JSON only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from thawline.errors import DataError
from thawline.model.bundle import Bundle
from thawline.tracking.raw import Lists, Requests, text_of
from thawline.tracking.scorer import Scorer

SECONDS_BETWEEN_LINES = 60.0

log = logging.getLogger("thawline.served")


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
        self.scorer = Scorer(self.bundle)
        self.counts: Counter[str] = Counter()
        self._logged = time.monotonic()
        self._lock = threading.Lock()

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Probabilities of each action (see the module's docstring for the columns).

        Raises:
            DataError: A column that is missing or holds something else; names column and row.
        """
        requests = self._requests(model_input)
        for problem in self.scorer.problems(requests):
            raise DataError(f"{problem.what} in row {problem.row}", problem.remedy)
        scores = self.scorer.score(requests)
        self._count(scores.counts)
        columns: dict[str, Any] = {
            action: _lists(scores.probabilities[:, column], scores.offsets)
            for column, action in enumerate(self.bundle.meta.actions)
        }
        if params and params.get("counts"):
            columns["unknown_history"] = scores.unknown_history
            columns["unknown_candidates"] = scores.unknown_candidates
        return pd.DataFrame(columns, index=model_input.index)

    def _requests(self, given: pd.DataFrame) -> Requests:
        for name in ("history", "candidates"):
            if name not in given:
                raise DataError(f"the column {name} is missing", "give history and candidates")
        ids = self.scorer.items.type
        beside = {"history_action": pa.int64(), "history_age": pa.float64()}
        lists = {
            name: _flatten(given[name], kind) for name, kind in beside.items() if name in given
        }
        return Requests(
            history=_flatten(given["history"], ids),
            candidates=_flatten(given["candidates"], ids),
            actions=lists.get("history_action"),
            ages=lists.get("history_age"),
            texts={
                name: pa.array([_text(value) for value in given[name]], pa.string())
                for name in self.scorer.text_columns
                if name in given
            },
        )

    def _count(self, counts: Counter[str]) -> None:
        with self._lock:
            self.counts += counts
            now = time.monotonic()
            if now - self._logged < SECONDS_BETWEEN_LINES:
                return
            self._logged = now
            line = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        log.warning("served since start: %s", line)


def _flatten(column: pd.Series, kind: pa.DataType) -> Lists:
    lists = [() if _absent(value) else value for value in column]
    try:
        return Lists.of(pa.array(lists, pa.list_(kind)))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the column {column.name} cannot be read as lists of {kind}: {error}",
            f"give a list of {kind} in each row",
        ) from error


def _lists(values: np.ndarray, offsets: np.ndarray) -> list[list[float]]:
    everything = values.tolist()
    return [everything[start:stop] for start, stop in pairwise(offsets.tolist())]


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value))


def _text(value: Any) -> str | None:
    return None if _absent(value) else text_of(value)


set_model(ServedRanker())
