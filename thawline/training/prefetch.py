"""Semi-synchronous lookups: the rows of coming batches are read while the present one trains.

The order is the article's: forward of batch B - 1, lookup of batch B, backward of B - 1, update.
So the lookup overlaps with the backward and the optimizer, and batch B reads rows that lack the
last `staleness` updates. It is the same on every device; `lanes` gives it a stream on CUDA.

    prefetcher = Prefetcher(tables, rows=lambda batch: {"item": batch.rows})
    for step in prefetcher.steps(batches):
        loss = model(step.batch, step.embeddings)
        step.look_ahead()
        loss.backward()
        step.apply()
        optimizer.step()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thawline.errors import ConfigError, TrainingError
from thawline.tables import GroupLookup, TableGroup
from thawline.training.clock import Clock
from thawline.training.lanes import Lane, make_lane

B = TypeVar("B")


@dataclass
class _InFlight(Generic[B]):
    """A batch whose rows have been asked for."""

    batch: B
    lookup: GroupLookup
    read: torch.cuda.Event | None
    """What the lane gave for the read."""
    known: Mapping[str, Tensor] = field(default_factory=dict)
    """Rows that an earlier process had read; they count in the place of what is read now."""
    _rows: dict[str, Tensor] | None = None

    def rows(self, lane: Lane) -> dict[str, Tensor]:
        """Waits for the rows of each table, `[n, d]`."""
        if self._rows is None:
            lane.wait_for(self.read)
            known = {name: rows.requires_grad_() for name, rows in self.known.items()}
            self._rows = self.lookup.wait() | known
        return self._rows


class Step(Generic[B]):
    """A batch with its rows, to be trained on."""

    def __init__(self, lane: Lane, flight: _InFlight[B], look_ahead: Callable[[], None]) -> None:
        """Waits for the rows."""
        self.batch = flight.batch
        self.applied = False
        """Whether the rows have been updated."""
        self._lane = lane
        self._lookup = flight.lookup
        self._look_ahead: Callable[[], None] | None = look_ahead
        self.embeddings = {name: _leaf(rows, lane) for name, rows in flight.rows(lane).items()}
        """The rows of each table, leaves `[n, d]`; one requires grad only if its table trains."""
        self.counts = flight.lookup.total()
        """The sum of the batch's counts over the processes that train together."""

    def look_ahead(self) -> None:
        """Launches the next lookup; call it right after the forward. Once is enough."""
        if self._look_ahead is not None:
            launch, self._look_ahead = self._look_ahead, None
            launch()

    def apply(self, grads: Mapping[str, Tensor | None] | None = None) -> None:
        """Updates the rows, after every read that was launched before.

        Args:
            grads: By table, `[n, d]`; None: what the backward left in `embeddings`.

        Raises:
            TrainingError: The step was applied already.
        """
        if self.applied:
            raise TrainingError("a step was applied twice", "call apply once a step")
        self.look_ahead()
        self.applied = True
        if grads is None:
            grads = {name: rows.grad for name, rows in self.embeddings.items()}
        with self._lane.update():
            self._lookup.apply(grads)


class Prefetcher(Generic[B]):
    """Looks rows up `staleness` updates early."""

    def __init__(
        self,
        tables: TableGroup,
        rows: Callable[[B], Mapping[str, Tensor]],
        *,
        counts: Callable[[B], Tensor] | None = None,
        staleness: int = 1,
        device: torch.device | str = "cpu",
        clock: Clock | None = None,
    ) -> None:
        """Prepares; nothing is looked up yet.

        Args:
            tables: What the rows are of.
            rows: From a batch to the rows of each table that it needs, int64 `[n]`.
            counts: From a batch to what is to be summed over the processes, int64 or float64
                `[k]`; it travels with the lookup.
            staleness: How many updates a lookup misses: 0 looks up when a batch is due; 1 or more
                looks up that many batches ahead.
            device: Where the tables are.
            clock: Told how long lookups take to launch, and rows to come.

        Raises:
            ConfigError: A negative staleness.
        """
        if staleness < 0:
            raise ConfigError(f"a staleness of {staleness} cannot be", "set 0, 1 or more")
        self.tables = tables
        self.rows = rows
        self.counts = counts
        self.staleness = staleness
        self.lane: Lane = make_lane(device)
        self.clock = clock or Clock(device)
        self._flights: deque[_InFlight[B]] = deque()

    def in_flight(self) -> list[dict[str, Tensor]]:
        """What a checkpoint between two steps holds of the lookups that were launched.

        Returns:
            The rows read for each coming batch, in order, by table; those of tables that do not
            train are left out, since they read the same again.
        """
        return [
            {
                name: _leaf(rows, self.lane).detach()
                for name, rows in flight.rows(self.lane).items()
                if rows.requires_grad
            }
            for flight in self._flights
        ]

    def steps(
        self,
        batches: Iterable[B],
        *,
        prepare: Callable[[int], None] = lambda index: None,
        drained_at: Callable[[int], bool] = lambda index: False,
        in_flight: Sequence[Mapping[str, Tensor]] = (),
    ) -> Iterator[Step[B]]:
        """Each batch with its rows. Each is looked up once, and nothing is in flight at the end.

        Args:
            batches: What to train on.
            prepare: Called with a step's number, from 0 on, when it begins: before its lookup if
                none is in flight, and always before its update.
            drained_at: Whether no lookup of this step or of a later one may be launched before
                the step begins, since the tables change there: at a thaw, for example.
            in_flight: What `in_flight` gave where an earlier process broke off before `batches`.

        Raises:
            TrainingError: A step that was not applied before the next one was asked for.
        """
        waiting = iter(batches)
        flights = self._flights = deque(
            self._look_up(batch, known) for known, batch in zip(in_flight, waiting, strict=False)
        )
        index, launched = 0, len(flights)

        def launch(until: int) -> None:
            """Looks up the batches before number `until`, as far as the tables stay as they are."""
            nonlocal launched
            while launched < until and not drained_at(launched):
                following = list(islice(waiting, 1))
                if not following:
                    return
                flights.append(self._look_up(following[0]))
                launched += 1

        while flights or (first := list(islice(waiting, 1))):
            prepare(index)
            if not flights:
                flights.append(self._look_up(first[0]))
                launched = index + 1
                launch(index + self.staleness)
            ahead = partial(launch, index + 1 + self.staleness)
            with self.clock.phase("rows"):
                step = Step(self.lane, flights.popleft(), ahead)
            yield step
            if not step.applied:
                raise TrainingError(
                    "a step ended without its update", "call apply() before the next step"
                )
            index += 1
        self.tables.settle()

    def _look_up(self, batch: B, known: Mapping[str, Tensor] | None = None) -> _InFlight[B]:
        with self.clock.phase("lookup"):
            # On the computation's stream, as the batch is, whose memory may be given back there.
            rows = self.rows(batch)
            counts = None if self.counts is None else self.counts(batch)
            with self.lane.read() as read:
                for own in (*rows.values(), *(() if counts is None else (counts,))):
                    self.lane.reads(own)
                lookup = self.tables.lookup(rows, counts)
        return _InFlight(batch, lookup, read, known or {})


def _leaf(rows: Tensor, lane: Lane) -> Tensor:
    """The same rows as a leaf of the stream that computes with them."""
    lane.use(rows)
    return rows.detach().requires_grad_(rows.requires_grad)
