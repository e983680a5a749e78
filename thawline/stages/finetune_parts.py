"""What fine-tuning in one process and in several have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thawline.config import Config
from thawline.data.content import read_content
from thawline.data.manifest import Dataset
from thawline.evaluation.holdouts import all_metrics
from thawline.model.bundle import Bundle, save_bundle
from thawline.model.ranker import Ranker
from thawline.stages.id_tables import RunTable
from thawline.tables import LocalTable
from thawline.tables.optimizers import Sgd
from thawline.tracking.run import Run
from thawline.training.forward import make_forward
from thawline.training.loop import Accumulated


def accumulated_of(config: Config) -> Accumulated:
    """How micro-batches add up."""
    own = config.finetune.accumulation
    return Accumulated(own.micro_batches, own.tables == "fused", own.table_factor)


def trainer_options(config: Config, ranker: Ranker, device: str) -> dict[str, Any]:
    """The arguments of a `Trainer` that the config decides."""
    settings = config.finetune
    return {
        "learning_rate": settings.learning_rate,
        "learning_rates": {
            name: own.learning_rate
            for name, own in settings.schedule.items()
            if own.learning_rate is not None
        },
        "clip_norm": settings.clip_norm,
        "staleness": settings.staleness,
        "accumulated": accumulated_of(config),
        "forward": make_forward(
            ranker,
            compiled=settings.compile,
            bfloat16=settings.autocast == "bfloat16",
            device=device,
        ),
        "device": device,
    }


def content_table(data: Dataset, device: str) -> LocalTable:
    """The items' content vectors, which never train."""
    return LocalTable(
        torch.from_numpy(read_content(data)).to(device), optimizer=Sgd(), trainable=False
    )


def table_weights(tables: Mapping[str, RunTable], content: LocalTable | None) -> dict[str, Tensor]:
    """What a model keeps of each table, `[N, d]`, and the content vectors."""
    weights = {name: own.rows() for name, own in tables.items()}
    return weights | ({"content": content.weight} if content is not None else {})


def epoch_metrics(config: Config, data: Dataset, trained: Bundle) -> dict[str, Any]:
    """The metrics of each hold-out, of as many requests as an epoch's end is worth."""
    limit = config.evaluation.epoch_requests
    if not limit:
        return {}
    trained.ranker.eval()
    return all_metrics(config, data, trained.score, limit=limit)


def logged(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """What MLflow gets of an entry of `epochs.json`."""
    return {
        "train": epoch["losses"],
        "seconds": epoch["seconds"],
        "waiting_share": epoch["waiting"] / epoch["seconds"],
        "trained_share": epoch["trained"],
        "phases": epoch["phases"],
        "drift": epoch["drift"],
        **epoch["metrics"],
    }


def write_model(
    folder: Path,
    tracked: Run,
    config: Config,
    data: Dataset,
    trained: Bundle,
    item: RunTable,
    epochs: list[dict[str, Any]],
    *,
    exported: int,
    described: Mapping[str, Any],
) -> None:
    """Writes what the model folder holds, and logs what MLflow shows of it.

    Where cold rows are to be moved, they are, and the entry of the exported epoch gets `repaired`.

    Args:
        folder: Empty.
        tracked: The stage's run.
        config: Its `finetune.cold_rows` is used.
        data: What was trained on.
        trained: The model after the exported epoch.
        item: The item table of the run.
        epochs: What is known of each epoch.
        exported: The epoch, from 1 on.
        described: What trained when.
    """
    meta = trained.meta.model_copy(update={"exported_epoch": exported})
    trained = replace(trained, meta=meta)
    if config.finetune.cold_rows != "keep":
        item.repair(trained.weights["item"], config.finetune.cold_rows)
        repaired = epoch_metrics(config, data, trained)
        epochs[exported - 1]["repaired"] = repaired
        tracked.log_metrics({"repaired": repaired}, step=exported)
    save_bundle(folder, trained, data.root / "catalog.parquet")
    for name, facts in (("epochs", epochs), ("schedule", described)):
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        tracked.log_artifact(folder / f"{name}.json")
