"""A gather of single rows: what an `EmbeddingBag` with one id a bag computes, and its gradient.

`torch.ops.thawline.gather` is opaque to the compiler: `torch.compile(fullgraph=True)` keeps it as
one call, and an id outside the table raises by name, compiled or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thawline.errors import TrainingError


def gather(weight: Tensor, rows: Tensor) -> Tensor:
    """Reads rows of a table.

    A weight that needs no gradient is read by a plain `index_select` that leaves no graph. The
    gradient of one that does is dense: `[N, d]`, duplicates summed in one pass, in a fixed order.

    Args:
        weight: `[N, d]`.
        rows: `[...]`, int32 or int64, duplicates welcome.

    Returns:
        `[..., d]`.

    Raises:
        TrainingError: A row outside the table; the message names it. On CUDA a check would make
            each step wait for the device, so there it is made under
            `torch.autograd.detect_anomaly()` alone; without it, CUDA's own assertion ends the
            process and names no row.
    """
    if needs_graph(weight):
        gathered: Tensor = _gather(weight, rows)
        return gathered
    return read_rows(weight, rows)


def needs_graph(weight: Tensor) -> bool:
    """Whether a read of `weight` goes through the operator: for its gradient or a compiler."""
    return torch.compiler.is_compiling() or (weight.requires_grad and torch.is_grad_enabled())


def read_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """`weight[rows]` for a weight `[N, d]` and rows `[...]`; see `gather` for its errors."""
    flat = rows.reshape(-1)
    if weight.is_cuda and torch.is_anomaly_enabled():
        _raise_outside(flat, len(weight))
    try:
        read = weight.index_select(0, flat)
    except (IndexError, RuntimeError):
        _raise_outside(flat, len(weight))
        raise
    return read.view(*rows.shape, weight.shape[1])


def sum_rows(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Adds each gradient to its row, in an order that does not change from run to run.

    `index_add_` has such an order on a CPU; on CUDA it adds atomically, in any order, and the
    sort under `embedding_dense_backward` has one. (Of half-precision gradients the latter would
    lose much on a CPU, where it adds in their own dtype.)

    Args:
        grad: `[n, d]`.
        rows: `[n]`, int32 or int64, each in `[0, num_rows)`.
        num_rows: Rows of the sum.

    Returns:
        `[num_rows, d]` in `grad`'s dtype; zero where a row has no gradient.
    """
    if grad.is_cuda:
        return torch.ops.aten.embedding_dense_backward(grad, rows, num_rows, -1, False)
    return grad.new_zeros(num_rows, grad.shape[1]).index_add_(0, rows, grad)


def _raise_outside(rows: Tensor, num_rows: int) -> None:
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise TrainingError(
            f"row {int(outside[0])} is outside a table of {num_rows} rows",
            "use the table and the dataset that were made from the same catalog",
        )


@torch.library.custom_op("thawline::gather", mutates_args=())
def _gather(weight: Tensor, rows: Tensor) -> Tensor:
    return read_rows(weight, rows)


@torch.library.custom_op("thawline::gather_backward", mutates_args=())
def _gather_backward(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return sum_rows(grad.reshape(-1, grad.shape[-1]), rows.reshape(-1), num_rows)


@_gather.register_fake
def _(weight: Tensor, rows: Tensor) -> Tensor:
    return weight.new_empty(*rows.shape, weight.shape[1])


@_gather_backward.register_fake
def _(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.shape[-1])


def _keep_for_gather(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    weight, rows = inputs
    ctx.save_for_backward(rows)
    ctx.num_rows = weight.shape[0]


def _differentiate_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gather_backward(grad, *ctx.saved_tensors, ctx.num_rows), None


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _gather(grad, *ctx.saved_tensors), None, None


_gather.register_autograd(_differentiate_gather, setup_context=_keep_for_gather)
_gather_backward.register_autograd(_differentiate_backward, setup_context=_keep_for_backward)
