"""Tables of tens of rows, such as context columns and the actions of a history.

So few rows each get thousands of gradients a step. Their sum is either a product of matrices,
`one_hot(ids)ᵀ @ grad`, or a scatter; which is quicker depends on the device and the shape.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thawline.errors import ConfigError
from thawline.tables.choices import Choices, device_name
from thawline.tables.gather import gather, needs_graph, read_rows, sum_rows

Backward = Literal["auto", "one-hot", "scatter"]

MOST_ROWS = 256
"""Beyond so many rows, `auto` is `scatter` without a measurement."""

ONE_HOT_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Most elements of a one-hot matrix: it should stay in a CPU's cache, and keep a GPU busy."""

CHOICES = Choices("small_tables.json")


class SmallTable(nn.Module):
    """An embedding table of few rows, in place of `nn.Embedding`.

    Forward is a plain gather. With `backward="auto"` the first backward of a shape measures both
    ways on its own gradients; the choice is kept in `~/.cache/thawline/small_tables.json` (or
    under `$XDG_CACHE_HOME`) by device, torch version, threads and shape, the number of ids
    rounded up to a power of two. One machine thus trains the same bits in each run. Name the way
    instead where runs must agree and no such file outlives them, as in containers without a
    volume; and warm up before a CUDA graph is captured, since a measurement cannot be.
    """

    def __init__(self, rows: int, dim: int, *, backward: Backward = "auto") -> None:
        """Makes a table of normal rows, as `nn.Embedding` does.

        Args:
            rows: Number of rows.
            dim: Their width.
            backward: How gradients are summed by row: `one-hot`, `scatter`, or whichever is
                quicker.

        Raises:
            ConfigError: `backward` is none of these.
        """
        super().__init__()
        if backward not in get_args(Backward):
            raise ConfigError(
                f"{backward!r} is no backward of a small table",
                f"use one of {', '.join(get_args(Backward))}",
            )
        self.weight = nn.Parameter(torch.randn(rows, dim))
        self.backward = backward

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids` `[...]` (int32 or int64), `[..., dim]`.

        Raises:
            TrainingError: An id outside the table; the message names it. On CUDA see `gather`.
        """
        if needs_graph(self.weight):
            looked_up: Tensor = _small_table(self.weight, ids, self.backward)
            return looked_up
        return read_rows(self.weight, ids)

    def extra_repr(self) -> str:
        """What `print` shows of the table."""
        rows, dim = self.weight.shape
        return f"{rows}, {dim}, backward={self.backward!r}"


def sum_one_hot(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """`one_hot(ids)ᵀ @ grad`, in pieces whose one-hot matrix is of bounded size.

    The product is in `grad`'s dtype whatever autocast says; pieces are added in float32 at least.
    A gradient that is not finite spoils every row, since the product multiplies it by 0.

    Args:
        grad: `[n, d]`.
        ids: `[n]`, int32 or int64, each in `[0, rows)`.
        rows: Rows of the sum.

    Returns:
        `[rows, d]` in `grad`'s dtype.
    """
    unit = torch.eye(rows, dtype=grad.dtype, device=grad.device)
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros(rows, grad.shape[1], dtype=wide, device=grad.device)
    most = ONE_HOT_ELEMENTS.get(grad.device.type, ONE_HOT_ELEMENTS["cuda"])
    piece = max(1, most // rows)
    with torch.autocast(grad.device.type, enabled=False):
        for some, some_ids in zip(grad.split(piece), ids.split(piece), strict=True):
            total += unit.index_select(0, some_ids).t() @ some
    return total.to(grad.dtype)


WAYS = {"one-hot": sum_one_hot, "scatter": sum_rows}


def choose_way(grad: Tensor, ids: Tensor, rows: int) -> str:
    """The quicker of `WAYS` for gradients `[n, d]` of this device, dtype and shape."""
    if rows > MOST_ROWS or not len(ids):
        return "scatter"
    count = 1 << (len(ids) - 1).bit_length()
    key = (
        f"{_device_name(grad.device)}, torch {torch.__version__}, {torch.get_num_threads()} "
        f"threads: {rows} x {grad.shape[1]} {str(grad.dtype).removeprefix('torch.')}, {count} ids"
    )
    ways = {name: functools.partial(way, grad, ids, rows) for name, way in WAYS.items()}
    return CHOICES.choose(key, ways, functools.partial(_wait, grad.device))


_device_name = functools.cache(device_name)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.library.custom_op("thawline::small_table", mutates_args=())
def _small_table(weight: Tensor, ids: Tensor, backward: str) -> Tensor:
    return read_rows(weight, ids)


@torch.library.custom_op("thawline::small_table_backward", mutates_args=())
def _small_table_backward(grad: Tensor, ids: Tensor, rows: int, backward: str) -> Tensor:
    flat, flat_ids = grad.reshape(-1, grad.shape[-1]), ids.reshape(-1)
    way = choose_way(flat, flat_ids, rows) if backward == "auto" else backward
    return WAYS[way](flat, flat_ids, rows)


@_small_table.register_fake
def _(weight: Tensor, ids: Tensor, backward: str) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@_small_table_backward.register_fake
def _(grad: Tensor, ids: Tensor, rows: int, backward: str) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1])


def _keep_for_table(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    weight, ids, backward = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.backward = weight.shape[0], backward


def _differentiate_table(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _small_table_backward(grad, *ctx.saved_tensors, ctx.rows, ctx.backward), None, None


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return gather(grad, *ctx.saved_tensors), None, None, None


_small_table.register_autograd(_differentiate_table, setup_context=_keep_for_table)
_small_table_backward.register_autograd(_differentiate_backward, setup_context=_keep_for_backward)
