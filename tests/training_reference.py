"""Fine-tuning as slow, obvious float64: dense autograd, rows updated one by one."""

from __future__ import annotations

import copy

import torch
from tensors import to_double

EPS = 1e-8


class ReferenceTable:
    """Row-wise Adagrad, row by row; `trains(step, row)` says which rows move."""

    def __init__(self, table, trains, *, renew=lambda epoch: None):
        self.weight = table.weight.double().clone().requires_grad_()
        self.rate = table.learning_rate
        self.state = torch.zeros(len(self.weight), dtype=torch.float64)
        self.trains = trains
        self.renew = renew
        self.late = self.weight

    @torch.no_grad()
    def start_epoch(self, epoch):
        self.past = []
        rows = self.renew(epoch)
        if rows is not None:
            self.weight.copy_(rows)
            self.weight[0] = 0
            self.state.zero_()

    @torch.no_grad()
    def update(self, step, rows, factor):
        for row in sorted(set(rows.tolist()) - {0}):
            if not self.trains(step, row):
                continue
            gradient = self.late.grad[row]
            self.state[row] += gradient.square().mean()
            self.weight[row] -= self.rate * factor * gradient / (self.state[row].sqrt() + EPS)

    def thaw(self, step):
        """Forgets the state of the rows that start to train with this step."""
        for row in range(1, len(self.weight)):
            if self.trains(step, row) and not self.trains(step - 1, row):
                self.state[row] = 0

    def changes(self, step):
        return any(self.trains(step, row) != self.trains(step - 1, row) for row in range(1, 5))

    def read(self, staleness):
        """The rows as they were `staleness` updates ago, but not before they last changed hands."""
        self.past.append(self.weight.detach().clone())
        self.late = self.past[max(0, len(self.past) - 1 - staleness)].clone().requires_grad_()
        return self.late


class ReferenceAdam:
    """Adam, tensor by tensor; `trains(step)` says whether a part moves."""

    def __init__(self, parameters, rate, trains, factor=lambda step: 1.0):
        self.parameters = list(parameters)
        self.rate, self.trains, self.factor = rate, trains, factor
        self.forget()

    def forget(self):
        self.first = [torch.zeros_like(own) for own in self.parameters]
        self.second = [torch.zeros_like(own) for own in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, step):
        if not self.trains(step):
            return
        if step and not self.trains(step - 1):
            self.forget()
        self.count += 1
        for own, first, second in zip(self.parameters, self.first, self.second, strict=True):
            if own.grad is None:
                continue
            first.mul_(0.9).add_(0.1 * own.grad)
            second.mul_(0.999).add_(0.001 * own.grad**2)
            corrected = (second / (1 - 0.999**self.count)).sqrt() + EPS
            own -= self.rate * self.factor(step) * first / (1 - 0.9**self.count) / corrected


def reference_run(trainer, tables, parts, *, factor=lambda step: 1.0, content=None, staleness=0):
    """Trains copies of a trainer's ranker and tables.

    Args:
        trainer: A fresh one; it is left as it is.
        tables: `ReferenceTable` by name.
        parts: From a component's name to (rate, trains) or (rate, trains, factor); a part that is
            not named always trains at the rate of `dense`.
        factor: Of the tables' learning rates, by step.
        content: Content vectors by row.
        staleness: Updates that a lookup misses; none across a step at which a table changes.

    Returns:
        The trained ranker, in float64.
    """
    ranker = copy.deepcopy(trainer.ranker).double()
    adams = [
        ReferenceAdam(own, *parts.get(name, (*parts["dense"][:1], lambda step: True)))
        for name, own in ranker.components().items()
    ]
    step = 0
    for epoch in range(trainer.schedule.epochs):
        for table in tables.values():
            table.start_epoch(epoch)
        for batch in map(to_double, trainer.reader.batches):
            rows = ranker.rows(batch)
            for table in tables.values():
                if any(other.changes(step) for other in tables.values()):
                    table.past = []
                table.thaw(step)
            ranker.zero_grad()
            embeddings = {name: table.read(staleness)[rows[name]] for name, table in tables.items()}
            if content is not None:
                embeddings["content"] = content.double()[rows["content"]]
            ranker.loss(batch, embeddings).total.backward()
            for name, table in tables.items():
                table.update(step, rows[name], factor(step))
            for adam in adams:
                adam.step(step)
            step += 1
    return ranker
