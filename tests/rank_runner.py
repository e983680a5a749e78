"""Checks in spawned processes that form a gloo job: one start for many checks."""

import importlib
import json
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thawline.training import distributed

TIMEOUT = timedelta(seconds=60)
"""After this a collective that a process waits for in vain fails."""
LIMIT = 240
"""Seconds until the processes of a run are killed."""


def run_checks(module, names, world_size):
    """What came of each check: "" or what went wrong, by name.

    A check is a function of `Ranks` in a module that the processes alone import, since TorchRec
    takes its time; it fails if it raises in any process. After a failure the others of the run are
    left out, since the processes may be out of step.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _work,
            (world_size, folder, module, names),
            nprocs=world_size,
            join=False,
            start_method="spawn",
        )
        ends = time.monotonic() + LIMIT
        try:
            while not context.join(timeout=1):
                if time.monotonic() > ends:
                    raise TimeoutError(f"processes of a run did not end in {LIMIT} s")
        finally:
            for process in context.processes:
                process.kill()
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return {
        name: "\n".join(filter(None, (own.get(name, "was left out") for own in reports)))
        for name in names
    }


def _work(rank, world_size, folder, module, names):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    checks = importlib.import_module(module)
    distributed.TIMEOUT = TIMEOUT
    ranks = distributed.make_ranks("cpu")
    report = {}
    for name in names:
        try:
            getattr(checks, name)(ranks)
            report[name] = ""
            failed = 0
        except Exception:
            report[name] = f"process {rank}: {traceback.format_exc()}"
            failed = 1
        Path(folder, f"{rank}.json").write_text(json.dumps(report))
        try:
            if ranks.most(failed):
                break
        except RuntimeError:  # Another process has given up.
            break
    dist.destroy_process_group()
