"""A lookup by TorchRec and FBGEMM in a table of eight rows; `python -m` prints what came of it."""

from __future__ import annotations

import importlib.metadata
import json

import torch

from thawline.tables.parts import Shards
from thawline.training.distributed import joined


def look_up() -> dict[str, str]:
    """`found`: what did it; or `missing`: the package that is not there."""
    try:
        from thawline.tables.sharded import ShardedTables
    except ImportError as error:
        return {"missing": f"TorchRec or FBGEMM cannot be imported: {error}"}
    rows = torch.arange(32, dtype=torch.float32).view(8, 4)
    with joined("cpu", alone=True) as ranks:
        if ranks is None:
            raise AssertionError("a process alone was not made a job")
        tables = ShardedTables({"item": Shards(rows)}, group=ranks.tables)
        found = tables.lookup({"item": torch.tensor([5, 2, 5])}).wait()["item"]
    if found.tolist() != rows[[5, 2, 5]].tolist():
        raise ValueError(f"rows 5, 2 and 5 came out as {found.tolist()}")
    names = {name: _version(name) for name in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")}
    return {"found": ", ".join(f"{name} {number}" for name, number in names.items() if number)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(look_up()))
