"""The pretraining stage: a dataset in, a contrastive item table out."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from thawline.config import Config
from thawline.data.batches import SequenceReader, padded_width
from thawline.data.manifest import Dataset
from thawline.folders import whole_folder
from thawline.model.bundle import load_rows, save_table
from thawline.progress import progress_bar
from thawline.stages.machine import prepare_machine
from thawline.tables.local import LocalTable
from thawline.tables.memory import TableSize, require_memory
from thawline.tracking.fetch import REGISTERED, fetch_model
from thawline.tracking.runs import stage_run
from thawline.training.pretrain import Pretrainer

HELD_OUT_SEQUENCES = 2_000
"""Most held-out sequences that recall is measured on."""


def run(
    config: Config, dataset: str | Path, out: str | Path, *, parent_run_id: str = ""
) -> dict[str, Any]:
    """Pretrains the item table and writes the table folder `out`.

    The folder holds `item.safetensors`, `catalog.parquet` and `table.json`: the rows, which items
    they are of, and where they come from.

    Returns:
        What `table.json` holds: data_version, num_rows, dim and a list of epochs.
    """
    device = prepare_machine(config.runtime)
    data = Dataset.open(dataset)
    settings = config.pretrain
    with (
        stage_run(config, "pretrain", parent_run_id) as tracked,
        start_folder(config) as start,
        whole_folder(out) as folder,
    ):
        tracked.log_params(
            {"data_version": data.manifest.data_version, "seed": config.seed}
            | settings.model_dump(mode="json")
        )
        rows, dim = data.catalog.num_rows, config.model.dim
        size = TableSize(
            "item", rows, dim, torch.float32, optimizer="row-wise-adagrad", anchored=False
        )
        require_memory([size], device)
        if start is None:
            table = LocalTable.random(rows, dim, seed=config.seed)
        else:
            table = LocalTable(load_rows(start, data.catalog, dim, seed=config.seed))
        reader = SequenceReader(
            data,
            held_out=False,
            batch_size=settings.batch_size,
            seed=config.seed,
            group_by_length=settings.group_by_length,
            pin_memory=device == "cuda",
        )
        held_out = SequenceReader(
            data,
            held_out=True,
            batch_size=settings.batch_size,
            shuffle=False,
            limit=HELD_OUT_SEQUENCES,
            group_by_length=settings.group_by_length,
        )
        epochs = []
        with progress_bar("pretrain", settings.epochs * reader.num_batches) as show:
            pretrainer = Pretrainer(
                table,
                reader,
                held_out,
                model=config.model,
                settings=settings,
                max_length=padded_width(config.windows.sequence_length),
                seed=config.seed,
                device=device,
                on_step=lambda step, steps: show(step),
            )
            for summary in pretrainer.epochs():
                epoch = {
                    "epoch": summary.epoch,
                    "loss": summary.loss,
                    f"recall@{settings.recall_at}": summary.recall,
                    "seconds": summary.seconds,
                }
                epochs.append(epoch)
                tracked.log_metrics(epoch, step=summary.epoch + 1)
        facts = {
            "data_version": data.manifest.data_version,
            "num_rows": data.catalog.num_rows,
            "dim": config.model.dim,
            "epochs": epochs,
        }
        save_table(folder / "item.safetensors", table.weight)
        shutil.copyfile(data.root / "catalog.parquet", folder / "catalog.parquet")
        (folder / "table.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        tracked.log_artifact(folder / "table.json")
    return facts


@contextmanager
def start_folder(config: Config) -> Iterator[Path | None]:
    """The folder that `pretrain.start_from` names, brought here for the block if it is registered.

    None where nothing is named, or no version has the alias yet.
    """
    start = config.pretrain.start_from
    if start is None or not start.startswith(REGISTERED):
        yield None if start is None else Path(start)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = fetch_model(config, start, Path(folder))
        yield None if found is None else found.folder
