"""How fine-tuning survives being stopped: its checkpoints, and SIGTERM."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.sources import fingerprints
from thawline.data.storage import is_remote
from thawline.errors import DataError, TrainingError
from thawline.evaluation.gate import primary_figures
from thawline.folders import locked_folder
from thawline.tracking.runs import Terminated
from thawline.training.checkpoint import Checkpoints
from thawline.training.loop import Trainer
from thawline.training.mirror import Mirror


class Termination:
    """SIGTERM, which waits for the end of a step."""

    def __init__(self) -> None:
        """Nothing was asked for yet."""
        self.requested = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Takes note of SIGTERM while the block runs, where that is in the main thread.

        Raises:
            Terminated: SIGTERM came, and the block went on to its end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        self.obey()

    def obey(self) -> None:
        """Ends the process with 143, as the shell has it, if SIGTERM came.

        Raises:
            Terminated: It came.
        """
        if self.requested:
            raise Terminated(128 + signal.SIGTERM)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def run_checkpoints(config: Config, data: Dataset, table: Path, out: Path) -> Iterator[Checkpoints]:
    """The checkpoints of a run with these inputs; they are removed when the block succeeds.

    Args:
        config: `finetune.checkpoint` says where they lie.
        data: What is trained on.
        table: The folder with the first rows.
        out: The model folder to come.

    Raises:
        BusyError: Another process trains from the same inputs with the same checkpoints.
        TrainingError: From the block, with the last checkpoint named.
    """
    settings, key = config.finetune.checkpoint, inputs_key(config, data, table)
    beside = out.absolute().with_name(f"{out.name}.checkpoints")
    place = settings.folder
    mirror = Mirror(f"{place.rstrip('/')}/{key}") if place and is_remote(place) else None
    root = beside if place is None or mirror else Path(place)
    checkpoints = Checkpoints(root / key, keep=settings.keep, mirror=mirror)
    with locked_folder(checkpoints.folder):
        try:
            yield checkpoints
        except TrainingError as error:
            last = checkpoints.name_of_last()
            if last is None:
                raise
            raise TrainingError(
                f"{error.what}; the last good checkpoint is {last}", error.remedy
            ) from error
        checkpoints.clear()
        if root == beside:
            # With those of runs that were given up.
            shutil.rmtree(root, ignore_errors=True)


def inputs_key(config: Config, data: Dataset, table: Path) -> str:
    """A name for all that decides what a run computes, where it runs left out."""
    tree = config.model_dump(
        mode="json",
        include={"seed": True, "model": True, "tables": True, "negatives": True}
        | {"finetune": True, "evaluation": True, "windows": {"tiers"}, "gate": {"holdout"}},
    )
    for name in ("checkpoint", "export", "prefetch_batches"):
        del tree["finetune"][name]
    files = sorted(p for p in table.rglob("*") if p.suffix in (".safetensors", ".parquet"))
    names = [str(path.relative_to(table)) for path in files]
    inputs = [tree, data.manifest.data_version, names, fingerprints(files)]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def resume(trainer: Trainer, checkpoints: Checkpoints) -> list[dict[str, Any]]:
    """Lets a trainer go on from the newest checkpoint, if there is one.

    Returns:
        What was written of the epochs that are complete.
    """
    found = checkpoints.load_last()
    if found is None:
        return []
    trainer.load_state_dict(found.state)
    Console(stderr=True).print(
        f"finetune: goes on after step {trainer.step}, from {checkpoints.name_of_last()}",
        highlight=False,
        soft_wrap=True,
    )
    return found.epochs


def best_epoch(
    config: Config, epochs: Sequence[Mapping[str, Any]], actions: Sequence[str]
) -> int | None:
    """The epoch, from 0 on, with the highest AUC of the primary action on `gate.holdout`.

    The first of equal ones; None where none has an AUC and the last epoch is to be exported.

    Raises:
        DataError: The best is to be exported, and there is none.
    """
    wanted, found = config.finetune.export == "best", dict[int, float]()
    for index, epoch in enumerate(epochs):
        if wanted or config.gate.holdout in epoch["metrics"]:
            auc = primary_figures(config.gate, epoch["metrics"], actions)["auc"]
            if auc is not None:
                found[index] = auc
    if wanted and epochs and not found:
        raise DataError(
            f"finetune.export is best, but {config.gate.holdout} has no AUC of {actions[0]}",
            "set finetune.export=last, or gate.holdout to the other hold-out",
        )
    return max(found, key=lambda index: found[index], default=None)
