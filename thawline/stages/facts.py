"""What an artifact of a pipeline says of what is in it, for the UI and for searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thawline.config import Config
from thawline.evaluation.gate import primary_figures
from thawline.model.bundle import read_meta


def size_of(folder: str | Path) -> dict[str, int]:
    """How many files a folder holds, and their bytes."""
    sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def model_facts(
    config: Config, folder: str | Path, epochs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a fine-tuned model is made of, and the AUC of its primary action after the last epoch.

    Args:
        config: Of the stage.
        folder: A model folder.
        epochs: What its `epochs.json` holds.
    """
    meta = read_meta(Path(folder) / "model.json")
    facts: dict[str, Any] = {
        "data_version": meta.data_version,
        "recipe": meta.recipe,
        "epochs": len(epochs),
        "seed": meta.seed,
        "rows_item": meta.num_rows,
        **{f"rows_{name}": table.rows for name, table in meta.tables.items()},
        "dim": meta.model.dim,
        **size_of(folder),
    }
    metrics = epochs[-1].get("metrics", {}) if epochs else {}
    for holdout in metrics:
        gate = config.gate.model_copy(update={"holdout": holdout})
        auc = primary_figures(gate, metrics, meta.actions)["auc"]
        if auc is not None:
            facts[f"{holdout}_{meta.actions[0]}_auc"] = auc
    return facts
