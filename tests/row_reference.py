"""The row optimizers in float64, one row at a time, and small tables that follow them."""

from __future__ import annotations

import math

import torch

from thawline.tables import LocalTable, RowRules, make_optimizer

ROWS, DIM = 12, 4
NAMES = ("row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd")


def make_table(
    name, *, learning_rate=0.1, padding_row=0, dtype=torch.float32, trainable=True, **rules
):
    """A table of 12 rows, the same every time."""
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    return LocalTable(
        weight.to(dtype),
        optimizer=make_optimizer(name, ROWS, DIM),
        rules=RowRules(**rules),
        learning_rate=learning_rate,
        padding_row=padding_row,
        trainable=trainable,
    )


def make_steps(count=5, seed=1):
    """Lookups with duplicates and padding; rows 10 and 11 never occur."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 10, (15,), generator=generator),
            torch.randn(15, DIM, generator=generator),
        )
        for _ in range(count)
    ]


def run(table, steps):
    for rows, grad in steps:
        table.lookup(rows).apply(grad)


def mask_of(*rows):
    """Bool `[12]`, true at these rows."""
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


class Reference:
    """One row at a time, in float64, with the formulas of the papers.

    `open` holds the rows that train; whoever changes it says which of them start afresh.
    """

    def __init__(self, name, weight, learning_rate, *, padding=(0,)):
        self.name, self.lr = name, learning_rate
        self.weight = weight.double().clone()
        self.padding = set(padding)
        self.open = set(range(ROWS))
        self.sum, self.first, self.second, self.count = {}, {}, {}, {}

    def reset(self, rows):
        for state in (self.sum, self.first, self.second, self.count):
            for row in rows:
                state.pop(row, None)

    def step(self, rows, grad):
        gradients = {}
        for row, piece in zip(rows.tolist(), grad.double(), strict=True):
            gradients[row] = gradients.get(row, 0) + piece
        touched = self.open if self.name == "dense-adam" else self.open & gradients.keys()
        for row in touched - self.padding:
            g = gradients.get(row, torch.zeros(DIM).double())
            self.weight[row] -= self.lr * self.direction(row, g)

    def direction(self, row, g):
        if self.name == "sgd":
            return g
        if self.name == "row-wise-adagrad":
            self.sum[row] = self.sum.get(row, 0.0) + float((g * g).mean())
            return g / (math.sqrt(self.sum[row]) + 1e-8)
        if self.name == "adagrad":
            self.sum[row] = self.sum.get(row, torch.zeros(DIM).double()) + g * g
            return g / (self.sum[row].sqrt() + 1e-8)
        self.count[row] = t = self.count.get(row, 0) + 1
        self.first[row] = 0.9 * self.first.get(row, 0.0) + 0.1 * g
        self.second[row] = 0.999 * self.second.get(row, 0.0) + 0.001 * g * g
        corrected = self.second[row] / (1 - 0.999**t)
        return self.first[row] / (1 - 0.9**t) / (corrected.sqrt() + 1e-8)
