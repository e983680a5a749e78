"""A model on a dataset that it was not trained on: the dataset's batches in the model's own rows.

Both know an item, a context value and an id of a further table by name, so a batch can be said in
the numbers of either. What the model does not know becomes what it has for the unknown, as when it
is served: its row for unknown items, the code for missing values, row 0 of a further table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn import functional

from thawline.data.batches import Batch, padded_width
from thawline.data.ids import IdTableSpec
from thawline.data.manifest import FIRST_ROW, PADDING_ROW, UNKNOWN_ROW, Catalog, Dataset
from thawline.errors import DataError
from thawline.model.bundle import Bundle


@dataclass(frozen=True)
class IdHashes:
    """A table as wide as the hashes of ids: a row of it is a hash plus one, 0 a missing id."""

    column: str
    of: Literal["request", "item"] = "request"
    rows: int = 1 << 63
    hashed: bool = True


class Translator:
    """Scores batches of a dataset with a model of another."""

    def __init__(self, bundle: Bundle, dataset: Dataset) -> None:
        """Prepares the numbers of items, context values and actions.

        Raises:
            DataError: Item ids of another type, or no action in common.
        """
        meta, manifest = bundle.meta, dataset.manifest
        self.bundle = bundle
        self.actions = [action for action in manifest.actions if action in meta.actions]
        """Those that both know, in the dataset's order."""
        if not self.actions:
            raise DataError(
                f"the model predicts {', '.join(meta.actions)}, {dataset.root} holds "
                f"{', '.join(manifest.actions)}",
                "compare models of the same actions (for the gate: set gate.champion to another "
                "model, or to none)",
            )
        stored = manifest.ids.get("request", {})
        self._requests_ids = {
            name: spec.column
            for name, spec in meta.tables.items()
            if spec.of == "request" and spec.column in stored
        }
        self.id_columns: dict[str, IdTableSpec] = {
            f"hash of {column}": IdHashes(column) for column in self._requests_ids.values()
        }
        """What a reader's `id_columns` must hold beside those of other models."""
        # Of an action that the model does not know, a head beyond its last one.
        self._heads = torch.tensor(
            [
                meta.actions.index(action) if action in meta.actions else len(meta.actions)
                for action in manifest.actions
            ]
        )
        self._rows = torch.from_numpy(item_rows(dataset.catalog, bundle.catalog))
        self._history_actions = torch.from_numpy(_action_codes(manifest.actions, meta.actions))
        self._context = [
            _context_codes(manifest.context, name, values) for name, values in meta.context.items()
        ]
        self.notes = _notes(bundle, dataset, self._rows)
        """What the model cannot see of this dataset, in words."""

    def score(self, batch: Batch) -> Tensor:
        """Logits `[B, C, A]` of the dataset's actions; NaN of those that the model lacks."""
        logits = self.bundle.score(self.translate(batch))
        padded = functional.pad(logits, (0, 1), value=torch.nan)
        return padded[..., self._heads.to(logits.device)]

    def translate(self, batch: Batch) -> Batch:
        """The batch in the model's rows and codes; labels, log q and the oracle stay as they are.

        Args:
            batch: Of the dataset, on the CPU, with the ids of `id_columns`.
        """
        batch = self._shortened(batch)
        candidate_row = self._rows[batch.candidate_row]
        ids = {}
        for name, spec in self.bundle.meta.tables.items():
            if spec.of == "item":
                ids[name] = self.bundle.ids.of_items[name][candidate_row]
            elif name in self._requests_ids:
                # Back from the rows of `IdHashes`: a missing id has hash 0 and row 0.
                hashes = (batch.ids[f"hash of {spec.column}"] - 1).clamp(min=0).numpy()
                ids[name] = torch.from_numpy(self.bundle.ids.rows(name, spec, hashes))
            else:
                ids[name] = torch.zeros_like(batch.request_id)
        columns = [
            torch.zeros_like(batch.request_id)
            if known is None
            else known[1][batch.context[:, known[0]]]
            for known in self._context
        ]
        return replace(
            batch,
            history_row=self._rows[batch.history_row],
            history_action=self._history_actions[batch.history_action],
            candidate_row=candidate_row,
            context=torch.stack(columns, dim=1) if columns else batch.context[:, :0],
            ids=ids,
        )

    def _shortened(self, batch: Batch) -> Batch:
        """The batch with no more of each history than the model reads: its newest items."""
        longest = self.bundle.meta.history_length
        lengths = (batch.history_row != PADDING_ROW).sum(1)
        if int(lengths.max() if len(lengths) else 0) <= longest:
            return batch
        width = min(padded_width(longest), batch.history_row.shape[1])
        place = torch.arange(width) + (lengths - longest).clamp(min=0)[:, None]
        kept = torch.arange(width) < lengths.clamp(max=longest)[:, None]
        place = place.clamp(max=batch.history_row.shape[1] - 1)

        def newest(values: Tensor) -> Tensor:
            return values.gather(1, place) * kept

        return replace(
            batch,
            history_row=newest(batch.history_row),
            history_action=newest(batch.history_action),
            history_age=newest(batch.history_age),
        )


def item_rows(catalog: Catalog, known: Catalog) -> np.ndarray:
    """The row in one catalog of each row of another.

    An item that `known` holds has its row there, one that it does not has its bucket, or the row
    for unknown items where there are none. What lies in a bucket of `catalog` has no id any more:
    its bucket in `known` follows where the numbers of buckets divide.

    Args:
        catalog: Of the dataset.
        known: Of the model.

    Returns:
        int64 [catalog.num_rows].

    Raises:
        DataError: Item ids of another type.
    """
    if known.item_id.type != catalog.item_id.type:
        raise DataError(
            f"item ids are {catalog.item_id.type} in the dataset, but {known.item_id.type} in the "
            "model's catalog",
            "compare models of one kind of item ids (for the gate: set gate.champion to another "
            "model, or to none)",
        )
    rows = np.full(catalog.num_rows, UNKNOWN_ROW, np.int64)
    rows[PADDING_ROW] = PADDING_ROW
    place = pc.index_in(catalog.item_id, value_set=known.item_id, skip_nulls=True)
    place = place.fill_null(-1).to_numpy(zero_copy_only=False)
    found = place >= 0
    rows[FIRST_ROW:][found] = place[found] + FIRST_ROW
    buckets, own = known.rows.buckets, catalog.rows.buckets
    if buckets:
        named = catalog.item_id.is_valid().to_numpy(zero_copy_only=False)
        for line in np.flatnonzero(named & ~found).tolist():
            bucket = _hash63(str(catalog.item_id[line].as_py())) % buckets
            rows[FIRST_ROW + line] = known.rows.first_bucket + bucket
        if own and own % buckets == 0:
            first = catalog.rows.first_bucket
            rows[first : first + own] = known.rows.first_bucket + np.arange(own) % buckets
    return rows


def _hash63(text: str) -> int:
    """As the data stage's engine hashes ids: the first 63 bits of the MD5."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _action_codes(actions: list[str], known: list[str]) -> np.ndarray:
    """For each code of a history action, the model's: the same actions in its own bits."""
    codes = np.zeros(1 << len(actions), np.int64)
    numbers = np.arange(len(codes))
    for bit, action in enumerate(actions):
        if action in known:
            codes |= ((numbers >> bit) & 1) << known.index(action)
    # Of an action that the model does not know, what it takes where none is given.
    codes[(codes == 0) & (numbers > 0)] = 1 << (len(known) - 1)
    return codes


def _context_codes(
    context: Mapping[str, list[str]], name: str, known: list[str]
) -> tuple[int, Tensor] | None:
    """A column's place in the dataset and the model's code of each of its codes; None without."""
    if name not in context:
        return None
    places = pc.index_in(pa.array(context[name], pa.string()), pa.array(known, pa.string()))
    codes = np.concatenate([[0], places.fill_null(-1).to_numpy() + 1]).astype(np.int64)
    return list(context).index(name), torch.from_numpy(codes)


def _notes(bundle: Bundle, dataset: Dataset, rows: Tensor) -> list[str]:
    meta, manifest = bundle.meta, dataset.manifest
    notes = []
    items = dataset.catalog.num_rows - FIRST_ROW
    unknown = int((rows[FIRST_ROW:] == UNKNOWN_ROW).sum())
    if unknown:
        notes.append(f"{unknown:,} of the catalog's {items:,} items have no row of their own in it")
    absent = [name for name in meta.context if name not in manifest.context]
    if absent:
        notes.append(f"the dataset lacks the context column {', '.join(absent)} that it reads")
    stored = manifest.ids.get("request", {})
    lost = [n for n, s in meta.tables.items() if s.of == "request" and s.column not in stored]
    if lost:
        notes.append(f"the dataset lacks the ids of its table {', '.join(lost)}")
    if manifest.history_length < meta.history_length:
        notes.append(
            f"histories hold {manifest.history_length} items here, {meta.history_length} where "
            "it was trained"
        )
    return notes
