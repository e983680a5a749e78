"""How fine-tuning survives being stopped: its checkpoints, and SIGTERM."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from thawline import __version__, logs
from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.sources import fingerprints
from thawline.data.storage import is_remote
from thawline.errors import BusyError, ConfigError, DataError, TrainingError
from thawline.evaluation.gate import primary_figures
from thawline.folders import locked_folder
from thawline.tracking.runs import Terminated
from thawline.training.checkpoint import Checkpoints
from thawline.training.distributed import Ranks
from thawline.training.loop import EpochSummary, Trainer
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

    def deferring(self, epochs: Iterator[EpochSummary]) -> Iterator[EpochSummary]:
        """The same epochs; SIGTERM waits while they train, and not while they are evaluated.

        Raises:
            Terminated: See `deferred`.
        """
        while True:
            with self.deferred():
                summary = next(epochs, None)
            if summary is None:
                return
            yield summary

    def obey(self) -> None:
        """Ends the process if SIGTERM came.

        Raises:
            Terminated: It came.
        """
        if self.requested:
            raise terminated()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True


def terminated() -> Terminated:
    """Ends the process with 143, as the shell has it."""
    return Terminated(128 + signal.SIGTERM)


class Keeper:
    """Saves a run where that is due, and stops it after SIGTERM."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        termination: Termination,
        *,
        every_steps: int,
        epochs: list[dict[str, Any]],
    ) -> None:
        """Remembers what to save.

        Args:
            trainer: Whose state.
            checkpoints: Where.
            termination: Asked for the end of the run, if the trainer is alone; a job's processes
                ask `trainer.sums`.
            every_steps: How often; 0: at the ends of epochs alone.
            epochs: What is written of each epoch that is complete; others append to it.
        """
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.termination = termination
        self.every_steps = every_steps
        self.epochs = epochs
        self.best: int | None = None
        """The best epoch so far, from 0 on: its checkpoint is kept."""

    def after_step(self) -> None:
        """Is to be called after each step.

        Raises:
            Terminated: SIGTERM has come to this process, or to another one of the job.
        """
        step, sums = self.trainer.step, self.trainer.sums
        stopping = self.termination.requested if sums is None else sums.stopping
        at_end = step % self.trainer.steps_per_epoch == 0
        if stopping or at_end or (self.every_steps and step % self.every_steps == 0):
            kept = None if self.best is None else self.best + 1
            self.checkpoints.save(self.trainer.state_dict(), self.epochs, best=kept)
        if stopping:
            raise terminated()

    def export(self, which: Literal["last", "best"]) -> int:
        """Brings the trainer to the end of the epoch that is to be exported.

        Returns:
            The epoch, from 1 on.

        Raises:
            DataError: Its checkpoint cannot be read.
        """
        last = self.trainer.schedule.epochs
        exported = last if which == "last" or self.best is None else self.best + 1
        if exported < last:
            self.trainer.load_state_dict(self.checkpoints.load(exported).state)
        return exported


@contextmanager
def run_checkpoints(
    config: Config,
    data: Dataset,
    table: Path,
    out: Path,
    *,
    until: int | None = None,
    ranks: Ranks | None = None,
    rows: Mapping[str, slice] | None = None,
) -> Iterator[Checkpoints]:
    """The checkpoints of a run with these inputs; they are removed when the block succeeds.

    Args:
        config: `finetune.checkpoint` says where they lie.
        data: What is trained on.
        table: The folder with the first rows.
        out: The model folder to come.
        until: The epochs after which the run stops, if it is not to reach its end.
        ranks: The processes of the job that trains, if it is one; collective then.
        rows: By ID table, the rows that this process holds of those that are split.

    Raises:
        ConfigError: A folder that the machines of a job do not share.
        BusyError: Another process trains from the same inputs with the same checkpoints.
        TrainingError: From the block, with the last checkpoint named.
    """
    settings, key = config.finetune.checkpoint, inputs_key(config, data, table)
    if until is not None:
        key = f"{key}-{until}"
    beside = out.absolute().with_name(f"{out.name}.checkpoints")
    place = settings.folder
    mirror = Mirror(f"{place.rstrip('/')}/{key}") if place and is_remote(place) else None
    root = beside if place is None or mirror else Path(place)
    checkpoints = Checkpoints(
        root / key,
        keep=settings.keep,
        mirror=mirror,
        ranks=ranks,
        rows={f"table/{name}": own for name, own in (rows or {}).items()},
    )
    leads = ranks is None or ranks.leads
    with ExitStack() as stack:
        with nullcontext() if ranks is None else ranks.agreed():
            if leads:
                stack.enter_context(locked_folder(checkpoints.folder))
        if ranks is not None and mirror is None:
            require_shared(checkpoints.folder, ranks)
        try:
            yield checkpoints
        except TrainingError as error:
            last = checkpoints.name_of_last()
            if last is None:
                raise
            raise TrainingError(
                f"{error.what}; the last good checkpoint is {last}", error.remedy
            ) from error
        if leads:
            checkpoints.clear()
        if leads and root == beside:
            _remove_given_up(root)


def _remove_given_up(root: Path) -> None:
    """Removes the checkpoints of runs with other inputs, but for those that are under way."""
    for folder in root.glob("*"):
        with suppress(BusyError), locked_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # Somebody is in it.
        root.rmdir()


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Sees to it that the processes of a job see one folder; collective.

    Raises:
        ConfigError: A process that does not; the others raise too.
    """
    probe = folder / ".shared"
    with ranks.agreed():
        if ranks.leads:
            probe.touch()
    with ranks.agreed():
        if not probe.exists():
            raise ConfigError(
                f"{folder} is not the same folder on all machines of the job",
                "set finetune.checkpoint.folder to a folder that they share, or to a URL",
            )
    if ranks.leads:
        probe.unlink()


def inputs_key(config: Config, data: Dataset, table: Path) -> str:
    """A name for all that decides what a run computes, where and in how many processes left out.

    Another version of Thawline may compute something else.
    """
    tree = config.model_dump(
        mode="json",
        include={"seed": True, "model": True, "tables": True, "negatives": True}
        | {"finetune": True, "evaluation": True, "windows": {"tiers"}, "gate": {"holdout"}},
    )
    for name in ("checkpoint", "export", "prefetch_batches"):
        del tree["finetune"][name]
    files = sorted(p for p in table.rglob("*") if p.suffix in (".safetensors", ".parquet"))
    names = [str(path.relative_to(table)) for path in files]
    inputs = [__version__, tree, data.manifest.data_version, names, fingerprints(files)]
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
    if checkpoints.ranks is not None and not checkpoints.ranks.leads:
        return found.epochs
    logs.say(f"finetune: goes on after step {trainer.step}, from {checkpoints.name_of_last()}")
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
