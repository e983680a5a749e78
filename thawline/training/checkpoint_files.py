"""Reading a checkpoint's files, of as many processes as wrote them, for one process of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from thawline.errors import DataError
from thawline.training.state import START, by_row, dealt_anew

Parts = dict[str, dict[str, Tensor]]


def read_parts(
    files: Sequence[Path],
    names: Sequence[str],
    own: Sequence[str],
    *,
    rank: int,
    size: int,
    rows: Mapping[str, slice],
) -> Parts:
    """The parts of a state as one process wants them; its tensors are on the CPU.

    Args:
        files: One of each process that wrote; its tensors are named `<part>/<name>`. The first one
            holds what is the same in all.
        names: The parts.
        own: Those of which each process wrote its own.
        rank: Of the process that reads ...
        size: ... among those of its job.
        rows: By part the rows that it holds, of tables that are split; it gets all of others.

    Raises:
        DataError: Rows of a table that are in no file.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        keys = [set(file.keys()) for file in opened]
        split = {name for name in names if f"{name}/{START}" in keys[0]}
        parts: Parts = {name: {} for name in names if name not in own}
        for key in sorted(keys[0]):
            part, _, name = key.rpartition("/")
            if part in own or name == START:
                continue
            if by_row(name) and (part in split or part in rows):
                holders = opened if part in split else opened[:1]
                parts[part][name] = _read_rows(holders, part, name, rows.get(part))
            else:
                parts[part][name] = opened[0].get_tensor(key)
        for part, held in rows.items():
            parts[part][START] = torch.tensor(held.start)
        if size == len(files):
            return parts | _read_own(opened[rank], keys[rank], own)
        each = [_read_own(file, found, own) for file, found in zip(opened, keys, strict=True)]
        return parts | dealt_anew(each, rank)


def _read_own(file: Any, keys: set[str], own: Sequence[str]) -> Parts:
    parts: Parts = {part: {} for part in own}
    for key in keys:
        part, _, name = key.rpartition("/")
        if part in parts:
            parts[part][name] = file.get_tensor(key)
    return parts


def _read_rows(files: Sequence[Any], part: str, name: str, wanted: slice | None) -> Tensor:
    """The wanted rows, or all, of a tensor whose rows lie in several files, in ascending order."""
    key, at = f"{part}/{name}", 0 if wanted is None else wanted.start
    pieces: list[Tensor] = []
    for file in files:
        view = file.get_slice(key)
        start = int(file.get_tensor(f"{part}/{START}")) if len(files) > 1 else 0
        stop = start + view.get_shape()[0]
        until = stop if wanted is None else min(stop, wanted.stop)
        if start <= at < until:
            pieces.append(view[at - start : until - start])
            at = until
    if wanted is not None and at < wanted.stop:
        raise DataError(
            f"rows {at} to {wanted.stop - 1} of {part} are in no file of the checkpoint",
            "remove it: the run then goes on from the one before it, or starts anew",
        )
    if not pieces:
        return files[0].get_tensor(key)[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
