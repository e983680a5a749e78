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

TRAINING = "training"
"""In the place of a hold-out, with figures of the training: see `training_of`."""

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


def training_of(epochs: Sequence[Mapping[str, Any]], exported: int) -> dict[str, Any]:
    """What is kept of a run's training: of each epoch, and of the exported model (`final`).

    Both have figures as a metrics tree has them, by slice and action: `drift` of each ID table by
    tier, `seconds`, and `trained_share` of each component. The seconds and shares of `final` are
    those of the whole run, its drift is the exported epoch's.

    Args:
        epochs: `epochs.json`.
        exported: The epoch, from 1 on.
    """
    each = [
        _training(epoch.get("drift") or {}, epoch["seconds"], epoch["trained"]) for epoch in epochs
    ]
    shares = {
        name: sum(epoch["trained"].get(name, 0.0) for epoch in epochs) / len(epochs)
        for name in epochs[0]["trained"]
    }
    seconds = sum(epoch["seconds"] for epoch in epochs)
    final = _training(epochs[exported - 1].get("drift") or {}, seconds, shares)
    return {"epochs": each, "final": final}


def _training(
    drift: Mapping[str, Mapping[str, float]], seconds: float, shares: Mapping[str, float]
) -> dict[str, Any]:
    pooled: dict[str, dict[str, float]] = {"all": {"seconds": seconds}}
    tiers: dict[str, dict[str, dict[str, float]]] = {}
    for name, share in shares.items():
        pooled.setdefault(name, {})["trained_share"] = share
    for table, groups in drift.items():
        for group, value in groups.items():
            place = pooled if group == "pooled" else tiers.setdefault(group, {})
            place.setdefault(table, {})["drift"] = value
    return {"requests": None, "pooled": pooled, "tiers": tiers}


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
    # Trials of an earlier version have no figures of their training.
    training = result.get("training")
    for number, metrics in enumerate(result["epochs"]):
        if training:
            metrics = metrics | {TRAINING: training["epochs"][number]}
        yield from _figures(own | {"epoch": number + 1, "final": False}, metrics)
    metrics = result["metrics"]
    if training:
        metrics = metrics | {TRAINING: training["final"]}
    yield from _figures(own | {"epoch": result["exported_epoch"], "final": True}, metrics)


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
