"""Checks on a GPU what a CPU cannot show: that streams keep their order, overlap and agree.

It needs PyTorch and a GPU, and neither TorchRec nor FBGEMM; it takes a few minutes, exits with 1 if
a check fails, and says so and exits with 0 where there is no GPU: nothing is claimed then.

- late reference: a prefetched run on the GPU, with delays put into the stream of the lookups, into
  that of the computation, or into both at random, equals a loop on the CPU that is late by hand;
- control: the same run without the wait between reads and updates differs, so that the delays are
  long enough to show a race;
- overlap: in a profiler's trace, kernels of lookups run while kernels of a backward do;
- gather, small tables: values and gradients are those of PyTorch's embedding;
- compile: the ranker compiles without a graph break, and gives the plain one's losses.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from thawline.tables import LocalTable, TableGroup, make_optimizer
from thawline.tables.gather import gather
from thawline.tables.small import SmallTable
from thawline.training.lanes import CudaLane
from thawline.training.prefetch import Prefetcher

ROWS, DIM, LOOKUPS, STEPS = 200, 16, 512, 12
CYCLES = 20_000_000
"""About 10 ms of sleep."""
CUDA = torch.device("cuda")


class SlowLane(CudaLane):
    """A lane whose streams sleep before they read, and before they update."""

    def __init__(self, *, reads: Callable[[], int], updates: Callable[[], int]) -> None:
        """Takes how many cycles to sleep each time."""
        super().__init__(CUDA)
        self.reads, self.updates = reads, updates

    @contextmanager
    def read(self) -> Iterator[torch.cuda.Event | None]:
        """See `Lane.read`."""
        with super().read() as event:
            torch.cuda._sleep(self.reads())
            yield event

    @contextmanager
    def update(self) -> Iterator[None]:
        """See `Lane.update`."""
        with super().update():
            torch.cuda._sleep(self.updates())
            yield


class UnorderedLane(SlowLane):
    """A lane whose updates do not wait for reads: the race that the events prevent."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """Waits for nothing."""
        yield


def make_table(optimizer: str, device: torch.device | str) -> LocalTable:
    """The same rows on any device."""
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    made = make_optimizer(optimizer, ROWS, DIM, device=weight.device)  # type: ignore[arg-type]
    return LocalTable(weight, optimizer=made, learning_rate=0.1)


def make_batches() -> list[Tensor]:
    """Rows on the CPU, many of them in neighbouring batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (LOOKUPS,), generator=generator) for _ in range(STEPS)]


def loss_of(rows: Tensor) -> Tensor:
    """A loss that no row is indifferent to."""
    scale = torch.linspace(0.1, 1.0, rows.numel(), device=rows.device).view_as(rows)
    return (rows.tanh() * scale).sum()


def late_by_hand(optimizer: str, staleness: int) -> Tensor:
    """On the CPU: each batch reads the rows as they were `staleness` updates before its turn."""
    table = make_table(optimizer, "cpu")
    past = [table.weight.clone()]
    for index, rows in enumerate(make_batches()):
        read = past[max(0, index - staleness)][rows].requires_grad_()
        loss_of(read).backward()
        assert read.grad is not None
        table.update(rows, read.grad)
        past.append(table.weight.clone())
    return table.weight


def train(optimizer: str, staleness: int, lane: CudaLane) -> Tensor:
    """On the GPU, with prefetch; batches are copied from pinned memory without waiting."""
    table = make_table(optimizer, CUDA)
    prefetcher: Prefetcher[Tensor] = Prefetcher(
        TableGroup({"item": table}),
        lambda batch: {"item": batch},
        staleness=staleness,
        device=CUDA,
    )
    prefetcher.lane = lane
    batches = (rows.pin_memory().to(CUDA, non_blocking=True) for rows in make_batches())
    for step in prefetcher.steps(batches):
        loss = loss_of(step.embeddings["item"])
        step.look_ahead()
        loss.backward()
        step.apply()
        # Memory that is given back too early is taken and overwritten by this.
        torch.full((LOOKUPS, DIM), 7.0, device=CUDA)
    torch.cuda.synchronize()
    return table.weight.cpu()


def check_late_reference() -> None:
    """Every optimizer and staleness, with delays in one stream, the other, and both."""
    draw = random.Random(0)  # noqa: S311
    none, long = (lambda: 1), (lambda: CYCLES)
    sometimes = lambda: draw.choice([1, CYCLES // 4, CYCLES])  # noqa: E731
    for optimizer in ("row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd"):
        for staleness in (0, 1, 3):
            expected = late_by_hand(optimizer, staleness)
            for reads, updates in ((none, none), (long, none), (none, long), (sometimes,) * 2):
                found = train(optimizer, staleness, SlowLane(reads=reads, updates=updates))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def check_control() -> None:
    """Slow reads that no update waits for read rows that are too new."""
    expected = late_by_hand("sgd", 1)
    lane = UnorderedLane(reads=lambda: CYCLES, updates=lambda: 1)
    found = train("sgd", 1, lane)
    close = torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not close, "a run without order equals the reference: the delays are too short"


def check_overlap() -> None:
    """A profiler's trace holds a lookup's kernel within a backward's on another stream."""
    table = LocalTable(torch.randn(1_000_000, 128, device=CUDA))
    layer = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8))).to(CUDA)
    prefetcher: Prefetcher[Tensor] = Prefetcher(
        TableGroup({"item": table}), lambda batch: {"item": batch}, device=CUDA
    )
    batches = [torch.randint(0, 1_000_000, (500_000,), device=CUDA) for _ in range(6)]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for step in prefetcher.steps(batches):
            loss = layer(step.embeddings["item"]).square().mean()
            step.look_ahead()
            loss.backward()
            step.apply()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    kernels = [
        (event["args"]["stream"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]
    streams = sorted({stream for stream, _, _ in kernels})
    main = max(streams, key=lambda own: sum(stream == own for stream, _, _ in kernels))
    side = [kernel for kernel in kernels if kernel[0] != main]
    assert side, f"all kernels ran on one stream of {streams}"
    together = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for _, start, end in side
        for stream, other_start, other_end in kernels
        if stream == main
    )
    alone = sum(end - start for _, start, end in side)
    print(f"  {together / alone:.0%} of the lookups' kernel time lies within other kernels'")
    assert together > 0.1 * alone, "lookups do not overlap with the computation"


def check_gather() -> None:
    """Values, and the dense gradient, of duplicates too."""
    weight = torch.randn(1000, 64, device=CUDA, requires_grad=True)
    rows = torch.randint(0, 1000, (20_000,), device=CUDA)
    grad = torch.randn(20_000, 64, device=CUDA)
    ours, theirs = gather(weight, rows), functional.embedding(rows, weight)
    assert torch.equal(ours, theirs)
    (own,) = torch.autograd.grad(ours, weight, grad)
    (expected,) = torch.autograd.grad(theirs, weight, grad)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    (again,) = torch.autograd.grad(gather(weight, rows), weight, grad)
    assert torch.equal(own, again), "two backwards of the gather differ"


def check_small_tables() -> None:
    """Both ways of the backward against PyTorch's embedding."""
    for rows in (4, 64, 256):
        ids = torch.randint(0, rows, (50_000,), device=CUDA)
        grad = torch.randn(50_000, 32, device=CUDA)
        for backward in ("one-hot", "scatter", "auto"):
            table = SmallTable(rows, 32, backward=backward).to(CUDA)  # type: ignore[arg-type]
            (own,) = torch.autograd.grad(table(ids), table.weight, grad)
            reference = functional.embedding(ids, table.weight.double())
            (expected,) = torch.autograd.grad(reference, table.weight, grad.double())
            torch.testing.assert_close(own, expected, rtol=1e-2, atol=5e-2)


def check_compile() -> None:
    """The ranker in one graph, its losses and the rows' gradients."""
    from thawline.config import Model
    from thawline.data.batches import Batch
    from thawline.model.ranker import Ranker
    from thawline.training.forward import make_forward

    torch.manual_seed(0)
    size, length, count = 64, 24, 5
    rows = torch.randint(1, 500, (size, length + count))
    batch = Batch(
        request_id=torch.arange(size),
        timestamp=torch.zeros(size, dtype=torch.int64),
        history_row=rows[:, :length].contiguous(),
        history_action=torch.ones(size, length, dtype=torch.int64),
        history_age=torch.rand(size, length),
        candidate_row=rows[:, length:].contiguous(),
        candidate_mask=torch.ones(size, count, dtype=torch.bool),
        candidate_log_q=torch.full((size, count), -6.0),
        labels=(torch.rand(size, count, 1) < 0.3).float(),
        context=torch.randint(0, 10, (size, 3)),
        oracle=None,
    ).to(CUDA)
    sizes = {"a": 10, "b": 10, "c": 10}
    ranker = Ranker(
        Model(dim=32, small_table_backward="scatter"),
        actions=1,
        context_sizes=sizes,
        history_length=56,
    ).to(CUDA)
    weight = torch.randn(500, 32, device=CUDA)
    found = []
    with torch._dynamo.error_on_graph_break(True):
        for forward in (ranker.loss, make_forward(ranker, compiled=True, device=CUDA)):
            read = weight[batch.rows].requires_grad_()
            losses = forward(batch, {"item": read})
            losses.total.backward()
            assert read.grad is not None
            found.append((losses.total.detach(), read.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


CHECKS = {
    "late reference": check_late_reference,
    "control": check_control,
    "overlap": check_overlap,
    "gather": check_gather,
    "small tables": check_small_tables,
    "compile": check_compile,
}


def main() -> None:
    """Runs every check; the exit code says whether all passed."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = []
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {'FAILED' if name in failed else 'passed'}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
