"""Moving cold rows along with the warm ones once training is over.

Rows without a positive in the fine-tune window stay near where pretraining left them, while the
others drift. Each repair estimates from the warm rows' drift `w - w₀` how far a cold row would have
drifted, from its first value `w₀`, and moves it by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from thawline.errors import TrainingError

Repair = Literal["mean-drift", "ridge", "neighbours"]
REPAIRS: tuple[Repair, ...] = get_args(Repair)

RIDGE = 1e-3
"""Strength of the ridge, as a share of the mean variance of a coordinate of the warm rows."""
NEIGHBOURS = 10
WARM_CHUNK = 1 << 14
COLD_CHUNK = 1 << 10
"""Rows at once: 64 MB of cosines. The search takes time as cold rows times warm rows."""

Estimate = Callable[[Tensor], Tensor]
"""From first values `[n, d]` of cold rows to estimates of their drift `[n, d]`, both float32."""


def require_warm(warm: Tensor) -> None:
    """Sees to it, best before training, that a repair has rows to learn from.

    Args:
        warm: Which rows are warm, bool `[N]`.

    Raises:
        TrainingError: None is.
    """
    if not warm.any():
        raise TrainingError(
            "finetune.cold_rows has no warm row to learn a drift from: no item of the catalog has "
            "a positive in the fine-tune window",
            "widen windows.finetune_days, or set finetune.cold_rows=keep",
        )


@torch.no_grad()
def repair_cold_rows(
    weight: Tensor, first: Tensor, how: Repair, *, warm: Tensor, cold: Tensor
) -> None:
    """Moves the cold rows of a table in place; no other row changes a bit.

    Args:
        weight: `[N, d]`, float32 or bfloat16: the rows after training.
        first: `[N, d]`: the rows that training started with.
        how: `mean-drift` moves every cold row by the mean drift of the warm rows. `ridge` fits the
            drift of the warm rows as an affine map of their first values, `w - w₀ ≈ w₀ A + b`, with
            a penalty on `A` (not on `b`) of `RIDGE` times the mean variance of a coordinate, and
            applies it to each cold row. `neighbours` moves a cold row by the mean drift of the
            `NEIGHBOURS` warm rows whose first values have the highest cosine with its own.
        warm: Which rows to learn from, bool `[N]`.
        cold: Which rows to move, bool `[N]`; none of them is warm.

    Raises:
        TrainingError: No row is warm.
    """
    require_warm(warm)
    fit = {"mean-drift": _mean_drift, "ridge": _ridge, "neighbours": _neighbours}[how]
    estimate = fit(weight, first, warm.nonzero().squeeze(1))
    for rows in cold.nonzero().squeeze(1).split(COLD_CHUNK):
        start = first.index_select(0, rows).float()
        moved = weight.index_select(0, rows).float() + estimate(start)
        weight.index_copy_(0, rows, moved.to(weight.dtype))


def _mean_drift(weight: Tensor, first: Tensor, warm: Tensor) -> Estimate:
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for rows in warm.split(WARM_CHUNK):
        total += _read(weight, rows).sub_(_read(first, rows)).sum(0)
    mean = (total / len(warm)).float()
    return lambda start: mean.expand_as(start)


def _ridge(weight: Tensor, first: Tensor, warm: Tensor) -> Estimate:
    dim = weight.shape[1]
    zeros = torch.zeros(dim, dtype=torch.float64, device=weight.device)
    mean_start, mean_drift = zeros.clone(), zeros.clone()
    for rows in warm.split(WARM_CHUNK):
        start = _read(first, rows)
        mean_start += start.sum(0) / len(warm)
        mean_drift += (_read(weight, rows) - start).sum(0) / len(warm)
    within, across = zeros.new_zeros(dim, dim), zeros.new_zeros(dim, dim)
    for rows in warm.split(WARM_CHUNK):
        start = _read(first, rows)
        drift = _read(weight, rows) - start - mean_drift
        start -= mean_start
        within += start.T @ start / len(warm)
        across += start.T @ drift / len(warm)
    penalty = RIDGE * within.diagonal().mean()
    # One warm row, or equal ones, leave nothing to fit: the pseudo-inverse then gives A = 0.
    slope = torch.linalg.pinv(within + penalty * torch.eye(dim).to(within), hermitian=True) @ across
    return lambda start: ((start.double() - mean_start) @ slope + mean_drift).float()


def _neighbours(weight: Tensor, first: Tensor, warm: Tensor) -> Estimate:
    def estimate(start: Tensor) -> Tensor:
        queries = functional.normalize(start, dim=1)
        cosine = queries.new_empty(len(queries), 0)
        found = warm.new_empty(len(queries), 0)
        for rows in warm.split(WARM_CHUNK):
            keys = functional.normalize(first.index_select(0, rows).float(), dim=1)
            cosine = torch.cat([cosine, queries @ keys.T], dim=1)
            found = torch.cat([found, rows.expand(len(queries), -1)], dim=1)
            cosine, best = cosine.topk(min(NEIGHBOURS, cosine.shape[1]), dim=1)
            found = found.gather(1, best)
        return (weight[found].float() - first[found].float()).mean(1)

    return estimate


def _read(weight: Tensor, rows: Tensor) -> Tensor:
    return weight.index_select(0, rows).double()
