"""The figures of trials as a tidy table: a row a trial, hold-out, action, slice, figure, epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.errors import DataError
from thawline.study.grid import ARM, as_text

TRIALS = "trials.parquet"
FACTS = "study.json"
"""Beside it: what was studied, and what became of each trial."""

SCHEMA = pa.schema(
    [
        ("trial", pa.string()),
        ("arm", pa.string()),
        ("seed", pa.int64()),
        ("round", pa.int64()),
        ("holdout", pa.string()),
        ("action", pa.string()),
        ("slice", pa.string()),
        ("figure", pa.string()),
        ("epoch", pa.int64()),
        ("final", pa.bool_()),
        ("requests", pa.int64()),
        ("value", pa.float64()),
    ]
)
"""`round` is the trial's number of epochs. `final` marks the evaluation of the exported model on
whole hold-outs; the other rows are what was scored after an epoch. A column of text for each
dimension of the study follows: the keys of the grid, and `NAMED` where arms have names."""

NAMED = "study.arms"
"""Column with the name of the arm in the config; `arm` has the grid's values in it as well."""

Result = Mapping[str, Any]
"""What `trial.json` holds."""


def tidy(results: Iterable[Result], keys: Sequence[str]) -> pa.Table:
    """The figures of all finished trials.

    Args:
        results: Those that failed have no rows.
        keys: The dimensions of the study.
    """
    schema = pa.schema([*SCHEMA, *((_column(key), pa.string()) for key in keys)])
    rows = [row for result in results if result["status"] == "finished" for row in _rows(result)]
    return pa.Table.from_pylist(rows, schema=schema)


def light(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a metrics tree."""
    return {key: tree[key] for key in ("requests", "pooled", "tiers")}


def write_study(folder: Path, facts: Mapping[str, Any], table: pa.Table) -> None:
    """Writes `study.json` and `trials.parquet`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{TRIALS}.partial"
    pq.write_table(table, partial)
    partial.rename(folder / TRIALS)
    partial = folder / f".{FACTS}.partial"
    partial.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    partial.rename(folder / FACTS)


def read_study(folder: Path) -> tuple[dict[str, Any], pa.Table]:
    """What `write_study` wrote.

    Raises:
        DataError: There is no study, or one that cannot be read.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return facts, pq.read_table(folder / TRIALS)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{folder} holds no study that can be read: {error}",
            f"name the folder of `thawline study --out`, which holds {FACTS} and {TRIALS}",
        ) from error


def _rows(result: Result) -> Iterator[dict[str, Any]]:
    own = {
        "trial": result["trial"],
        "arm": result["arm"],
        "seed": result["seed"],
        "round": result["round"],
        **{_column(key): as_text(value) for key, value in result["values"].items()},
    }
    for number, metrics in enumerate(result["epochs"], start=1):
        yield from _figures(own | {"epoch": number, "final": False}, metrics)
    yield from _figures(own | {"epoch": result["exported_epoch"], "final": True}, result["metrics"])


def _figures(own: dict[str, Any], metrics: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for holdout, tree in metrics.items():
        for piece, actions in {"pooled": tree["pooled"], **tree["tiers"]}.items():
            for action, figures in actions.items():
                for figure, value in figures.items():
                    yield own | {
                        "holdout": holdout,
                        "action": action,
                        "slice": piece,
                        "figure": figure,
                        "requests": tree["requests"],
                        "value": value,
                    }


def _column(dimension: str) -> str:
    return NAMED if dimension == ARM else dimension
