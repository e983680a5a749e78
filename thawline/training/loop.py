"""Fine-tuning: the loop over epochs and the one training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count, islice, takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from thawline.data.batches import Batch
from thawline.errors import DataError, TrainingError
from thawline.model.ranker import Counts, Losses, Ranker
from thawline.tables import IdTable, TableGroup
from thawline.training import course
from thawline.training.clock import Clock
from thawline.training.components import Network, TableComponent, TrainedTable
from thawline.training.distributed import DenseSums
from thawline.training.forward import Forward
from thawline.training.prefetch import Prefetcher, Step
from thawline.training.schedule import Schedule
from thawline.training.state import State, random_state, set_random_state

Group = Sequence[Batch]
"""The micro-batches of a step."""


class Reader(Protocol):
    """Batches, epoch after epoch: a `RequestReader`, for example."""

    num_batches: int
    """Of an epoch."""

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """See `RequestReader.epoch`."""
        ...


@dataclass(frozen=True)
class EpochSummary:
    """What an epoch of training did."""

    epoch: int
    """Counted from 0."""
    losses: dict[str, float]
    """Mean over steps of each objective."""
    course: list[float | None]
    """Mean head loss over each part of the epoch (`training.course`); None: no step in it."""
    steps: int
    requests: int
    seconds: float
    waiting: float
    """Seconds of `seconds` spent waiting for batches."""
    phases: dict[str, float]
    """Seconds by phase of a step (`clock.PHASES`)."""
    trained: dict[str, float]
    """Share of the epoch in which each component trained."""


@dataclass
class Progress:
    """What an epoch has come to so far."""

    totals: dict[str, Tensor] = field(default_factory=dict)
    """Sums over steps by objective, and the epoch's `course`."""
    steps: int = 0
    requests: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, group: Group, losses: Losses, step: int, steps: int) -> None:
        """Counts a step, which comes after `step` of the epoch's `steps`."""
        for name in (each.name for each in fields(Losses)):
            value = getattr(losses, name).detach()
            self.totals[name] = self.totals.get(name, torch.zeros_like(value)) + value
        head = losses.head.detach()
        known = self.totals.get("course", course.begun(head))
        self.totals["course"] = course.added(known, head, step, steps)
        self.steps += 1
        self.requests += sum(len(batch) for batch in group)

    def add_phases(self, seconds: Mapping[str, float]) -> None:
        """Counts the time since the last call."""
        self.phases = {name: self.phases.get(name, 0.0) + own for name, own in seconds.items()}


@dataclass(frozen=True)
class Accumulated:
    """How micro-batches add up to a step of the network's optimizer."""

    micro_batches: int = 1
    fused: bool = False
    """True: the ID tables are updated by each micro-batch. False: once, by all of them."""
    table_factor: float = 1.0
    """On the ID tables' learning rates."""

    @property
    def per_step(self) -> int:
        """Micro-batches to an update of the ID tables."""
        return 1 if self.fused else self.micro_batches


class Trainer:
    """Trains a ranker and its ID tables by a schedule."""

    def __init__(
        self,
        ranker: Ranker,
        tables: Mapping[str, TrainedTable],
        reader: Reader,
        schedule: Schedule,
        *,
        learning_rate: float,
        learning_rates: Mapping[str, float] | None = None,
        content: IdTable | None = None,
        clip_norm: float | None = None,
        staleness: int = 0,
        accumulated: Accumulated | None = None,
        forward: Forward | None = None,
        group: Callable[[Mapping[str, IdTable]], TableGroup] = TableGroup,
        sums: DenseSums | None = None,
        device: str = "cpu",
        on_step: Callable[[int, int], None] = lambda step, steps: None,
    ) -> None:
        """Gathers what a run needs; nothing is trained yet.

        Args:
            ranker: The network, on `device`.
            tables: `item` and the ranker's other ID tables.
            reader: Training requests.
            schedule: When each component trains.
            learning_rate: Of Adam, for the network.
            learning_rates: For some of its parts, by name.
            content: The items' content vectors, for a ranker with a content tower; never trained.
            clip_norm: Clips the norm of the network's gradient.
            staleness: Updates that a lookup may miss (see `Prefetcher`).
            accumulated: Micro-batches to a step; None: one.
            forward: How the ranker's losses are computed (`make_forward`); None: by `ranker.loss`.
            group: Makes one of all tables.
            sums: Sums over the processes that train together; None: this one trains alone.
            device: Where the network is.
            on_step: Called after each step with the steps done and those of the whole run.

        Raises:
            TrainingError: There is no request to train on.
            ConfigError: A window of the schedule that holds no step.
        """
        if reader.num_batches == 0:
            raise TrainingError(
                "the fine-tune window holds no training request",
                "widen windows.finetune_days or lower windows.holdout_users",
            )
        self.ranker = ranker
        self.forward = forward or ranker.loss
        self.tables = {name: trained.table for name, trained in tables.items()}
        self.reader = reader
        self.schedule = schedule
        self.accumulated = accumulated or Accumulated()
        self.steps_per_epoch = -(-reader.num_batches // self.accumulated.per_step)
        schedule.require_steps(self.steps_per_epoch)
        parts = ranker.components()
        self.network = Network(
            parts,
            schedule,
            learning_rate=learning_rate,
            learning_rates=learning_rates,
        )
        self._table_components = [
            TableComponent(trained, schedule.of(name), factor=self.accumulated.table_factor)
            for name, trained in tables.items()
        ]
        self.components = [*self.tables, *parts]
        """What has a schedule, by name."""
        whole_group = group(self.tables | ({"content": content} if content else {}))
        self.clock = Clock(device)
        self.prefetcher: Prefetcher[Group] = Prefetcher(
            whole_group,
            self._rows,
            counts=None if sums is None else self._counts,
            staleness=staleness,
            device=device,
            clock=self.clock,
        )
        self.sums = sums
        self.clip_norm = clip_norm
        self.device = device
        self.on_step = on_step
        self.step = 0
        """Steps done, over the whole run."""
        self.epoch = 0
        """The epoch, from 0 on, whose summary comes next."""
        self._in_flight: list[dict[str, Tensor]] = []
        """Rows that lookups had read when the state was saved from which the run goes on."""
        self._progress = Progress()
        self._accumulating = 0
        """Micro-batches whose gradients the network's optimizer has not seen."""

    def epochs(self) -> Iterator[EpochSummary]:
        """Trains an epoch at a time and yields its summary; the caller may evaluate between."""
        while self.epoch < self.schedule.epochs:
            summary = self._train_epoch(self.epoch)
            self.epoch += 1
            yield summary

    def state_dict(self) -> State:
        """Where the run stands after a step or an epoch; the tensors are those in use, no copies.

        A trainer made alike goes on from it as this one would: with the same batches, and without
        a changed bit. Lookups in flight are part of it, so asking for it changes nothing.
        """
        self._progress.add_phases(self.clock.take())
        flights = self.prefetcher.in_flight()
        own: dict[str, Mapping[str, Tensor]] = {
            **{f"in_flight/{index}": rows for index, rows in enumerate(flights)},
            "gradients": self.network.gradients() if self._accumulating else {},
            "random": random_state(self.device),
        }
        return State(
            {
                **{f"table/{name}": table.state_dict() for name, table in self.tables.items()},
                "ranker": self.ranker.state_dict(),
                "network": self.network.state_dict(),
                "losses": self._progress.totals,
                **own,
            },
            {
                "processes": self._processes,
                "step": self.step,
                "epoch": self.epoch,
                "steps_per_epoch": self.steps_per_epoch,
                "accumulating": self._accumulating,
                "steps": self._progress.steps,
                "requests": self._progress.requests,
                "seconds": self._progress.seconds,
                "phases": self._progress.phases,
            },
            frozenset(own),
        )

    def load_state_dict(self, state: State) -> None:
        """Takes over what `state_dict` gave.

        Of a run in another number of processes, whose steps are of another size, the same share of
        the epoch counts as done, rounded up to a step.

        Raises:
            DataError: The state is of another table, or of epochs of another length.
        """
        facts, parts, saved = state.facts, state.parts, state.facts["steps_per_epoch"]
        if saved != self.steps_per_epoch and facts["processes"] == self._processes:
            raise DataError(
                f"a saved run has {saved} steps an epoch, this one {self.steps_per_epoch}",
                "go on with the dataset and the settings that the state was saved with",
            )
        for name, table in self.tables.items():
            table.load_state_dict(dict(parts[f"table/{name}"]))
        self.ranker.load_state_dict(parts["ranker"])
        self.step = -(-facts["step"] * self.steps_per_epoch // saved)
        self.epoch = facts["epoch"]
        # In the steps of the run that left them so, whose rounding of windows may differ.
        for component in self._table_components:
            component.resume(facts["step"], saved)
        self.network.resume(facts["step"], saved)
        self.network.load_state_dict(parts["network"], parts["gradients"])
        self._accumulating = facts["accumulating"]
        flights = takewhile(parts.__contains__, (f"in_flight/{index}" for index in count()))
        self._in_flight = [
            {name: rows.to(self.device) for name, rows in parts[flight].items()}
            for flight in flights
        ]
        self._progress = Progress(
            {name: total.to(self.device) for name, total in parts["losses"].items()},
            *(facts[name] for name in ("steps", "requests", "seconds", "phases")),
        )
        if "random" in parts:
            set_random_state(parts["random"], self.device)

    @property
    def _processes(self) -> int:
        return 1 if self.sums is None else self.sums.ranks.size

    def _train_epoch(self, epoch: int) -> EpochSummary:
        self.ranker.train()
        started, before = time.perf_counter(), self._progress.seconds
        for group, losses in self._steps(epoch):
            self._check_finite(losses, group, epoch)
            place = self.step - epoch * self.steps_per_epoch
            self.step += 1
            self._progress.add(group, losses, place, self.steps_per_epoch)
            self._progress.seconds = before + time.perf_counter() - started
            self.on_step(self.step, self.steps_per_epoch * self.schedule.epochs)
        done, self._progress = self._progress, Progress()
        done.add_phases(self.clock.take())
        return EpochSummary(
            epoch=epoch,
            losses={
                each.name: float(done.totals[each.name]) / done.steps for each in fields(Losses)
            },
            course=course.means(done.totals["course"]),
            steps=done.steps,
            requests=done.requests,
            seconds=done.seconds,
            waiting=done.phases["data"],
            phases=done.phases,
            trained={name: self.schedule.of(name).share(epoch) for name in self.components},
        )

    def _steps(self, epoch: int) -> Iterator[tuple[Group, Losses]]:
        """Trains on what is left of an epoch."""
        first = self.step
        known, self._in_flight = self._in_flight, []
        steps = self.prefetcher.steps(
            self._groups(epoch),
            prepare=lambda index: self._follow_schedule(first + index),
            drained_at=lambda index: self._tables_change(first + index),
            in_flight=known,
        )
        for step in steps:
            last = self.step + 1 == self.steps_per_epoch * (epoch + 1)
            yield step.batch, self._train_on(step, flush=last)

    def _groups(self, epoch: int) -> Iterator[Group]:
        """The micro-batches of each step of an epoch that is still to be done."""
        size = self.accumulated.per_step
        done = self.step - epoch * self.steps_per_epoch
        batches = self.reader.epoch(epoch, done * size) if done else self.reader.epoch(epoch)
        while True:
            with self.clock.phase("data"):
                group = [batch.to(self.device) for batch in islice(batches, size)]
            if not group:
                return
            yield group

    def _rows(self, group: Group) -> Mapping[str, Tensor]:
        """The rows of a step, micro-batch after micro-batch."""
        rows = [self.ranker.rows(batch) for batch in group]
        if len(rows) == 1:
            return rows[0]
        return {name: torch.cat([own[name] for own in rows]) for name in rows[0]}

    def train_step(self, batch: Batch) -> Losses:
        """One step on one batch, looked up now."""
        alone: Prefetcher[Group] = Prefetcher(
            self.prefetcher.tables,
            self._rows,
            counts=self.prefetcher.counts,
            staleness=0,
            device=self.device,
            clock=self.clock,
        )
        (losses,) = [self._train_on(step, flush=True) for step in alone.steps([[batch]])]
        return losses

    def _train_on(self, step: Step[Group], *, flush: bool) -> Losses:
        """Forward, the next lookup, backward, the network's step, the rows' update.

        Args:
            step: Micro-batches and their rows.
            flush: Whether the network's optimizer steps even if it could wait for more.
        """
        if not self._accumulating:
            self.network.optimizer.zero_grad()
        leaves = _split(step.embeddings, [self.ranker.rows(batch) for batch in step.batch])
        with self.clock.phase("forward"):
            whole = self._whole(step)
        parts = []
        for batch, rows in zip(step.batch, leaves, strict=True):
            with self.clock.phase("forward"):
                losses = self.forward(batch, rows, whole)
            step.look_ahead()
            if not losses.total.requires_grad:
                raise TrainingError(
                    f"nothing trains at step {self.step}: the components that are to train then "
                    "have no row of an open tier, or no path for a gradient",
                    "see `thawline recipes`, and let finetune.schedule train another one beside it",
                )
            with self.clock.phase("backward"):
                losses.total.backward()
            parts.append(losses)
        losses = parts[0] if len(parts) == 1 else _add(parts)
        self._accumulating += 1
        # Before the rows' update, which waits for the lookup in flight: this hides more of it.
        if flush or not self.accumulated.fused or self._accumulating == self._most_accumulated:
            with self.clock.phase("optimizer"):
                losses = self._step_network(losses)
        elif self.sums is not None:
            losses = self.sums.losses(losses)
        with self.clock.phase("update"):
            step.apply(_gradients(leaves))
        return losses

    def _counts(self, group: Group) -> Tensor:
        """What the losses of this process's part of a step are means over, `[3]`."""
        counts = _sum(Counts.of(batch) for batch in group)
        return torch.stack([getattr(counts, each.name) for each in fields(counts)])

    def _whole(self, step: Step[Group]) -> Counts | None:
        """What the step's losses are means over, if that is more than one batch."""
        if step.counts is not None:
            return Counts(*step.counts.unbind())
        return _sum(Counts.of(batch) for batch in step.batch) if len(step.batch) > 1 else None

    @property
    def _most_accumulated(self) -> int:
        return self.accumulated.micro_batches if self.accumulated.fused else 1

    def _step_network(self, losses: Losses) -> Losses:
        """The network's step; gives the losses of all processes."""
        if self._accumulating > 1:
            # Of means over micro-batches, to the gradient of their mean.
            for parameter in self.ranker.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self._accumulating
        self._accumulating = 0
        if self.sums is not None:
            losses = self.sums.gradients(self.ranker.parameters(), losses)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), self.clip_norm)
        self.network.optimizer.step()
        return losses

    def _follow_schedule(self, step: int) -> None:
        for component in self._table_components:
            component.follow(step, self.steps_per_epoch)
        self.network.follow(step, self.steps_per_epoch)

    def _tables_change(self, step: int) -> bool:
        return any(own.changes(step, self.steps_per_epoch) for own in self._table_components)

    def _check_finite(self, losses: Losses, group: Group, epoch: int) -> None:
        if not torch.isfinite(losses.total):
            ids = ", ".join(str(int(value)) for value in group[0].request_id[:5])
            raise TrainingError(
                f"the loss became {losses.total.item()} at step {self.step} (epoch {epoch}); "
                f"the batch's first request ids: {ids}",
                "lower finetune.learning_rate or tables.item.learning_rate, "
                "or set finetune.clip_norm",
            )


def _split(
    embeddings: Mapping[str, Tensor], rows: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """The rows of each micro-batch, as leaves of their own where there are several."""
    if len(rows) == 1:
        return [dict(embeddings)]
    parts = {
        name: [
            part.requires_grad_(read.requires_grad)
            for part in read.detach().split([len(own[name]) for own in rows])
        ]
        for name, read in embeddings.items()
    }
    return [{name: own[index] for name, own in parts.items()} for index in range(len(rows))]


def _gradients(leaves: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor | None]:
    """The gradients of a step's rows, `[n, d]` by table; None where no loss reached them."""
    found: dict[str, Tensor | None] = {}
    for name in leaves[0]:
        grads = [own[name].grad for own in leaves]
        if len(grads) == 1 or all(grad is None for grad in grads):
            found[name] = grads[0]
        else:
            found[name] = torch.cat(
                [
                    torch.zeros_like(own[name]) if grad is None else grad
                    for own, grad in zip(leaves, grads, strict=True)
                ]
            )
    return found


def _sum(counts: Iterable[Counts]) -> Counts:
    first, *rest = counts
    for other in rest:
        first = first + other
    return first


def _add(parts: Sequence[Losses]) -> Losses:
    """The losses of a batch whose parts these are."""
    values: dict[str, Any] = {
        each.name: torch.stack([getattr(part, each.name).detach() for part in parts]).sum()
        for each in fields(Losses)
    }
    return Losses(**values)
