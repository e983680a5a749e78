"""Rows of a table of one catalog or vocabulary, brought to another."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from thawline.data.manifest import FIRST_ROW, Catalog
from thawline.errors import DataError


def carry_rows(weight: Tensor, old: Catalog, new: Catalog, *, seed: int) -> Tensor:
    """Gives each item of a new catalog its row of a table over an old one.

    Padding, the unknown item and the buckets keep theirs (as long as there are as many buckets).
    Other rows start at random, as those of a new table do: normal, with standard deviation
    `d**-0.5`.

    Args:
        weight: `[old.num_rows, d]`, float32.
        old: The catalog of `weight`.
        new: The catalog of the result.
        seed: Of the new rows.

    Returns:
        `[new.num_rows, d]`, float32.

    Raises:
        DataError: `weight` has not the old catalog's number of rows, or the catalogs have no item
            in common.
    """
    if len(weight) != old.num_rows:
        raise DataError(
            f"a table of {len(weight)} rows does not belong to a catalog of {old.num_rows}",
            "use the table and the catalog of one folder together",
        )
    generator = torch.Generator().manual_seed(seed)
    dim = weight.shape[1]
    carried = torch.randn(new.num_rows, dim, generator=generator) * dim**-0.5
    source, target = _pairs(old, new)
    if not len(target):
        raise DataError(
            "the table and the dataset have no item in common",
            "pretrain on this dataset, or on one whose catalog it extends",
        )
    carried[target] = weight[source].to(carried.dtype)
    return carried


def carry_known(weight: Tensor, old: np.ndarray, new: np.ndarray, fresh: Tensor) -> Tensor:
    """Gives each id of a new vocabulary its row of a table over an old one.

    Args:
        weight: `[>= V + 1, d]`: rows 1 to V are those of `old`.
        old: int64 `[V]`, distinct hashes of ids.
        new: int64 `[W]`, distinct hashes of ids.
        fresh: `[>= W + 1, d]`, the rows of ids that are new, and those of none; it is left as it
            is.

    Returns:
        `fresh` with row `1 + j` of `weight[1 + i]` wherever `new[j] == old[i]`.
    """
    carried = fresh.clone()
    _, source, target = np.intersect1d(old, new, assume_unique=True, return_indices=True)
    carried[1 + torch.from_numpy(target)] = weight[1 + torch.from_numpy(source)].to(carried.dtype)
    return carried


def _pairs(old: Catalog, new: Catalog) -> tuple[Tensor, Tensor]:
    """Rows of the old table, and where they go."""
    if new.extends(old):
        rows = torch.arange(old.num_rows)
        return rows, rows
    if old.item_id.type != new.item_id.type:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    places = pc.index_in(new.item_id, value_set=old.item_id.drop_null(), skip_nulls=True)
    places = places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    found = np.flatnonzero(places >= 0)
    if not len(found):
        return torch.from_numpy(found), torch.from_numpy(found)
    old_rows = FIRST_ROW + np.flatnonzero(_has_id(old))
    source = [np.arange(FIRST_ROW), old_rows[places[found]]]
    target = [np.arange(FIRST_ROW), found + FIRST_ROW]
    if old.rows.buckets and old.rows.buckets == new.rows.buckets:
        buckets = np.arange(old.rows.buckets)
        source.append(buckets + old.rows.first_bucket)
        target.append(buckets + new.rows.first_bucket)
    return torch.from_numpy(np.concatenate(source)), torch.from_numpy(np.concatenate(target))


def _has_id(catalog: Catalog) -> np.ndarray:
    ids: pa.Array = catalog.item_id
    return ids.is_valid().to_numpy(zero_copy_only=False)
