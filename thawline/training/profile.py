"""Chrome traces of some steps of each epoch, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

SKIPPED = 3
"""Steps of an epoch before those that are recorded, as far as it has more."""
RECORDED = 5


@contextmanager
def profiled(
    folder: str | Path | None,
    epochs: int,
    steps_per_epoch: int,
    *,
    device: str = "cpu",
    suffix: str = "",
) -> Iterator[Callable[[int], None]]:
    """Records a few steps of each epoch while the block runs.

    The phases of a step (`thawline.training.clock.PHASES`) are named ranges of the trace.

    Args:
        folder: Where `epoch-1.json` and so on are written; None: nothing is recorded.
        epochs: Epochs of the run.
        steps_per_epoch: Steps of each.
        device: Where training runs.
        suffix: Of the files' names, where several processes write.

    Yields:
        What is to be called after each step, with the steps done over the whole run.
    """
    if folder is None:
        yield lambda done: None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    first = SKIPPED if steps_per_epoch > SKIPPED else 0
    last = min(first + RECORDED, steps_per_epoch) - 1
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    recording: profile | None = None

    def after_step(done: int) -> None:
        nonlocal recording
        if recording is not None and (done - 1) % steps_per_epoch == last:
            recording.stop()
            epoch = (done - 1) // steps_per_epoch + 1
            recording.export_chrome_trace(str(Path(folder) / f"epoch-{epoch}{suffix}.json"))
            recording = None
        if done % steps_per_epoch == first and done < epochs * steps_per_epoch:
            recording = profile(activities=activities)
            recording.start()

    if first == 0:
        after_step(0)
    try:
        yield after_step
    finally:
        if recording is not None:
            recording.stop()
