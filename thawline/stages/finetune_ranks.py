"""Fine-tuning in the processes of a job: sharded ID tables, split requests, one network.

Every process runs this; the first one alone evaluates, logs and writes the model folder, and the
others wait for it. Each saves its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from thawline.config import Config
from thawline.config.shardable import require_shardable
from thawline.data.audit import audited
from thawline.data.batches import RequestReader
from thawline.data.examples import Examples
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.folders import whole_folder
from thawline.model.bundle import Bundle, Meta
from thawline.model.ids import ModelIds
from thawline.progress import progress_bar
from thawline.stages.finetune_parts import (
    accumulated_of,
    content_table,
    epoch_metrics,
    logged,
    table_weights,
    trainer_options,
    write_model,
)
from thawline.stages.id_tables import RunTable, make_tables, table_sizes
from thawline.stages.machine import share_cores
from thawline.stages.resume import Keeper, Termination, best_epoch, resume, run_checkpoints
from thawline.tables.memory import require_memory
from thawline.tables.parts import PartTables, Shards
from thawline.tables.split import SplitTables
from thawline.tracking.runs import Run, stage_run
from thawline.training.distributed import DenseSums, EvenReader, Ranks, padding_batch
from thawline.training.loop import Trainer
from thawline.training.profile import profiled
from thawline.training.recipes import make_schedule
from thawline.training.timeline import describe


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

    A job that was killed goes on to the same bits in as many processes; in another number of them
    it goes on from the same tables and network. SIGTERM in one process stops all after the same
    step.

    Returns:
        What the folder's `epochs.json` holds; in processes other than the first, no metrics and no
        drift of the epochs since the start.

    Raises:
        BusyError: Another job does the same.
        Terminated: After SIGTERM in any process.
        ConfigError: A setting that sharded tables do not have, named in the message, a folder for
            checkpoints that the machines do not share, or tables larger than the memory that is
            free for all processes of a machine.
        DataError: An error of the dataset's audit that `audit.waive` does not name, or a checkpoint
            that cannot be read.
        TrainingError: No request to train on, a loss that is not finite, cold rows without warm
            ones to follow.
    """
    require_shardable(config)
    share_cores(config.runtime, ranks.local_size)
    settings = config.finetune
    data = Dataset.open(dataset)
    schedule = make_schedule(config, list(data.manifest.context))
    with ranks.agreed():
        if ranks.leads:
            audited(config, data).require()
        # At the start each process has the whole tables; on GPUs each has a device of its own.
        beside = ranks.local_size if device == "cpu" else 1
        require_memory(table_sizes(config, data), device, processes=beside)
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
            actions=len(meta.actions),
            context=len(meta.context),
            id_columns=config.tables.others,
            weighted=data.manifest.weighted,
        ),
    )
    steps = settings.epochs * _steps(config, reader)
    with (
        _tracked(config, ranks, parent_run_id) as tracked,
        run_checkpoints(
            config,
            data,
            Path(table),
            Path(out),
            ranks=ranks,
            rows={name: own.own for name, own in sharded.sharded.items()},
        ) as checkpoints,
        _folder(out, ranks) as folder,
        _progress(steps, ranks) as show,
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
        sums, termination = DenseSums(ranks, sharded.settle), Termination()
        sums.asked_to_stop = lambda: termination.requested
        trainer = Trainer(
            ranker,
            {name: own.trained() for name, own in tables.items()},
            reader,
            schedule,
            content=content,
            group=sharded.beside,
            sums=sums,
            **trainer_options(config, ranker, device),
        )
        epochs = resume(trainer, checkpoints)
        if tracked is not None:
            for epoch in epochs:
                tracked.log_metrics(logged(epoch), step=epoch["epoch"] + 1)
        keeper = Keeper(
            trainer,
            checkpoints,
            termination,
            every_steps=settings.checkpoint.every_steps,
            epochs=epochs,
        )

        def after_step(step: int, steps: int) -> None:
            show(step)
            profile_step(step)
            keeper.after_step()

        def find_best() -> None:
            """What the first process knows, in all; collective."""
            with ranks.agreed():
                best = best_epoch(config, epochs, meta.actions) if ranks.leads else None
            found = ranks.first(-1 if best is None else best)
            keeper.best = None if found < 0 else found

        trainer.on_step = after_step
        ids = ModelIds.of(data, config.tables.others)
        find_best()
        for summary in termination.deferring(trainer.epochs()):
            trained = Bundle(meta, ranker, table_weights(tables, content), data.catalog, ids)
            facts = asdict(summary) | {"requests": reader.num_requests, "drift": {}, "metrics": {}}
            with ranks.agreed():
                if tracked is not None:
                    facts["metrics"] = epoch_metrics(config, data, trained)
                    facts["drift"] = {
                        name: own.drift(trained.weights[name]) for name, own in tables.items()
                    }
                    tracked.log_metrics(logged(facts), step=summary.epoch + 1)
            epochs.append(facts)
            find_best()
        exported = keeper.export(settings.export)
        trained = Bundle(meta, ranker, table_weights(tables, content), data.catalog, ids)
        with ranks.agreed():
            if tracked is not None and folder is not None:
                write_model(
                    folder,
                    tracked,
                    config,
                    data,
                    trained,
                    tables["item"],
                    epochs,
                    exported=exported,
                    described=describe(schedule, trainer.components, examples=settings.examples),
                )
    ranks.wait()
    return epochs


def shard(config: Config, tables: Mapping[str, RunTable], ranks: Ranks) -> PartTables:
    """The tables of a run, split over the processes, by TorchRec on GPUs; collective."""
    settings = {"item": config.tables.item, **config.tables.others}
    shards = {
        name: Shards(
            own.first,
            settings[name].optimizer,
            settings[name].learning_rate,
            trainable=False,
            padding_rows=own.table.padding_rows,
        )
        for name, own in tables.items()
    }
    if config.tables.engine == "torchrec" or ranks.device.type == "cuda":
        # TorchRec takes seconds to import.
        from thawline.tables.sharded import ShardedTables

        return ShardedTables(shards, group=ranks.tables, device=ranks.device)
    return SplitTables(shards, group=ranks.tables)


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
        examples=Examples(settings.examples, settings.epochs),
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
