"""How far the rows of an ID table have gone from where they started."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK_ROWS = 1 << 18


def row_drift(now: Tensor, first: Tensor, tiers: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean distance of each tier's rows from their first values, in units of their mean norm.

    A tier's drift is `sum ‖w - w₀‖ / sum ‖w₀‖` over its rows: 1 means that a row has typically
    gone as far as it was long. It is left out where there are no rows, or only rows of zeros.

    Args:
        now: `[N, d]`.
        first: `[N, d]`, the rows before fine-tuning.
        tiers: Bool `[N]` by tier.
    """
    count = len(now)
    moved, length = torch.empty(count), torch.empty(count)
    for start in range(0, count, CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        before = first[part].float()
        moved[part] = torch.linalg.vector_norm(now[part].float() - before, dim=1).cpu()
        length[part] = torch.linalg.vector_norm(before, dim=1).cpu()
    drift = {}
    for name, rows in tiers.items():
        chosen = rows.cpu()
        whole = float(length[chosen].sum(dtype=torch.float64))
        if whole > 0:
            drift[name] = float(moved[chosen].sum(dtype=torch.float64)) / whole
    return drift
