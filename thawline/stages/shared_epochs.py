"""Epochs of fine-tuning that several runs share: what is left of them, and how a run begins there.

The ID tables are frozen in them, so that the state of the network is all there is to keep:

```
epoch-002.00000000/     as a checkpoint's, without the tables
epoch-001.00000000/     where the best epoch is to be exported and is an earlier one
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thawline import logs
from thawline.errors import DataError
from thawline.training.checkpoint import Checkpoints
from thawline.training.loop import Trainer
from thawline.training.state import State

SHARED = "shared"
"""True in the entries of `epochs.json` that the run has taken over."""
TABLE = "table/"
"""What the names of the tables' parts of a state begin with."""


def leave(
    folder: Path,
    trainer: Trainer,
    checkpoints: Checkpoints,
    epochs: Sequence[Mapping[str, Any]],
    *,
    best: int | None,
) -> None:
    """Writes what runs need that begin where the trainer stands, after an epoch.

    Args:
        folder: Empty.
        trainer: Its tables have been frozen.
        checkpoints: Of the run; they hold the best epoch.
        epochs: What is known of each epoch.
        best: The epoch, from 0 on, that is to be exported if none gets better; None: the last is.
    """
    left = Checkpoints(folder, keep=2)
    if best is not None and best + 1 < len(epochs):
        found = checkpoints.load(best + 1)
        left.save(_without_tables(found.state), found.epochs)
    left.save(_without_tables(trainer.state_dict()), epochs)


def begin(
    folder: Path, trainer: Trainer, checkpoints: Checkpoints, *, keep_best: bool
) -> list[dict[str, Any]] | None:
    """Lets a trainer that has done nothing go on from shared epochs, with its own tables.

    Args:
        folder: What `leave` wrote.
        trainer: Made as the one that `leave` got, but for its tables' optimizers and the schedule
            of what comes later.
        checkpoints: Of the run.
        keep_best: Lets them hold the best of the shared epochs, which may be exported.

    Returns:
        What is known of each epoch; None where nothing was done, since the run has a checkpoint
        that is as far.

    Raises:
        DataError: There is nothing in the folder, or of another run.
    """
    shared = Checkpoints(folder)
    saved = shared.saved()
    if not saved:
        raise DataError(f"{folder} holds no shared epochs", "remove it, and run the study again")
    if max(checkpoints.saved(), default=0.0) >= saved[-1]:
        return None
    for after in saved if keep_best else []:
        found = shared.load(after)
        state = _with_tables(found.state, trainer)
        checkpoints.save(state, _marked(found.epochs), best=int(saved[0]))
    last = shared.load(saved[-1])
    trainer.load_state_dict(_with_tables(last.state, trainer))
    logs.say(f"finetune: begins after {len(last.epochs)} shared epochs, from {folder}")
    return _marked(last.epochs)


def shared_of(epochs: Sequence[Mapping[str, Any]]) -> int:
    """How many of the entries of `epochs.json` a run has taken over."""
    return sum(bool(epoch.get(SHARED)) for epoch in epochs)


def _without_tables(state: State) -> State:
    parts = {name: own for name, own in state.parts.items() if not name.startswith(TABLE)}
    return State(parts, state.facts, state.own)


def _with_tables(state: State, trainer: Trainer) -> State:
    """The state with the trainer's tables as they are."""
    own = {f"{TABLE}{name}": table.state_dict() for name, table in trainer.tables.items()}
    return State({**state.parts, **own}, state.facts, state.own)


def _marked(epochs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**epoch, SHARED: True} for epoch in epochs]
