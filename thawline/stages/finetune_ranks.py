"""Fine-tuning in the processes of a job: sharded ID tables, split requests, one network.

Every process runs this; the first one alone evaluates, logs and writes the model folder, and the
others wait for it. There are no checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from thawline.config import Config
from thawline.data.audit import audited
from thawline.data.batches import RequestReader
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.errors import ConfigError
from thawline.folders import whole_folder
from thawline.model.bundle import Bundle, Meta, save_bundle
from thawline.model.ids import ModelIds
from thawline.progress import progress_bar
from thawline.stages.finetune_parts import (
    accumulated_of,
    content_table,
    epoch_metrics,
    logged,
    table_weights,
    trainer_options,
)
from thawline.stages.id_tables import RunTable, make_tables
from thawline.stages.machine import share_cores
from thawline.tracking.runs import Run, stage_run
from thawline.training.distributed import DenseSums, EvenReader, Ranks, padding_batch
from thawline.training.loop import Trainer
from thawline.training.profile import profiled
from thawline.training.recipes import make_schedule
from thawline.training.timeline import describe

if TYPE_CHECKING:
    from thawline.tables.sharded import ShardedTables


def run(
    config: Config,
    dataset: str | Path,
    table: str | Path,
    out: str | Path,
    ranks: Ranks,
    *,
    device: str,
    parent_run_id: str = "",
    profile: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Fine-tunes as `thawline.stages.finetune.run` does, and writes the same model folder.

    `finetune.batch_size` is a process's: a step trains on `ranks.size` times as many requests.

    Returns:
        What the folder's `epochs.json` holds; in processes other than the first, no metrics and no
        drift.

    Raises:
        ConfigError: A setting that sharded tables do not have; the message names it.
        DataError: An error of the dataset's audit that `audit.waive` does not name.
        TrainingError: No request to train on, a loss that is not finite, cold rows without warm
            ones to follow.
    """
    require_shardable(config)
    share_cores(config.runtime, ranks.local_size)
    settings = config.finetune
    data = Dataset.open(dataset)
    schedule = make_schedule(config, list(data.manifest.context))
    if ranks.leads:
        audited(config, data).require()
        Console(stderr=True).print(
            "finetune: sharded tables are not saved in checkpoints; a killed run starts anew",
            highlight=False,
            soft_wrap=True,
        )
    meta = Meta.of(data, config)
    tables = make_tables(config, data, Path(table), device)
    if settings.cold_rows != "keep":
        tables["item"].require_warm()
    sharded = shard(config, tables, ranks)
    tables = {name: replace(own, table=sharded.sharded[name]) for name, own in tables.items()}
    content = content_table(data, device) if meta.content_dim else None
    torch.manual_seed(config.seed)
    ranker = meta.make_ranker().to(device)
    ranks.share(ranker)
    torch.manual_seed(config.seed + ranks.rank)  # Dropout differs between processes.
    reader = EvenReader(
        make_reader(config, data, ranks, device),
        ranks,
        padding_batch(
            actions=len(meta.actions), context=len(meta.context), id_columns=config.tables.others
        ),
    )
    with (
        _tracked(config, ranks, parent_run_id) as tracked,
        _folder(out, ranks) as folder,
        _progress(settings.epochs * _steps(config, reader), ranks) as show,
        profiled(
            profile,
            settings.epochs,
            _steps(config, reader),
            device=device,
            suffix=f".rank-{ranks.rank}",
        ) as profile_step,
    ):
        if tracked is not None:
            tracked.log_params(
                {
                    "data_version": data.manifest.data_version,
                    "seed": config.seed,
                    "processes": ranks.size,
                }
                | settings.model_dump(mode="json")
                | {"tables": config.tables.model_dump(mode="json")}
            )

        def after_step(step: int, steps: int) -> None:
            show(step)
            profile_step(step)

        trainer = Trainer(
            ranker,
            {name: own.trained() for name, own in tables.items()},
            reader,
            schedule,
            content=content,
            group=sharded.beside,
            sums=DenseSums(ranks, sharded.settle),
            on_step=after_step,
            **trainer_options(config, ranker, device),
        )
        epochs: list[dict[str, Any]] = []
        ids = ModelIds.of(data, config.tables.others)
        for summary in trainer.epochs():
            trained = Bundle(meta, ranker, table_weights(tables, content), data.catalog, ids)
            facts = asdict(summary) | {"requests": reader.num_requests, "drift": {}, "metrics": {}}
            if tracked is not None:
                facts["metrics"] = epoch_metrics(config, data, trained)
                facts["drift"] = {
                    name: own.drift(trained.weights[name]) for name, own in tables.items()
                }
                tracked.log_metrics(logged(facts), step=summary.epoch + 1)
            epochs.append(facts)
            ranks.wait()
        if tracked is not None and folder is not None:
            if settings.cold_rows != "keep":
                tables["item"].repair(trained.weights["item"], settings.cold_rows)
                epochs[-1]["repaired"] = epoch_metrics(config, data, trained)
                tracked.log_metrics({"repaired": epochs[-1]["repaired"]}, step=len(epochs))
            save_bundle(folder, trained, data.root / "catalog.parquet")
            described = describe(schedule, trainer.components)
            for name, written in (("epochs", epochs), ("schedule", described)):
                (folder / f"{name}.json").write_text(json.dumps(written, indent=2), "utf-8")
                tracked.log_artifact(folder / f"{name}.json")
    ranks.wait()
    return epochs


def require_shardable(config: Config) -> None:
    """Sees to it that nothing is set that sharded tables do not have.

    Raises:
        ConfigError: Something is; the message names it.
    """
    unset = {"dtype": "float32", "weight_decay": 0, "pull": 0, "drift_cap": None}
    unset["frequency_scaling"] = 0
    wrong = [
        f"tables.{name}.{key}"
        for name, own in {"item": config.tables.item, **config.tables.others}.items()
        for key, value in unset.items()
        if getattr(own, key) != value
    ]
    if config.finetune.cross_fit:
        wrong.append("finetune.cross_fit")
    if config.finetune.export == "best":
        wrong.append("finetune.export=best")
    if wrong:
        raise ConfigError(
            f"sharded tables do not have {', '.join(wrong)}",
            "leave it out, or train in one process with tables.engine=local",
        )


def shard(config: Config, tables: Mapping[str, RunTable], ranks: Ranks) -> ShardedTables:
    """The tables of a run, split over the processes; collective."""
    from thawline.tables.sharded import ShardedTables, Shards

    settings = {"item": config.tables.item, **config.tables.others}
    return ShardedTables(
        {
            name: Shards(
                own.first,
                settings[name].optimizer,
                settings[name].learning_rate,
                trainable=False,
                padding_rows=own.table.padding_rows,
            )
            for name, own in tables.items()
        },
        group=ranks.tables,
        device=ranks.device,
    )


def make_reader(config: Config, data: Dataset, ranks: Ranks, device: str) -> RequestReader:
    """The requests of this process."""
    settings = config.finetune
    return RequestReader(
        data,
        "train",
        batch_size=settings.batch_size,
        seed=config.seed,
        sampler=(
            None
            if data.manifest.impressions
            else NegativeSampler(data, config.negatives, config.seed)
        ),
        prefetch=settings.prefetch_batches,
        shuffle_groups=settings.shuffle_groups,
        group_by_length=settings.group_by_length,
        pin_memory=device == "cuda",
        id_columns=config.tables.others,
        shard=ranks.shard,
    )


def _steps(config: Config, reader: EvenReader) -> int:
    return -(-reader.num_batches // accumulated_of(config).per_step)


def _tracked(config: Config, ranks: Ranks, parent: str) -> AbstractContextManager[Run | None]:
    return stage_run(config, "finetune", parent) if ranks.leads else nullcontext()


def _folder(out: str | Path, ranks: Ranks) -> AbstractContextManager[Path | None]:
    return whole_folder(out) if ranks.leads else nullcontext()


def _progress(steps: int, ranks: Ranks) -> AbstractContextManager[Callable[[int], None]]:
    return progress_bar("finetune", steps) if ranks.leads else nullcontext(lambda done: None)
