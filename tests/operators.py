"""Watches which operators of torch run, and on how much."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Keeps the names of the operators run in its block and the size of what each gave."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = operator(*args, **(kwargs or {}))
        self.names.add(operator._schema.name)
        if isinstance(given, torch.Tensor):
            self.largest = max(self.largest, given.numel())
        return given
