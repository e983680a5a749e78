"""What a table will need, refused before it is made where the machine has less."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thawline.errors import ConfigError
from thawline.tables.optimizers import OptimizerName, make_optimizer

DENSE_WORK = {torch.float32: 12, torch.bfloat16: 20}
"""Most bytes a coordinate that a step of dense Adam takes for a moment, by the rows' type."""


@dataclass(frozen=True)
class TableSize:
    """A table that is still to be made."""

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    optimizer: OptimizerName
    anchored: bool
    """Whether the pretrained rows are kept beside those that train."""

    @property
    def num_bytes(self) -> int:
        """The rows, their anchor, the optimizer's state, and what a step needs for every row."""
        meta = torch.device("meta")
        rows = torch.empty(self.rows, self.dim, dtype=self.dtype, device=meta).nbytes
        optimizer = make_optimizer(self.optimizer, self.rows, self.dim, device=meta)
        state = sum(tensor.nbytes for tensor in optimizer.state_dict().values())
        work = DENSE_WORK[self.dtype] if optimizer.moves_every_row else 0
        return rows * (1 + self.anchored) + state + work * self.rows * self.dim

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"`{self.name}` of {self.rows:,} rows x {self.dim} ({dtype}, {self.optimizer})"

    def remedies(self, *, alone: bool = True) -> str:
        """What would make it smaller, most useful first; processes of a job take float32 alone."""
        ways = ["fewer rows", "a narrower dim"]
        if self.dtype == torch.float32 and alone:
            ways.append("dtype bfloat16")
        if self.optimizer not in ("row-wise-adagrad", "sgd"):
            ways.append("the optimizer row-wise-adagrad")
        return f"give it {', '.join(ways)}, or run on a machine with more memory"


def require_memory(
    tables: Sequence[TableSize], device: str | torch.device = "cpu", *, processes: int = 1
) -> None:
    """Sees to it that all of these tables fit in the memory that is free now, before any is made.

    Args:
        tables: All that a process makes.
        device: Where.
        processes: How many of them make as many there at a time.

    Raises:
        ConfigError: They do not; the message names the largest, and says what it needs and what
            is free.
    """
    needed = {table.name: table.num_bytes for table in tables}
    total, free = sum(needed.values()), free_memory(device)
    if processes * total <= free:
        return
    largest = max(tables, key=lambda table: needed[table.name])
    others = total - needed[largest.name]
    beside = f" and the other tables {_readable(others)}" if others else ""
    each, fewer = "", ""
    if processes > 1:
        each, fewer = f" in each of {processes} processes", "start fewer processes here, or "
    raise ConfigError(
        f"the table {largest} needs {_readable(needed[largest.name])}{beside}{each}; "
        f"{_readable(free)} of memory are free",
        fewer + largest.remedies(alone=processes == 1),
    )


def free_memory(device: str | torch.device = "cpu", *, root: Path = Path("/")) -> int:
    """Bytes that a process can still take on a device.

    On the CPU that is what the machine has left, or what the process's control group (a container's
    limit, of version 1 or 2) or one above it leaves, whichever is less. Caches of files that the
    kernel would drop count as free.

    Args:
        device: Where the memory is.
        root: Where `/proc` and `/sys` are.
    """
    device = torch.device(device)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return max(0, min([_machine_memory(root), *_group_memory(root)]))


def _machine_memory(root: Path) -> int:
    try:
        available = _fields(root / "proc/meminfo")["MemAvailable:"]
    except (OSError, KeyError):  # No Linux.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * available


def _group_memory(root: Path) -> Iterator[int]:
    """What each control group with a limit leaves, from the process's own upwards."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        mount = root / "sys/fs/cgroup" / base
        own = mount / path.lstrip("/")
        # In a container the path may be the host's, of which only the mount itself is to be seen.
        for group in (own, *own.parents):
            try:
                most = int((group / limit).read_text(encoding="utf-8"))
                taken = int((group / used).read_text(encoding="utf-8"))
                yield most - taken + _fields(group / "memory.stat").get(cache, 0)
            except (OSError, ValueError):  # Absent, or "max".
                pass
            if group == mount:
                break


def _fields(file: Path) -> dict[str, int]:
    """First and second word of each line."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _readable(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
