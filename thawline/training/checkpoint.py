"""Checkpoints of a run: folders that appear whole or not at all. No pickle is written or read.

```
epoch-001.24000000/     epochs done, which no number of processes changes
  checkpoint.json       where the run stood, the parts of its state, the epochs so far
  state-0.safetensors   tensors as <part>/<name>: the first process's rows of the ID tables, its
                        generators and lookups in flight, and all that every process has alike
  state-1.safetensors   the next process's rows, generators and lookups, and so on
```
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from thawline.errors import DataError, TrainingError
from thawline.folders import disk_with_room
from thawline.model.files import save_tensors
from thawline.training.checkpoint_files import read_parts
from thawline.training.distributed import Ranks
from thawline.training.mirror import Mirror
from thawline.training.state import START, State, by_row

SCHEMA_VERSION = 2
FACTS = "checkpoint.json"
DIGITS = 8
"""Of an epoch's fraction, in names: two steps of an epoch never have the same."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    state: State
    epochs: list[dict[str, Any]]
    """What was written of the epochs that were complete."""


class Checkpoints:
    """The checkpoints of one run, oldest first; no two jobs may write them at once.

    In a job of several processes each has one of these, with the same folder. `save` and `load` are
    collective then, and succeed in all processes or in none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        mirror: Mirror | None = None,
        ranks: Ranks | None = None,
        rows: Mapping[str, slice] | None = None,
    ) -> None:
        """Finds what is there.

        Args:
            folder: Made when the first checkpoint is.
            keep: How many of the newest stay; 1 or more.
            mirror: A remote place that gets a copy of each, and from which those come that are
                not in `folder`. Only with it may `folder` be another one on each machine.
            ranks: The processes of the job; None: there is this one.
            rows: By part of the state, the rows that this process holds of a table that is split.
        """
        self.folder = folder
        self.keep = keep
        self.mirror = mirror
        self.ranks = ranks
        self.rows = rows or {}
        self._rank, self._size = (ranks.rank, ranks.size) if ranks else (0, 1)

    def saved(self) -> list[float]:
        """After how many epochs each was saved, in ascending order."""
        names = {own.name for own in self.folder.glob("epoch-*")}
        if self.mirror is not None:
            names.update(self.mirror.names(FACTS))
        found = (re.fullmatch(r"epoch-(\d+\.\d{8})", name) for name in names)
        return sorted(float(match[1]) for match in found if match)

    def name_of_last(self) -> str | None:
        """Where the newest one is; None where there is none."""
        saved = self.saved()
        if not saved:
            return None
        root = self.folder if self.mirror is None else self.mirror.url
        return f"{root}/{_name(saved[-1])}"

    def save(
        self, state: State, epochs: Sequence[Mapping[str, Any]], *, best: int | None = None
    ) -> None:
        """Writes a checkpoint, and removes those that need not be kept.

        Args:
            state: Of the trainer; nothing is written where its place was saved before.
            epochs: JSON values of the epochs that are complete; the first process's count.
            best: After how many epochs one was saved that is to be kept, however old; the first
                process's counts.

        Raises:
            TrainingError: Rows or parameters that are not finite.
            DataError: The disk is full, or the processes do not write into the same folder.
        """
        name = _name(state.facts["step"] / state.facts["steps_per_epoch"])
        if not self._by_first(lambda: name in map(_name, self.saved())):
            with self._agreed():
                _require_finite(state)
            with disk_with_room(
                self.folder, "free some and run it again: it goes on from the checkpoint before"
            ):
                self._write(name, state, epochs)
        with self._agreed():
            for old in self.saved()[: -self.keep] if self._leads else []:
                if old != best:
                    self._remove(_name(old))

    def load(self, epochs: float) -> Checkpoint:
        """Reads the checkpoint after so many epochs; its tensors are on the CPU.

        Raises:
            DataError: A missing or damaged file, or one of another version.
        """
        name, mirror = _name(epochs), self.mirror
        own = self.folder / name
        with self._agreed():
            if mirror is not None and self._leads_here and not _is_whole(own):
                mirror.get(name, self.folder)
        with self._agreed():
            if mirror is None or _is_whole(own):
                return self._read(own)
            return self._read(mirror.place(name, self.folder))

    def load_last(self) -> Checkpoint | None:
        """Reads the newest checkpoint, if there is one.

        Raises:
            DataError: See `load`.
        """
        # As an integer: a float might lose digits on its way.
        digits = self._by_first(lambda: round(10**DIGITS * max(self.saved(), default=0.0)))
        return self.load(digits / 10**DIGITS) if digits else None

    def clear(self) -> None:
        """Removes all of them; for the first process alone."""
        for epochs in self.saved():
            self._remove(_name(epochs))
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    @property
    def _leads_here(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.ranks is None or self.ranks.rank % self.ranks.local_size == 0

    def _agreed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ranks is None else self.ranks.agreed()

    def _by_first(self, find: Callable[[], int]) -> int:
        """What the first process finds; storage may show the others an older state."""
        with self._agreed():
            found = int(find()) if self._leads else 0
        return found if self.ranks is None else self.ranks.first(found)

    def _read(self, folder: Path) -> Checkpoint:
        try:
            tree = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            if tree["schema_version"] != SCHEMA_VERSION:
                raise DataError(
                    f"{folder} is a checkpoint of version {tree['schema_version']}; "
                    f"this Thawline reads {SCHEMA_VERSION}",
                    "remove it to start anew, or use the Thawline that made it",
                )
            own = frozenset(tree["own"])
            parts = read_parts(
                _files(folder, tree["processes"]),
                [name for name in tree["parts"] if name not in own],
                sorted(own),
                rank=self._rank,
                size=self._size,
                rows=self.rows,
            )
            return Checkpoint(State(parts, tree["state"], own), tree["epochs"])
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise DataError(
                f"the checkpoint {folder} cannot be read: {error}",
                "remove it: the run then goes on from the one before it, or starts anew",
            ) from error

    def _write(self, name: str, state: State, epochs: Sequence[Mapping[str, Any]]) -> None:
        folder = self.folder / name
        partial = folder.with_name(f".{folder.name}.partial")
        file = _files(partial, self._size)[self._rank]
        with self._agreed():
            # Of whoever was killed while saving; tables are large.
            for old in self.folder.glob(".epoch-*") if self._leads_here else []:
                shutil.rmtree(old, ignore_errors=True)
        with self._agreed():
            partial.mkdir(parents=True, exist_ok=True)
            save_tensors(self._own_tensors(state), file)
            _flush(file)
            if self.mirror is not None:
                self.mirror.put(file, name)
        with self._agreed():
            if self._leads:
                self._complete(state, epochs, partial, folder)
        if self._size > 1:  # It is still there on other machines, if the folder is not shared.
            shutil.rmtree(partial, ignore_errors=True)

    def _own_tensors(self, state: State) -> dict[str, Tensor]:
        """What this process writes."""
        return {
            f"{part}/{name}": tensor.detach().contiguous().cpu()
            for part, named in state.parts.items()
            for name, tensor in named.items()
            if self._leads
            or part in state.own
            or (START in named and (name == START or by_row(name)))
        }

    def _complete(
        self, state: State, epochs: Sequence[Mapping[str, Any]], partial: Path, folder: Path
    ) -> None:
        """Lets the files of all processes count as a checkpoint."""
        tree = {
            "schema_version": SCHEMA_VERSION,
            "processes": self._size,
            "parts": list(state.parts),
            "own": sorted(state.own),
            "state": state.facts,
            "epochs": epochs,
        }
        (partial / FACTS).write_text(json.dumps(tree, indent=2), encoding="utf-8")
        for path in (partial / FACTS, partial):
            _flush(path)
        if _is_whole(partial):
            partial.rename(folder)
            _flush(self.folder)
        elif self.mirror is None:
            raise DataError(
                f"the processes of the job do not write their checkpoints into one {self.folder}",
                "set finetune.checkpoint.folder to a folder that all machines share, or to a URL",
            )
        if self.mirror is not None:
            here = folder if folder.exists() else partial
            self.mirror.put(here / FACTS, folder.name)

    def _remove(self, name: str) -> None:
        if self.mirror is not None:
            self.mirror.remove(name, FACTS)
        folder = self.folder / name
        if folder.exists():
            # Half of a folder must not be taken for a checkpoint.
            removed = folder.rename(folder.with_name(f".{folder.name}.removed"))
            shutil.rmtree(removed)


def _files(folder: Path, processes: int) -> list[Path]:
    """The files of a checkpoint, in the order of the processes that wrote them."""
    return [folder / f"state-{rank}.safetensors" for rank in range(processes)]


def _is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is in a folder."""
    try:
        tree = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(file.exists() for file in _files(folder, tree.get("processes", 1)))


def _name(epochs: float) -> str:
    return f"epoch-{epochs:0{DIGITS + 4}.{DIGITS}f}"


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_finite(state: State) -> None:
    for part, named in state.parts.items():
        for name, tensor in named.items():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if not all(bool(torch.isfinite(end)) for end in tensor.detach().aminmax()):
                raise TrainingError(
                    f"{part} holds NaN or inf in `{name}` after step {state.facts['step']}",
                    "lower finetune.learning_rate or tables.item.learning_rate, "
                    "or set finetune.clip_norm",
                )
