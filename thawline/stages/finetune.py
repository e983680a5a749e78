"""The fine-tuning stage: a dataset and a pretrained table in, a model folder out."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thawline.config import Config
from thawline.data.audit import audited
from thawline.data.batches import RequestReader
from thawline.data.examples import Examples
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.errors import ConfigError
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
from thawline.stages.id_tables import make_tables
from thawline.stages.machine import prepare_machine
from thawline.stages.resume import Keeper, Termination, best_epoch, resume, run_checkpoints
from thawline.stages.shared_epochs import begin, leave
from thawline.tracking.runs import stage_run
from thawline.training.cross_fit import CrossFitTrainer
from thawline.training.distributed import joined, require_one_table_copy
from thawline.training.loop import Trainer
from thawline.training.profile import profiled
from thawline.training.recipes import make_schedule
from thawline.training.timeline import describe


def run(
    config: Config,
    dataset: str | Path,
    table: str | Path,
    out: str | Path,
    *,
    parent_run_id: str = "",
    profile: str | Path | None = None,
    start: str | Path | None = None,
    until: int | None = None,
) -> list[dict[str, Any]]:
    """Fine-tunes the ranker and the ID tables by the schedule and writes the model folder `out`.

    `table` is a table folder, or a model folder whose rows are trained on. It may belong to another
    catalog: an item keeps its row, and new items start at random.

    A run that was killed goes on from its last checkpoint (`finetune.checkpoint`) when it is called
    again with the same inputs, to the same bits. SIGTERM makes one after the present step.

    In the folder `profile`, if there is one, Chrome traces of some steps are left.

    Epochs at the start in which every ID table is frozen can be shared by runs that have them in
    common (`study.prefixes.signatures`): with `until` a run stops after so many epochs and leaves
    in `out` what others begin from with `start`, to the same bits as alone.

    Returns:
        What the folder's `epochs.json` holds: for each epoch its losses, times, the share of it in
        which each component trained, how far each table's rows have drifted, and the metrics of
        each hold-out; `shared` where it was taken over, with the times that it once took. Where
        cold rows are moved at the end, the exported epoch's `repaired` has the metrics after that.
        `schedule.json` beside it says what trained when.

    Raises:
        BusyError: Another process does the same.
        Terminated: After SIGTERM, if this is the main thread.
        DataError: An error of the dataset's audit that `audit.waive` does not name, or a checkpoint
            that cannot be read.
        TrainingError: No request to train on, a loss that is not finite, cold rows without warm
            ones to follow.
    """
    device = prepare_machine(config.runtime)
    with joined(device, alone=config.tables.engine in ("sharded", "torchrec")) as ranks:
        require_one_table_copy(config.tables.engine, ranks)
        if ranks is not None and config.tables.engine != "local":
            if start is not None or until is not None:
                raise ConfigError(
                    "epochs cannot be shared where several processes hold the ID tables",
                    "set study.share_prefix to false",
                )
            from thawline.stages.finetune_ranks import run as run_together

            return run_together(
                config,
                dataset,
                table,
                out,
                ranks,
                device=device,
                parent_run_id=parent_run_id,
                profile=profile,
            )
    settings, last = config.finetune, until or config.finetune.epochs
    data = Dataset.open(dataset)
    schedule = make_schedule(config, list(data.manifest.context))
    # Hours before the evaluation would refuse it.
    audited(config, data).require()
    meta = Meta.of(data, config)
    tables = make_tables(config, data, Path(table), device)
    if settings.cold_rows != "keep" and until is None:
        tables["item"].require_warm()
    with (
        stage_run(config, "finetune", parent_run_id) as tracked,
        run_checkpoints(config, data, Path(table), Path(out), until=until) as checkpoints,
        whole_folder(out) as folder,
    ):
        tracked.log_params(
            {"data_version": data.manifest.data_version, "seed": config.seed}
            | settings.model_dump(mode="json")
            | {"tables": config.tables.model_dump(mode="json")}
        )
        torch.manual_seed(config.seed)
        ranker = meta.make_ranker().to(device)
        content = content_table(data, device) if meta.content_dim else None
        ids = ModelIds.of(data, config.tables.others)
        trained = Bundle(meta, ranker, table_weights(tables, content), data.catalog, ids)
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
            examples=Examples(settings.examples, settings.epochs),
            pin_memory=device == "cuda",
            id_columns=config.tables.others,
        )
        steps = -(-reader.num_batches // accumulated_of(config).per_step)
        with (
            progress_bar("finetune", last * steps) as show,
            profiled(profile, last, steps, device=device) as profile_step,
        ):
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
                content=content,
                **trainer_options(config, ranker, device),
            )
            keep_best = settings.export == "best"
            begun = None
            if start is not None:
                begun = begin(Path(start), trainer, checkpoints, keep_best=keep_best)
            epochs = resume(trainer, checkpoints) if begun is None else begun
            for epoch in epochs:
                tracked.log_metrics(logged(epoch), step=epoch["epoch"] + 1)
            termination = Termination()
            keeper = Keeper(
                trainer,
                checkpoints,
                termination,
                every_steps=settings.checkpoint.every_steps,
                epochs=epochs,
            )
            keeper.best = best_epoch(config, epochs, meta.actions)

            def after_step(step: int, steps: int) -> None:
                show(step)
                profile_step(step)
                keeper.after_step()

            trainer.on_step = after_step
            for summary in termination.deferring(trainer.epochs()):
                trained = replace(trained, weights=table_weights(tables, content))
                metrics = epoch_metrics(config, data, trained)
                drift = {name: own.drift() for name, own in tables.items()}
                epochs.append(asdict(summary) | {"drift": drift, "metrics": metrics})
                tracked.log_metrics(logged(epochs[-1]), step=summary.epoch + 1)
                keeper.best = best_epoch(config, epochs, meta.actions)
                if len(epochs) == until:
                    break
        if until is not None:
            best = keeper.best if keep_best else None
            leave(folder, trainer, checkpoints, epochs, best=best)
            return epochs
        exported = keeper.export(settings.export)
        trained = replace(trained, weights=table_weights(tables, content))
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
    return epochs
