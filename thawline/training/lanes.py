"""Where lookups run beside the computation: on CUDA a stream of their own, on a CPU nowhere else.

The rules are the same on both: a read comes after every update that was issued before it, and an
update after every read that was issued before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Lane:
    """Reads and updates in the order of the calls: all that a CPU needs."""

    @contextmanager
    def read(self) -> Iterator[torch.cuda.Event | None]:
        """Issues lookups; gives what `wait_for` takes."""
        yield None

    def reads(self, rows: Tensor) -> None:
        """Says that lookups use the memory of `rows`, which the computation's stream has made."""

    def wait_for(self, read: torch.cuda.Event | None) -> None:
        """Lets the computation that follows see the rows of a read."""

    def use(self, rows: Tensor) -> None:
        """Says that the computation uses the memory of rows that a read made."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """Issues an update."""
        yield


class CudaLane(Lane):
    """Reads on a stream of their own, with events in both directions."""

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._last_read = torch.cuda.Event()

    @contextmanager
    def read(self) -> Iterator[torch.cuda.Event | None]:
        """See `Lane.read`.

        The stream waits for what the computation's stream has been given so far: updates, the copy
        of the rows' numbers, and the forward after which a lookup is launched. It does not wait
        for the backward, with which it thus overlaps.
        """
        event = torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield event
        event.record(self.stream)
        self._last_read = event

    def reads(self, rows: Tensor) -> None:
        """See `Lane.reads`: whoever drops a run half-way drops batches that are being read."""
        rows.record_stream(self.stream)

    def wait_for(self, read: torch.cuda.Event | None) -> None:
        """See `Lane.wait_for`."""
        if read is not None:
            torch.cuda.current_stream(self.device).wait_event(read)

    def use(self, rows: Tensor) -> None:
        """See `Lane.use`: the allocator must not give the memory away before the computation."""
        rows.record_stream(torch.cuda.current_stream(self.device))

    @contextmanager
    def update(self) -> Iterator[None]:
        """See `Lane.update`."""
        torch.cuda.current_stream(self.device).wait_event(self._last_read)
        yield


def make_lane(device: torch.device | str) -> Lane:
    """The lane of a device."""
    device = torch.device(device)
    return CudaLane(device) if device.type == "cuda" else Lane()
