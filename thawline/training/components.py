"""What a schedule acts on: ID tables, and parts of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thawline.tables import IdTable
from thawline.training.schedule import Plan, Schedule


@dataclass(frozen=True)
class TrainedTable:
    """An ID table, and what its plan may need."""

    table: IdTable
    tiers: Mapping[str, Tensor] = field(default_factory=dict)
    """Which rows, bool `[N]`, are of each tier; each row is of one."""
    first: Tensor | None = None
    """The rows `[N, d]` that the run starts with, for a plan that goes back to them."""
    fresh: Callable[[int], Tensor] | None = None
    """From an epoch to new random rows `[N, d]`, for a plan that wants them."""


class TableComponent:
    """Freezes, thaws and paces an ID table as its plan says."""

    def __init__(self, trained: TrainedTable, plan: Plan, *, factor: float = 1.0) -> None:
        """Takes the table's learning rate as it is now, times `factor`, for its own."""
        self.trained = trained
        self.table = trained.table
        self.plan = plan
        self.learning_rate = trained.table.learning_rate * factor
        self._open: frozenset[str] = frozenset()
        if plan.tiers:
            self.table.freeze()

    def follow(self, step: int, steps_per_epoch: int) -> None:
        """Brings the table into the state in which it is to make a step, before its lookup."""
        trains = self.plan.trains(step, steps_per_epoch)
        if trains and step and step % steps_per_epoch == 0:
            self._renew(step // steps_per_epoch)
        if self.plan.tiers:
            self._follow_tiers(step, steps_per_epoch)
        elif trains and not self.table.trainable:
            self.table.thaw(reset_state=self.plan.reset_state)
        elif not trains and self.table.trainable:
            self.table.freeze()
        if trains:
            factor = self.plan.factor(step, steps_per_epoch)
            self.table.learning_rate = self.learning_rate * factor

    def resume(self, step: int, steps_per_epoch: int) -> None:
        """Takes it that the table is as the step before `step` left it."""
        self._open = self.plan.open_tiers(step - 1, steps_per_epoch)

    def changes(self, step: int, steps_per_epoch: int) -> bool:
        """Whether rows open, close or are renewed when a step begins."""
        plan = self.plan
        before, now = (
            (plan.trains(at, steps_per_epoch), plan.open_tiers(at, steps_per_epoch))
            for at in (step - 1, step)
        )
        renewed = plan.renewal is not None and now[0] and step % steps_per_epoch == 0
        return before != now or renewed

    def _follow_tiers(self, step: int, steps_per_epoch: int) -> None:
        opened = self.plan.open_tiers(step, steps_per_epoch)
        for name in sorted(self._open - opened):
            self.table.freeze(self.trained.tiers[name])
        for name in sorted(opened - self._open):
            rows = self.trained.tiers[name]
            self.table.thaw(reset_state=self.plan.reset_state, rows=rows)
        self._open = opened

    def _renew(self, epoch: int) -> None:
        if self.plan.renewal == "first" and self.trained.first is not None:
            self.table.replace(self.trained.first, reset_state=self.plan.reset_state)
        elif self.plan.renewal == "random" and self.trained.fresh is not None:
            self.table.replace(self.trained.fresh(epoch), reset_state=self.plan.reset_state)


class Network:
    """The parts of the network with their plans, under one Adam."""

    def __init__(
        self,
        parts: Mapping[str, Sequence[nn.Parameter]],
        schedule: Schedule,
        *,
        learning_rate: float,
        learning_rates: Mapping[str, float] | None = None,
    ) -> None:
        """Makes the optimizer; parts with the same plan and rate share a group of it.

        Args:
            parts: Parameters of each part; each parameter is in one.
            schedule: The parts' plans.
            learning_rate: Of all parts.
            learning_rates: Of some, by name.
        """
        groups: dict[tuple[Plan, float], list[nn.Parameter]] = {}
        for name, parameters in parts.items():
            rate = (learning_rates or {}).get(name, learning_rate)
            groups.setdefault((schedule.of(name), rate), []).extend(parameters)
        groups = {key: parameters for key, parameters in groups.items() if parameters}
        self._plans = list(groups)
        self.optimizer = torch.optim.Adam(
            [{"params": parameters, "lr": rate} for (_, rate), parameters in groups.items()],
            fused=True,
        )

    def follow(self, step: int, steps_per_epoch: int) -> None:
        """Brings each part into the state in which it is to make a step."""
        for (plan, rate), group in zip(self._plans, self.optimizer.param_groups, strict=True):
            trains = plan.trains(step, steps_per_epoch)
            if trains != group["params"][0].requires_grad:
                for parameter in group["params"]:
                    parameter.requires_grad_(trains)
                    parameter.grad = None
                    if trains and plan.reset_state:
                        self.optimizer.state.pop(parameter, None)
            if trains:
                group["lr"] = rate * plan.factor(step, steps_per_epoch)

    def resume(self, step: int, steps_per_epoch: int) -> None:
        """Opens and closes the parts as the step before `step` left them."""
        for (plan, _), group in zip(self._plans, self.optimizer.param_groups, strict=True):
            for parameter in group["params"]:
                parameter.requires_grad_(plan.trains(step - 1, steps_per_epoch))

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's state by the number of the parameter."""
        return {
            f"{index}.{name}": value
            for index, parameter in enumerate(self._parameters())
            for name, value in self.optimizer.state.get(parameter, {}).items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that wait for Adam's step, by the number of the parameter."""
        return {
            str(index): parameter.grad
            for index, parameter in enumerate(self._parameters())
            if parameter.grad is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` and `gradients` gave."""
        self.optimizer.state.clear()
        parameters = list(self._parameters())
        for parameter in parameters:
            parameter.grad = None
        for key, value in state.items():
            index, name = key.split(".")
            parameter = parameters[int(index)]
            self.optimizer.state[parameter][name] = value.to(parameter.device, copy=True)
        for index, value in gradients.items():
            parameter = parameters[int(index)]
            parameter.grad = value.to(parameter.device, copy=True)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]
