"""Batches of pretraining sequences: Parquet to padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from thawline.data.epochs import Epochs
from thawline.data.manifest import Dataset
from thawline.data.popularity import log_shares
from thawline.data.ragged import WIDTH_MULTIPLE, Rows
from thawline.data.row_groups import RowGroups, decode_lists
from thawline.data.shards import Shard


@dataclass(frozen=True)
class SequenceBatch:
    """B pretraining sequences of at most T items, from index 0 on, padded with row 0."""

    item_row: Tensor
    """int64 [B, T]: in time order; T is a multiple of 8."""
    log_q: Tensor
    """float32 [B, T]: log of the row's share of pretraining positives, one added to each count; 0
    at padding."""

    def __len__(self) -> int:
        return len(self.item_row)

    def to(self, device: torch.device | str) -> SequenceBatch:
        """The batch on a device; out of pinned memory, the copy does not wait."""
        pinned = self.item_row.is_pinned()
        return SequenceBatch(
            self.item_row.to(device, non_blocking=pinned),
            self.log_q.to(device, non_blocking=pinned),
        )

    def pin(self) -> SequenceBatch:
        """The batch in pinned memory; needs CUDA."""
        return SequenceBatch(self.item_row.pin_memory(), self.log_q.pin_memory())


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
        limit: int | None = None,
        prefetch: int = 4,
        shuffle_groups: int = 16,
        group_by_length: bool = False,
        shard: Shard | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Counts the sequences.

        Args:
            dataset: The folder.
            held_out: Sequences of held-out users (or that end with a held-out positive), or
                those to train on.
            batch_size: Sequences a batch; only the last one of an epoch may be smaller.
            seed: Of the order.
            shuffle: False gives the order of the files.
            limit: Reads at most this many sequences, the same ones each time, evenly spread.
            prefetch: Batches made ahead by the thread; 0 makes them in the caller's. It does not
                change them.
            shuffle_groups: Row groups shuffled together.
            group_by_length: Batches sequences of similar length.
            shard: Which of the sequences are read here, if several readers share them.
            pin_memory: Makes batches in pinned memory, from which `SequenceBatch.to` copies to a
                CUDA device without waiting.

        Raises:
            DataError: A part file that is missing, not Parquet or lacks a column.
        """
        self._pin_memory = pin_memory
        self._num_rows = dataset.catalog.num_rows
        self._log_q = log_shares(dataset.catalog.pretrain_count)
        groups = RowGroups(
            dataset.sequence_files(),
            held_out=held_out,
            columns=["item_row"],
            decode=self._decode,
            expected=dataset.manifest.sequences.get("held_out" if held_out else "train", 0),
            limit=limit,
        )
        self._epochs = Epochs(
            groups,
            source=dataset.manifest.data_version,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            buffer_groups=shuffle_groups if shuffle or group_by_length else 1,
            sort_by="items" if group_by_length else None,
            prefetch=prefetch,
            shard=shard or Shard(),
        )
        self.batch_size = batch_size
        """Sequences a batch."""
        self.num_sequences = self._epochs.num_rows
        """Sequences of an epoch, of this shard."""
        self.num_batches = self._epochs.num_batches
        """Batches of an epoch; shards may differ by one."""

    def epoch(self, index: int, start: int = 0) -> Iterator[SequenceBatch]:
        """Every sequence once, in an order fixed by `seed` and `index`.

        A thread reads ahead from the first `next` until the end, or until the iterator is closed
        or dropped.

        Args:
            index: From 0 on.
            start: Leaves out this many batches, without reading them; the others stay the same.

        Raises:
            DataError: From `next`: a damaged part file.
        """
        return self._epochs.batches(index, self._assemble, start)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """What `resume` needs to go on with batch `step` of an epoch: a few JSON values."""
        return self._epochs.state(epoch, step)

    def resume(self, state: Mapping[str, Any]) -> Iterator[SequenceBatch]:
        """The rest of an epoch, exactly as it would have come without the break.

        Raises:
            DataError: A state of a reader of another dataset, or one with other settings.
        """
        return self.epoch(*self._epochs.position(state))

    def _decode(self, table: pa.Table) -> Rows:
        return Rows({}, {"items": decode_lists(table, {"item_row": np.int64}, self._num_rows)})

    def _assemble(self, rows: Rows, positions: np.ndarray) -> SequenceBatch:
        items = rows.lists["items"].padded(positions, multiple=WIDTH_MULTIPLE, least=WIDTH_MULTIPLE)
        batch = SequenceBatch(
            item_row=torch.from_numpy(items["item_row"]),
            log_q=torch.from_numpy(self._log_q.take(items["item_row"])),
        )
        return batch.pin() if self._pin_memory else batch
