"""The fine-tuning stage: a dataset and a pretrained table in, a model folder out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thawline.config import Config
from thawline.data.audit import audited
from thawline.data.batches import RequestReader
from thawline.data.content import read_content
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.evaluation.holdouts import all_metrics
from thawline.folders import whole_folder
from thawline.model.bundle import Bundle, Meta, save_bundle
from thawline.model.ids import ModelIds
from thawline.progress import progress_bar
from thawline.stages.id_tables import RunTable, make_tables
from thawline.stages.machine import prepare_machine
from thawline.tables import LocalTable
from thawline.tables.optimizers import Sgd
from thawline.tracking.runs import stage_run
from thawline.training.cross_fit import CrossFitTrainer
from thawline.training.loop import Accumulated, EpochSummary, Trainer
from thawline.training.recipes import make_schedule
from thawline.training.timeline import describe


def run(
    config: Config,
    dataset: str | Path,
    table: str | Path,
    out: str | Path,
    *,
    parent_run_id: str = "",
) -> list[dict[str, Any]]:
    """Fine-tunes the ranker and the ID tables by the schedule and writes the model folder `out`.

    `table` is a table folder, or a model folder whose rows are trained on. It may belong to another
    catalog: an item keeps its row, and new items start at random.

    Returns:
        What the folder's `epochs.json` holds: for each epoch its losses, times, the share of it in
        which each component trained, how far each table's rows have drifted, and the metrics of
        each hold-out. Where cold rows are moved at the end, the last epoch's `repaired` has the
        metrics after that. `schedule.json` beside it says what trained when.

    Raises:
        DataError: An error of the dataset's audit that `audit.waive` does not name.
        TrainingError: No request to train on, a loss that is not finite, cold rows without warm
            ones to follow.
    """
    device = prepare_machine(config.runtime)
    settings = config.finetune
    data = Dataset.open(dataset)
    schedule = make_schedule(config, list(data.manifest.context))
    # Hours before the evaluation would refuse it.
    audited(config, data).require()
    meta = Meta.of(data, config)
    tables = make_tables(config, data, Path(table), device)
    if settings.cold_rows != "keep":
        tables["item"].require_warm()
    with (
        stage_run(config, "finetune", parent_run_id) as tracked,
        whole_folder(out) as folder,
    ):
        tracked.log_params(
            {"data_version": data.manifest.data_version, "seed": config.seed}
            | settings.model_dump(mode="json")
            | {"tables": config.tables.model_dump(mode="json")}
        )
        torch.manual_seed(config.seed)
        ranker = meta.make_ranker().to(device)
        content = _content(data, device) if meta.content_dim else None
        ids = ModelIds.of(data, config.tables.others)
        trained = Bundle(meta, ranker, _weights(tables, content), data.catalog, ids)
        sampler = (
            None
            if data.manifest.impressions
            else NegativeSampler(data, config.negatives, config.seed)
        )
        reader = RequestReader(
            data,
            "train",
            batch_size=settings.batch_size,
            seed=config.seed,
            sampler=sampler,
            prefetch=settings.prefetch_batches,
            shuffle_groups=settings.shuffle_groups,
            group_by_length=settings.group_by_length,
            pin_memory=device == "cuda",
            id_columns=config.tables.others,
        )
        epochs: list[dict[str, Any]] = []
        accumulation = settings.accumulation
        accumulated = Accumulated(
            accumulation.micro_batches, accumulation.tables == "fused", accumulation.table_factor
        )
        steps = -(-reader.num_batches // accumulated.per_step)
        with progress_bar("finetune", settings.epochs * steps) as show:
            make_trainer = (
                partial(CrossFitTrainer, num_rows=data.catalog.num_rows)
                if settings.cross_fit
                else Trainer
            )
            trainer = make_trainer(
                ranker,
                {name: own.trained() for name, own in tables.items()},
                reader,
                schedule,
                learning_rate=settings.learning_rate,
                learning_rates={
                    name: own.learning_rate
                    for name, own in settings.schedule.items()
                    if own.learning_rate is not None
                },
                content=content,
                clip_norm=settings.clip_norm,
                staleness=settings.staleness,
                accumulated=accumulated,
                device=device,
                on_step=lambda step, steps: show(step),
            )
            for summary in trainer.epochs():
                trained = replace(trained, weights=_weights(tables, content))
                metrics = _holdout_metrics(config, data, trained)
                drift = {name: own.drift() for name, own in tables.items()}
                epochs.append(asdict(summary) | {"drift": drift, "metrics": metrics})
                tracked.log_metrics(
                    _logged(summary) | {"drift": drift} | metrics, step=summary.epoch + 1
                )
        if settings.cold_rows != "keep":
            tables["item"].repair(trained.weights["item"], settings.cold_rows)
            epochs[-1]["repaired"] = _holdout_metrics(config, data, trained)
            tracked.log_metrics({"repaired": epochs[-1]["repaired"]}, step=len(epochs))
        save_bundle(folder, trained, data.root / "catalog.parquet")
        described = describe(schedule, trainer.components)
        for name, facts in (("epochs", epochs), ("schedule", described)):
            (folder / f"{name}.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
            tracked.log_artifact(folder / f"{name}.json")
    return epochs


def _content(data: Dataset, device: str) -> LocalTable:
    """The items' content vectors, which never train."""
    return LocalTable(
        torch.from_numpy(read_content(data)).to(device), optimizer=Sgd(), trainable=False
    )


def _weights(tables: dict[str, RunTable], content: LocalTable | None) -> dict[str, Tensor]:
    weights = {name: own.rows() for name, own in tables.items()}
    return weights | ({"content": content.weight} if content is not None else {})


def _holdout_metrics(config: Config, data: Dataset, trained: Bundle) -> dict[str, Any]:
    limit = config.evaluation.epoch_requests
    if not limit:
        return {}
    trained.ranker.eval()
    return all_metrics(config, data, trained.score, limit=limit)


def _logged(summary: EpochSummary) -> dict[str, Any]:
    return {
        "train": summary.losses,
        "seconds": summary.seconds,
        "waiting_share": summary.waiting / summary.seconds,
        "trained_share": summary.trained,
        "phases": summary.phases,
    }
