"""The fine-tuning stage: a dataset and a pretrained table in, a model folder out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thawline.config import Config, ItemTable
from thawline.data.audit import audited
from thawline.data.batches import RequestReader
from thawline.data.manifest import FIRST_ROW, Catalog, Dataset
from thawline.data.negatives import NegativeSampler
from thawline.evaluation.holdouts import all_metrics
from thawline.folders import whole_folder
from thawline.model.bundle import Bundle, Meta, load_rows, save_bundle
from thawline.progress import progress_bar
from thawline.stages.machine import prepare_machine
from thawline.tables import LocalTable, RowRules, make_optimizer
from thawline.tracking.runs import stage_run
from thawline.training.loop import EpochSummary, Trainer
from thawline.training.schedule import make_schedule


def run(
    config: Config,
    dataset: str | Path,
    table: str | Path,
    out: str | Path,
    *,
    parent_run_id: str = "",
) -> list[dict[str, Any]]:
    """Fine-tunes the ranker and the table by the recipe and writes the model folder `out`.

    `table` is a table folder, or a model folder whose rows are trained on. It may belong to another
    catalog: an item keeps its row, and new items start at random.

    Returns:
        What the folder's `epochs.json` holds: for each epoch its losses, times, the share of it in
        which the table trained, and the metrics of each hold-out.

    Raises:
        DataError: An error of the dataset's audit that `audit.waive` does not name.
    """
    device = prepare_machine(config.runtime)
    settings = config.finetune
    schedule = make_schedule(settings.recipe, settings.epochs)
    data = Dataset.open(dataset)
    # Hours before the evaluation would refuse it.
    audited(config, data).require()
    meta = Meta.of(
        data,
        config.model,
        recipe=settings.recipe,
        epochs=settings.epochs,
        seed=config.seed,
    )
    rows = load_rows(Path(table), data.catalog, config.model.dim, seed=config.seed)
    with (
        stage_run(config, "finetune", parent_run_id) as tracked,
        whole_folder(out) as folder,
    ):
        tracked.log_params(
            {"data_version": data.manifest.data_version, "seed": config.seed}
            | settings.model_dump(mode="json")
            | {"item_table": config.tables.item.model_dump(mode="json")}
        )
        torch.manual_seed(config.seed)
        ranker = meta.make_ranker().to(device)
        item_table = make_item_table(config.tables.item, rows.to(device), data.catalog)
        trained = Bundle(meta, ranker, item_table.weight, data.catalog)
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
        )
        epochs: list[dict[str, Any]] = []
        with progress_bar("finetune", settings.epochs * reader.num_batches) as show:
            trainer = Trainer(
                ranker,
                item_table,
                reader,
                schedule,
                learning_rate=settings.learning_rate,
                reset_state_at_thaw=config.tables.item.reset_state_at_thaw,
                clip_norm=settings.clip_norm,
                device=device,
                on_step=lambda step, steps: show(step),
            )
            for summary in trainer.epochs():
                metrics = _holdout_metrics(config, data, trained)
                epochs.append(asdict(summary) | {"metrics": metrics})
                tracked.log_metrics(_logged(summary) | metrics, step=summary.epoch + 1)
        save_bundle(folder, meta, ranker, item_table.weight, data.root / "catalog.parquet")
        (folder / "epochs.json").write_text(json.dumps(epochs, indent=2), encoding="utf-8")
        tracked.log_artifact(folder / "epochs.json")
    return epochs


def make_item_table(settings: ItemTable, rows: Tensor, catalog: Catalog) -> LocalTable:
    """The table of the item rows `[N, d]`, frozen; the rows as they are now are its anchor."""
    needs_anchor = settings.pull > 0 or settings.drift_cap is not None
    support = torch.zeros(len(rows), dtype=torch.int64)
    support[FIRST_ROW:] = torch.from_numpy(catalog.support.copy())
    return LocalTable(
        rows,
        optimizer=make_optimizer(settings.optimizer, len(rows), rows.shape[1], device=rows.device),
        rules=RowRules(
            weight_decay=settings.weight_decay,
            pull=settings.pull,
            drift_cap=settings.drift_cap,
            frequency_scaling=settings.frequency_scaling,
            anchor=rows.clone() if needs_anchor else None,
            support=support.to(rows.device),
        ),
        learning_rate=settings.learning_rate,
        trainable=False,
    )


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
        "table_trained_share": summary.item_share,
    }
