"""Batches of requests and of pretraining sequences: Parquet to padded tensors.

One background thread reads, shuffles and pads (`background`, `row_groups`, `ragged`); negatives of
logs without impressions come from `negatives`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from thawline.data.background import Cancelled, run_ahead
from thawline.data.manifest import FIRST_ROW, PADDING_ROW, Dataset, Split
from thawline.data.negatives import NegativeSampler
from thawline.data.ragged import Ragged, Rows
from thawline.data.row_groups import RowGroups, cut_batches
from thawline.errors import DataError

WIDTH_MULTIPLE = 8
"""Histories and sequences are padded to a multiple of this, so that few shapes occur."""


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
    history_log_q: Tensor
    """float32 [B, L]: log of the row's share of training positives, one added to each count."""
    candidate_row: Tensor
    """int64 [B, C]."""
    candidate_mask: Tensor
    """bool [B, C]: False at padding and where no negative could be drawn."""
    labels: Tensor
    """float32 [B, C, A]: 0 or 1; 0 at padding and for drawn negatives."""
    context: Tensor
    """int64 [B, K]: codes in the order of `manifest.context`."""
    oracle: Tensor | None
    """float32 [B, C, A]: true probabilities of a simulated log, NaN for drawn negatives."""

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def rows(self) -> Tensor:
        """int64 [B*L + B*C]: `history_row` flattened, then `candidate_row` flattened."""
        return torch.cat([self.history_row.flatten(), self.candidate_row.flatten()])

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        return Batch(**_moved(self, device))


@dataclass(frozen=True)
class SequenceBatch:
    """B pretraining sequences of at most T items, from index 0 on, padded with row 0."""

    item_row: Tensor
    """int64 [B, T]: in time order; T is a multiple of 8."""
    log_q: Tensor
    """float32 [B, T]: log of the row's share of pretraining positives, one added to each count."""

    def __len__(self) -> int:
        return len(self.item_row)

    def to(self, device: torch.device | str) -> SequenceBatch:
        """The batch on a device."""
        return SequenceBatch(**_moved(self, device))


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
        shuffle: bool = True,
        limit: int | None = None,
        prefetch: int = 4,
        shuffle_groups: int = 16,
        group_by_length: bool = False,
    ) -> None:
        """Counts the split's requests.

        Args:
            dataset: The folder.
            split: Which requests.
            batch_size: Requests a batch; only the last one of an epoch may be smaller.
            seed: Of the order.
            sampler: Draws `sampler.count` negatives after the stored candidates of each request.
                None: the stored candidates alone.
            shuffle: False gives the order of the files (time).
            limit: Reads at most this many requests, the same ones each time, evenly spread.
            prefetch: Batches made ahead by the thread; 0 makes them in the caller's. It does not
                change them.
            shuffle_groups: Row groups shuffled together.
            group_by_length: Batches requests of similar history length, so that there is little
                padding, and shuffles those batches.

        Raises:
            DataError: A part file that is missing, not Parquet or lacks a column.
        """
        manifest = dataset.manifest
        self._actions = list(manifest.actions)
        self._context = list(manifest.context)
        self._has_oracle = manifest.has_oracle
        self._sampler = sampler
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self._buffer_groups = shuffle_groups if shuffle or group_by_length else 1
        self._sort_by = "history" if group_by_length else None
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
        self._groups = RowGroups(
            dataset.request_files(split),
            held_out=split == "in_window",
            columns=[
                "request_id",
                "timestamp",
                *self._history_types,
                *self._candidate_types,
                *(f"ctx_{name}" for name in self._context),
            ],
            decode=self._decode,
            limit=limit,
        )
        _check_count(dataset, split, manifest.requests.get(split, 0), self._groups.num_found)
        self.batch_size = batch_size
        """Requests a batch."""
        self.num_requests = self._groups.num_rows
        """Requests of an epoch."""
        self.num_batches = -(-self.num_requests // batch_size)
        """Batches of an epoch."""

    def epoch(self, index: int) -> Iterator[Batch]:
        """Every request once, in an order (and with negatives) fixed by `seed` and `index`.

        A thread reads ahead from the first `next` until the end, or until the iterator is closed
        or dropped.

        Raises:
            DataError: From `next`: a damaged part file.
        """

        def source(cancelled: Cancelled) -> Iterator[Batch]:
            for rows, positions in cut_batches(
                self._groups,
                batch_size=self.batch_size,
                rng=np.random.default_rng([self._seed, index]) if self._shuffle else None,
                buffer_groups=self._buffer_groups,
                sort_by=self._sort_by,
                cancelled=cancelled,
            ):
                yield self._assemble(rows, positions, index)

        return run_ahead(source, self._prefetch)

    def _decode(self, table: pa.Table) -> Rows:
        history = _ragged(table, self._history_types)
        candidates = _ragged(table, self._candidate_types)
        for lists, name in ((history, "history_row"), (candidates, "candidate_row")):
            _check_rows(lists.values[name], name, self._num_rows)
        context = [table.column(f"ctx_{name}").to_numpy() for name in self._context]
        timestamp = table.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        return Rows(
            {
                "request_id": table.column("request_id").to_numpy(),
                "timestamp": timestamp.to_numpy(),
                "context": np.stack(context, axis=1).astype(np.int64)
                if context
                else np.zeros((len(table), 0), np.int64),
            },
            {"history": history, "candidates": candidates},
        )

    def _assemble(self, rows: Rows, positions: np.ndarray, epoch: int) -> Batch:
        request_id, timestamp, context = (
            rows.flat[name][positions] for name in ("request_id", "timestamp", "context")
        )
        history, _ = rows.lists["history"].padded(
            positions, multiple=WIDTH_MULTIPLE, least=WIDTH_MULTIPLE
        )
        candidates, mask = rows.lists["candidates"].padded(positions)
        row = candidates["candidate_row"]
        labels = self._stack(candidates, "label")
        oracle = self._stack(candidates, "oracle") if self._has_oracle else None
        if self._sampler is not None:
            drawn = self._sampler.draw(request_id, timestamp, row, self._sampler.count, epoch)
            row = np.concatenate([row, drawn], axis=1)
            mask = np.concatenate([mask, drawn != PADDING_ROW], axis=1)
            more = ((0, 0), (0, drawn.shape[1]), (0, 0))
            labels = np.pad(labels, more)
            oracle = None if oracle is None else np.pad(oracle, more, constant_values=np.nan)
        return Batch(
            request_id=torch.from_numpy(request_id),
            timestamp=torch.from_numpy(timestamp),
            history_row=torch.from_numpy(history["history_row"]),
            history_action=torch.from_numpy(history["history_action"].astype(np.int64)),
            history_age=torch.from_numpy(history["history_age"]),
            history_log_q=torch.from_numpy(self._log_q.take(history["history_row"])),
            candidate_row=torch.from_numpy(row),
            candidate_mask=torch.from_numpy(mask),
            labels=torch.from_numpy(labels),
            context=torch.from_numpy(context),
            oracle=None if oracle is None else torch.from_numpy(oracle),
        )

    def _stack(self, candidates: dict[str, np.ndarray], kind: str) -> np.ndarray:
        arrays = [candidates[f"{kind}_{action}"] for action in self._actions]
        return np.stack(arrays, axis=-1).astype(np.float32)


class SequenceReader:
    """Pretraining sequences in batches, epoch after epoch."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        held_out: bool,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 4,
        shuffle_groups: int = 16,
        group_by_length: bool = False,
    ) -> None:
        """Counts the sequences; arguments as `RequestReader`'s.

        Args:
            dataset: The folder.
            held_out: Sequences of held-out users, or of the others.
            batch_size: Sequences a batch.
            seed: Of the order.
            shuffle: False gives the order of the files.
            prefetch: Batches made ahead; 0 makes them in the caller's thread.
            shuffle_groups: Row groups shuffled together.
            group_by_length: Batches sequences of similar length.

        Raises:
            DataError: A part file that is missing, not Parquet or lacks a column.
        """
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch
        self._buffer_groups = shuffle_groups if shuffle or group_by_length else 1
        self._sort_by = "items" if group_by_length else None
        self._num_rows = dataset.catalog.num_rows
        self._log_q = log_shares(dataset.catalog.pretrain_count)
        self._groups = RowGroups(
            dataset.sequence_files(), held_out=held_out, columns=["item_row"], decode=self._decode
        )
        name = "held_out" if held_out else "train"
        expected = dataset.manifest.sequences.get("held_out" if held_out else "train", 0)
        _check_count(dataset, f"{name} sequences", expected, self._groups.num_found)
        self.batch_size = batch_size
        """Sequences a batch."""
        self.num_sequences = self._groups.num_rows
        """Sequences of an epoch."""
        self.num_batches = -(-self.num_sequences // batch_size)
        """Batches of an epoch."""

    def epoch(self, index: int) -> Iterator[SequenceBatch]:
        """Every sequence once, in an order fixed by `seed` and `index`; as `RequestReader.epoch`.

        Raises:
            DataError: From `next`: a damaged part file.
        """

        def source(cancelled: Cancelled) -> Iterator[SequenceBatch]:
            for rows, positions in cut_batches(
                self._groups,
                batch_size=self.batch_size,
                rng=np.random.default_rng([self._seed, index]) if self._shuffle else None,
                buffer_groups=self._buffer_groups,
                sort_by=self._sort_by,
                cancelled=cancelled,
            ):
                items, _ = rows.lists["items"].padded(
                    positions, multiple=WIDTH_MULTIPLE, least=WIDTH_MULTIPLE
                )
                yield SequenceBatch(
                    item_row=torch.from_numpy(items["item_row"]),
                    log_q=torch.from_numpy(self._log_q.take(items["item_row"])),
                )

        return run_ahead(source, self._prefetch)

    def _decode(self, table: pa.Table) -> Rows:
        items = _ragged(table, {"item_row": np.int64})
        _check_rows(items.values["item_row"], "item_row", self._num_rows)
        return Rows({}, {"items": items})


def log_shares(counts: np.ndarray) -> np.ndarray:
    """Log of each table row's share of `counts`, with one added to each.

    Args:
        counts: int64 [N], of the catalog's items.

    Returns:
        float32 [N + 2]: 0 for the padding row; an unknown item counts 0.
    """
    smoothed = np.concatenate([np.ones(FIRST_ROW), counts + 1.0])
    shares = np.log(smoothed / smoothed[FIRST_ROW:].sum())
    shares[PADDING_ROW] = 0.0
    return shares.astype(np.float32)


def _ragged(table: pa.Table, types: Mapping[str, type]) -> Ragged:
    return Ragged.from_lists({name: table.column(name).combine_chunks() for name in types}, types)


def _check_rows(rows: np.ndarray, column: str, num_rows: int) -> None:
    if rows.min() < 0 or rows.max() >= num_rows:
        raise ValueError(f"{column} holds rows that the catalog of {num_rows} rows has not")


def _check_count(dataset: Dataset, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise DataError(
            f"{dataset.root} holds {found} of {what}, its manifest says {expected}",
            "a part file is missing or foreign: build the dataset again with `thawline windows`",
        )


def _moved(batch: Batch | SequenceBatch, device: torch.device | str) -> dict[str, Any]:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: None if t is None else t.to(device) for name, t in tensors.items()}
