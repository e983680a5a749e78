"""Checkpoints of a run: folders that appear whole or not at all. No pickle is written or read.

```
step-00000120/
  checkpoint.json       after how many steps, the parts of the state, the epochs so far
  state.safetensors     every tensor, as <part>/<name>
```
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thawline.errors import DataError, TrainingError
from thawline.training.mirror import Mirror
from thawline.training.state import State

SCHEMA_VERSION = 1
FACTS, TENSORS = "checkpoint.json", "state.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    state: State
    epochs: list[dict[str, Any]]
    """What was written of the epochs that were complete."""


class Checkpoints:
    """The checkpoints of one run, oldest first; no two processes may write them at once."""

    def __init__(self, folder: Path, *, keep: int = 2, mirror: Mirror | None = None) -> None:
        """Finds what is there.

        Args:
            folder: Made when the first checkpoint is.
            keep: How many of the newest stay; 1 or more.
            mirror: A remote place that gets a copy of each, and from which those come that are
                not in `folder`.
        """
        self.folder = folder
        self.keep = keep
        self.mirror = mirror

    def steps(self) -> list[int]:
        """After how many steps each was saved, in ascending order."""
        names = {own.name for own in self.folder.glob("step-*")}
        if self.mirror is not None:
            names.update(self.mirror.names(FACTS))
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))

    def name_of_last(self) -> str | None:
        """Where the newest one is; None where there is none."""
        steps = self.steps()
        return self._place(steps[-1]) if steps else None

    def save(
        self, state: State, epochs: Sequence[Mapping[str, Any]], *, best: int | None = None
    ) -> None:
        """Writes a checkpoint, and removes those that need not be kept.

        Args:
            state: Of the trainer; nothing is done where its step was saved before.
            epochs: JSON values of the epochs that are complete.
            best: The step of one to keep, however old.

        Raises:
            TrainingError: Rows or parameters that are not finite.
        """
        step = state.facts["step"]
        if step not in self.steps():
            _require_finite(state)
            self._write(state, epochs)
            if self.mirror is not None:
                self.mirror.put(self.folder / _name(step))
        for old in self.steps()[: -self.keep]:
            if old != best:
                self._remove(old)

    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint; its tensors are on the CPU.

        Raises:
            DataError: A missing or damaged file, or one of another version.
        """
        folder = self.folder / _name(step)
        if not folder.exists() and self.mirror is not None:
            folder = self.mirror.get(_name(step), self.folder)
        try:
            tree = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            if tree["schema_version"] != SCHEMA_VERSION:
                raise DataError(
                    f"{folder} is a checkpoint of version {tree['schema_version']}; "
                    f"this Thawline reads {SCHEMA_VERSION}",
                    "remove it to start anew, or use the Thawline that made it",
                )
            tensors = load_file(folder / TENSORS)
            parts: dict[str, dict[str, Tensor]] = {name: {} for name in tree["parts"]}
            for key, tensor in tensors.items():
                part, _, name = key.rpartition("/")
                parts[part][name] = tensor
            return Checkpoint(State(parts, tree["state"]), tree["epochs"])
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise DataError(
                f"the checkpoint {folder} cannot be read: {error}",
                "remove it: the run then goes on from the one before it, or starts anew",
            ) from error

    def load_last(self) -> Checkpoint | None:
        """Reads the newest checkpoint, if there is one.

        Raises:
            DataError: See `load`.
        """
        steps = self.steps()
        return self.load(steps[-1]) if steps else None

    def clear(self) -> None:
        """Removes all of them."""
        for step in self.steps():
            self._remove(step)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, state: State, epochs: Sequence[Mapping[str, Any]]) -> None:
        folder = self.folder / _name(state.facts["step"])
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {
            f"{part}/{name}": tensor.detach().contiguous().cpu()
            for part, named in state.parts.items()
            for name, tensor in named.items()
        }
        save_file(tensors, partial / TENSORS)
        tree = {
            "schema_version": SCHEMA_VERSION,
            "parts": list(state.parts),
            "state": state.facts,
            "epochs": epochs,
        }
        (partial / FACTS).write_text(json.dumps(tree, indent=2), encoding="utf-8")
        for path in (partial / TENSORS, partial / FACTS, partial):
            _flush(path)
        partial.rename(folder)
        _flush(self.folder)

    def _remove(self, step: int) -> None:
        if self.mirror is not None:
            self.mirror.remove(_name(step), FACTS)
        folder = self.folder / _name(step)
        if folder.exists():
            # Half of a folder must not be taken for a checkpoint.
            removed = folder.rename(folder.with_name(f".{folder.name}.removed"))
            shutil.rmtree(removed)

    def _place(self, step: int) -> str:
        root = self.folder if self.mirror is None else self.mirror.url
        return f"{root}/{_name(step)}"


def _name(step: int) -> str:
    return f"step-{step:08}"


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
