"""Batches of requests: Parquet to padded tensors.

One background thread reads, shuffles and pads (`background`, `epochs`, `row_groups`, `ragged`);
negatives of logs without impressions come from `negatives`. Batches of pretraining sequences live
in `sequences` and can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from thawline.data.epochs import Epochs
from thawline.data.examples import Examples
from thawline.data.ids import IdRows, IdTableSpec, read_item_ids, require_ids, stored_as
from thawline.data.manifest import PADDING_ROW, Dataset, Split
from thawline.data.negatives import NegativeSampler
from thawline.data.popularity import log_shares
from thawline.data.ragged import WIDTH_MULTIPLE, Rows
from thawline.data.row_groups import RowGroups, decode_lists
from thawline.data.sequences import SequenceBatch, SequenceReader
from thawline.data.shards import Shard

__all__ = [
    "WIDTH_MULTIPLE",
    "Batch",
    "RequestReader",
    "SequenceBatch",
    "SequenceReader",
    "Shard",
    "padded_width",
]


def padded_width(length: int) -> int:
    """The width to which a history or sequence of `length` items is padded at most."""
    return -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


@dataclass(frozen=True)
class Batch:
    """B requests with histories of L and C candidates, A actions, K context columns.

    Histories and candidates start at index 0 and are padded with row 0. L is the longest history
    of the batch rounded up to a multiple of 8 (at least 8), C the most candidates.
    """

    request_id: Tensor
    """int64 [B]."""
    timestamp: Tensor
    """int64 [B]: microseconds since 1970 UTC."""
    history_row: Tensor
    """int64 [B, L]: oldest first."""
    history_action: Tensor
    """int64 [B, L]: bit `a` is `manifest.actions[a]`."""
    history_age: Tensor
    """float32 [B, L]: hours between the event and the request."""
    candidate_row: Tensor
    """int64 [B, C]."""
    candidate_mask: Tensor
    """bool [B, C]: False at padding and where no negative could be drawn."""
    candidate_log_q: Tensor
    """float32 [B, C]: log of the row's share of training positives, one added to each count; 0
    at padding."""
    labels: Tensor
    """float32 [B, C, A]: 0 or 1; 0 at padding and for drawn negatives."""
    context: Tensor
    """int64 [B, K]: codes in the order of `manifest.context`."""
    oracle: Tensor | None
    """float32 [B, C, A]: true probabilities of a simulated log, NaN for drawn negatives."""
    ids: dict[str, Tensor] = field(default_factory=dict)
    """int64 rows of each further ID table: [B], or [B, C] where the ids are the candidates'. Row 0
    is a missing or unknown id, and padding."""
    weight: Tensor | None = None
    """float64 [B]: how much each request counts, above 0; None: all alike."""

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def rows(self) -> Tensor:
        """int64 [B*L + B*C]: `history_row` flattened, then `candidate_row` flattened."""
        return torch.cat([self.history_row.flatten(), self.candidate_row.flatten()])

    def lookups(self) -> dict[str, Tensor]:
        """Rows to read by ID table: int64 [n] each, `rows` of `item` and then `ids` flattened."""
        return {"item": self.rows} | {name: rows.flatten() for name, rows in self.ids.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there, by its field; one of `ids` as `ids.<table>`."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        ids = {f"ids.{name}": rows for name, rows in named.pop("ids").items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None} | ids

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; out of pinned memory, the copy does not wait."""
        pinned = self.request_id.is_pinned()
        return self._map(lambda tensor: tensor.to(device, non_blocking=pinned))

    def select(self, requests: Tensor) -> Batch:
        """Some of the requests, chosen by a mask, bool [B], as wide as they were."""
        return self._map(lambda tensor: tensor[requests])

    def pin(self) -> Batch:
        """The batch in pinned memory; needs CUDA."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(t) for name, t in self.tensors().items()}
        ids = {name: changed.pop(f"ids.{name}") for name in self.ids}
        return replace(self, ids=ids, **changed)


class RequestReader:
    """Requests of one split in batches, epoch after epoch."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        *,
        batch_size: int,
        seed: int = 0,
        sampler: NegativeSampler | None,
        id_columns: Mapping[str, IdTableSpec] | None = None,
        shuffle: bool = True,
        limit: int | None = None,
        prefetch: int = 4,
        shuffle_groups: int = 16,
        group_by_length: bool = False,
        shard: Shard | None = None,
        pin_memory: bool = False,
        examples: Examples | None = None,
    ) -> None:
        """Counts the split's requests.

        Args:
            dataset: The folder.
            split: Which requests.
            batch_size: Requests a batch; only the last one of an epoch may be smaller.
            seed: Of the order.
            sampler: Its negatives stand after the stored candidates of each request. None: the
                stored candidates alone.
            id_columns: Tables beside `item` whose rows batches hold (`config.tables.others`).
            shuffle: False gives the order of the files (time).
            limit: Reads at most this many requests, the same ones each time, evenly spread.
            prefetch: Batches made ahead by the thread; 0 makes them in the caller's. It does not
                change them.
            shuffle_groups: Row groups shuffled together.
            group_by_length: Batches requests of similar history length, so that there is little
                padding, and shuffles those batches.
            shard: Which of the requests are read here, if several readers share them.
            pin_memory: Makes batches in pinned memory, from which `Batch.to` copies to a CUDA
                device without waiting.
            examples: Which requests each epoch shows; None: all of them.

        Raises:
            DataError: A part file that is missing, not Parquet or lacks a column, a dataset that
                was built without the ids of a table, or too few requests for parts.
        """
        manifest = dataset.manifest
        tables = dict(id_columns or {})
        require_ids(dataset, tables)
        self._ids_of_requests = {
            name: (stored_as(spec.column), IdRows.of(dataset, spec))
            for name, spec in tables.items()
            if spec.of == "request"
        }
        self._ids_of_items = {
            name: IdRows.of(dataset, spec)(read_item_ids(dataset, spec.column))
            for name, spec in tables.items()
            if spec.of == "item"
        }
        self._tables = list(tables)
        self._actions = list(manifest.actions)
        self._context = list(manifest.context)
        self._has_oracle = manifest.has_oracle
        self._weighted = manifest.weighted
        self._sampler = sampler
        self._pin_memory = pin_memory
        self._num_rows = dataset.catalog.num_rows
        self._log_q = log_shares(dataset.catalog.pretrain_count + dataset.catalog.support)
        self._history_types: dict[str, type] = {
            "history_row": np.int64,
            "history_action": np.int8,
            "history_age": np.float32,
        }
        self._candidate_types: dict[str, type] = {
            "candidate_row": np.int64,
            **{f"label_{action}": np.int8 for action in self._actions},
        }
        if self._has_oracle:
            self._candidate_types |= {f"oracle_{action}": np.float32 for action in self._actions}
        self._wide: dict[str, type] = dict.fromkeys(
            ("history_row", "history_action", "candidate_row"), np.int64
        )
        lists = [*self._history_types, *self._candidate_types]
        examples = examples or Examples()
        groups = RowGroups(
            dataset.request_files(split),
            held_out=split == "in_window",
            columns=[
                *("request_id", "timestamp", *lists),
                *(f"ctx_{name}" for name in self._context),
                *dict.fromkeys(column for column, _ in self._ids_of_requests.values()),
                *(["weight"] if self._weighted else []),
            ],
            decode=self._decode,
            expected=manifest.requests.get(split, 0),
            limit=limit,
            parts=examples.parts,
        )
        self._epochs = Epochs(
            groups,
            source=dataset.manifest.data_version,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            buffer_groups=shuffle_groups if shuffle or group_by_length else 1,
            sort_by="history" if group_by_length else None,
            prefetch=prefetch,
            shard=shard or Shard(),
            examples=examples,
        )
        self.batch_size = batch_size
        """Requests a batch."""
        self.num_requests = self._epochs.num_rows
        """Requests of an epoch, of this shard."""
        self.num_batches = self._epochs.num_batches
        """Batches of an epoch; shards may differ by one."""

    def epoch(self, index: int, start: int = 0) -> Iterator[Batch]:
        """The requests of an epoch once, in an order (and with negatives) fixed by `seed`, `index`.

        A thread reads ahead from the first `next` until the end, or until the iterator is closed
        or dropped.

        Args:
            index: From 0 on.
            start: Leaves out this many batches, without reading them; the others stay the same.

        Raises:
            DataError: From `next`: a damaged part file.
        """

        def make(rows: Rows, positions: np.ndarray) -> Batch:
            batch = self._assemble(rows, positions, index)
            return batch.pin() if self._pin_memory else batch

        return self._epochs.batches(index, make, start)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """What `resume` needs to go on with batch `step` of an epoch: a few JSON values."""
        return self._epochs.state(epoch, step)

    def resume(self, state: Mapping[str, Any]) -> Iterator[Batch]:
        """The rest of an epoch, exactly as it would have come without the break.

        Raises:
            DataError: A state of a reader of another dataset, or one with other settings.
        """
        return self.epoch(*self._epochs.position(state))

    def _decode(self, table: pa.Table) -> Rows:
        history = decode_lists(table, self._history_types, self._num_rows)
        candidates = decode_lists(table, self._candidate_types, self._num_rows)
        context = [table.column(f"ctx_{name}").to_numpy() for name in self._context]
        weight = {"weight": _weights(table)} if self._weighted else {}
        timestamp = table.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        return Rows(
            {
                "request_id": table.column("request_id").to_numpy(),
                "timestamp": timestamp.to_numpy(),
                "context": np.stack(context, axis=1)
                if context
                else np.zeros((len(table), 0), np.int32),
                **{
                    f"ids.{name}": rows(table.column(column).to_numpy())
                    for name, (column, rows) in self._ids_of_requests.items()
                },
                **weight,
            },
            {"history": history, "candidates": candidates},
        )

    def _assemble(self, rows: Rows, positions: np.ndarray, epoch: int) -> Batch:
        request_id, timestamp, context = (
            rows.flat[name].take(positions, axis=0)
            for name in ("request_id", "timestamp", "context")
        )
        history = rows.lists["history"].padded(
            positions, self._wide, multiple=WIDTH_MULTIPLE, least=WIDTH_MULTIPLE
        )
        candidates = rows.lists["candidates"].padded(positions, self._wide)
        weight = rows.flat["weight"].take(positions) if self._weighted else None
        row = candidates["candidate_row"]
        mask = rows.lists["candidates"].mask(positions, row.shape[1])
        labels = self._stack(candidates, "label")
        oracle = self._stack(candidates, "oracle") if self._has_oracle else None
        if self._sampler is not None:
            known = history["history_row"]
            drawn = self._sampler.negatives(request_id, timestamp, row, known, epoch)
            row = np.concatenate([row, drawn], axis=1)
            mask = np.concatenate([mask, drawn != PADDING_ROW], axis=1)
            none = np.zeros((*drawn.shape, len(self._actions)), np.float32)
            labels = np.concatenate([labels, none], axis=1)
            if oracle is not None:
                oracle = np.concatenate([oracle, np.full_like(none, np.nan)], axis=1)
        return Batch(
            request_id=torch.from_numpy(request_id),
            timestamp=torch.from_numpy(timestamp),
            history_row=torch.from_numpy(history["history_row"]),
            history_action=torch.from_numpy(history["history_action"]),
            history_age=torch.from_numpy(history["history_age"]),
            candidate_row=torch.from_numpy(row),
            candidate_mask=torch.from_numpy(mask),
            candidate_log_q=torch.from_numpy(self._log_q.take(row)),
            labels=torch.from_numpy(labels),
            context=torch.from_numpy(context.astype(np.int64)),
            oracle=None if oracle is None else torch.from_numpy(oracle),
            ids={
                name: torch.from_numpy(
                    self._ids_of_items[name].take(row)
                    if name in self._ids_of_items
                    else rows.flat[f"ids.{name}"].take(positions)
                )
                for name in self._tables
            },
            weight=None if weight is None else torch.from_numpy(weight),
        )

    def _stack(self, candidates: dict[str, np.ndarray], kind: str) -> np.ndarray:
        stacked = np.empty((*candidates["candidate_row"].shape, len(self._actions)), np.float32)
        for number, action in enumerate(self._actions):
            stacked[..., number] = candidates[f"{kind}_{action}"]
        return stacked


def _weights(table: pa.Table) -> np.ndarray:
    weight: np.ndarray = table.column("weight").to_numpy()
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise ValueError("the weight of a request is no number above 0")
    return weight
