import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import random_requests, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from thawline.config import Negatives
from thawline.data.batches import Batch, RequestReader, SequenceReader, padded_width
from thawline.data.manifest import Dataset, Split
from thawline.data.negatives import NegativeSampler
from thawline.data.row_groups import RowGroups
from thawline.errors import DataError

ACTIONS = ["save", "click"]
CONTEXT = ["surface", "device"]
NUM_ITEMS = 30
COUNTS = {"pretrain_count": list(range(NUM_ITEMS)), "support": [3] * NUM_ITEMS}


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """300 requests with impressions, in many small row groups and files."""
    requests = random_requests(
        300, num_items=NUM_ITEMS, impressions=True, actions=ACTIONS, context=CONTEXT, oracle=True
    )
    return write_dataset(
        tmp_path_factory.mktemp("feed"),
        requests=requests,
        actions=ACTIONS,
        context=CONTEXT,
        oracle=True,
        sequences=[
            {
                "user_id": user,
                "held_out": user % 5 == 0,
                "item_row": [2 + (user * step) % NUM_ITEMS for step in range(2 + user % 15)],
            }
            for user in range(100)
        ],
        **COUNTS,
    )


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """300 requests of a log without impressions: one positive each."""
    requests = random_requests(
        300, num_items=NUM_ITEMS, impressions=False, actions=["click"], context=[]
    )
    root = tmp_path_factory.mktemp("clicks")
    return write_dataset(root, requests=requests, impressions=False, **COUNTS)


def stored(dataset: Dataset, split: Split) -> list[dict[str, Any]]:
    """The split's Parquet rows, read in the plainest way."""
    rows = []
    for path in dataset.request_files(split):
        rows += pq.ParquetFile(path).read().to_pylist()
    return [row for row in rows if row["held_out"] == (split == "in_window")]


@pytest.fixture(scope="module")
def train_ids(feed: Dataset) -> list[int]:
    return [row["request_id"] for row in stored(feed, "train")]


def ids(reader: RequestReader, epoch: int = 0) -> list[int]:
    return torch.cat([batch.request_id for batch in reader.epoch(epoch)]).tolist()


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def padded(lists: list[list[Any]], width: int) -> list[list[Any]]:
    return [[*items, *[0] * (width - len(items))] for items in lists]


@pytest.mark.parametrize("split", ["train", "in_window", "next"])
@pytest.mark.parametrize("group_by_length", [False, True])
def test_batches_equal_the_parquet_rows_padded_by_hand(
    feed: Dataset, split: Split, group_by_length: bool
) -> None:
    rows = {row["request_id"]: row for row in stored(feed, split)}
    counts = [2 + index + 2 for index in range(NUM_ITEMS)]  # pretrain_count + support + 1
    share = [0.0, np.log(1 / sum(counts)), *np.log(np.array(counts) / sum(counts))]
    reader = RequestReader(
        feed,
        split,
        batch_size=16,
        sampler=None,
        shuffle_groups=3,
        group_by_length=group_by_length,
    )
    served = 0
    for batch in reader.epoch(0):
        served += len(batch)
        source = [rows[index] for index in batch.request_id.tolist()]
        longest = max(len(row["history_row"]) for row in source)
        length = max(8, -(-longest // 8) * 8)
        most = max(len(row["candidate_row"]) for row in source)
        for name in ("history_row", "history_action", "history_age"):
            expected = padded([row[name] for row in source], length)
            assert getattr(batch, name).tolist() == expected
        candidates = padded([row["candidate_row"] for row in source], most)
        assert batch.candidate_row.tolist() == candidates
        assert batch.candidate_mask.tolist() == [[row != 0 for row in line] for line in candidates]
        for number, action in enumerate(ACTIONS):
            labels = padded([row[f"label_{action}"] for row in source], most)
            assert batch.labels[:, :, number].tolist() == labels
            truth = padded([row[f"oracle_{action}"] for row in source], most)
            assert batch.oracle is not None
            assert batch.oracle[:, :, number].tolist() == truth
        log_q = [[share[row] for row in line] for line in candidates]
        assert torch.allclose(batch.candidate_log_q, torch.tensor(log_q, dtype=torch.float32))
        assert batch.context.tolist() == [
            [row[f"ctx_{name}"] for name in CONTEXT] for row in source
        ]
        microseconds = [int(row["timestamp"].timestamp() * 1e6) for row in source]
        assert batch.timestamp.tolist() == microseconds
        flat = [row for line in batch.history_row.tolist() + candidates for row in line]
        assert batch.rows.tolist() == flat
        assert (batch.history_action.dtype, batch.labels.dtype) == (torch.int64, torch.float32)
    assert served == len(rows)


def test_drawn_negatives_follow_the_positive_with_label_0(clicks: Dataset) -> None:
    sampler = NegativeSampler(clicks, Negatives(popularity="window", per_positive=3), seed=1)
    rows = {row["request_id"]: row for row in stored(clicks, "train")}
    for batch in RequestReader(clicks, "train", batch_size=32, sampler=sampler).epoch(2):
        positive = [rows[index]["candidate_row"] for index in batch.request_id.tolist()]
        assert batch.candidate_row[:, :1].tolist() == positive
        drawn = sampler.draw(
            batch.request_id.numpy(), batch.timestamp.numpy(), np.array(positive), 3, 2
        )
        assert batch.candidate_row[:, 1:].tolist() == drawn.tolist()
        assert batch.candidate_mask.all()
        assert batch.labels[:, :, 0].tolist() == [[1, 0, 0, 0]] * len(batch)
        assert batch.oracle is None
        assert batch.context.shape == (len(batch), 0)


def test_a_negative_that_could_not_be_drawn_is_masked(tmp_path: Path) -> None:
    requests = random_requests(20, num_items=1, impressions=False, actions=["click"], context=[])
    dataset = write_dataset(
        tmp_path, requests=requests, num_items=1, support=[5], impressions=False
    )
    sampler = NegativeSampler(dataset, Negatives(popularity="window", per_positive=2), seed=0)
    for batch in RequestReader(dataset, "train", batch_size=8, sampler=sampler).epoch(0):
        assert batch.candidate_row.tolist() == [[2, 0, 0]] * len(batch)
        assert batch.candidate_mask.tolist() == [[True, False, False]] * len(batch)
        assert batch.candidate_log_q[:, 1:].eq(0).all()


@given(
    batch_size=st.integers(1, 70),
    shuffle_groups=st.integers(1, 30),
    limit=st.none() | st.integers(1, 250),
    epoch=st.integers(0, 5),
    group_by_length=st.booleans(),
    shuffle=st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_every_request_comes_exactly_once_and_only_the_last_batch_is_short(
    feed: Dataset,
    train_ids: list[int],
    batch_size: int,
    shuffle_groups: int,
    limit: int | None,
    epoch: int,
    group_by_length: bool,
    shuffle: bool,
) -> None:
    reader = RequestReader(
        feed,
        "train",
        batch_size=batch_size,
        sampler=None,
        shuffle=shuffle,
        limit=limit,
        prefetch=0,
        shuffle_groups=shuffle_groups,
        group_by_length=group_by_length,
    )
    batches = list(reader.epoch(epoch))
    everything = train_ids
    count = len(everything) if limit is None else min(limit, len(everything))
    kept = everything
    if count < len(everything):
        # The smallest rank at or above each of `count` evenly spaced points.
        kept = [everything[-(-index * len(everything) // count)] for index in range(count)]
    assert sorted(index for batch in batches for index in batch.request_id.tolist()) == kept
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert len(batches[-1]) <= batch_size
    assert (reader.num_requests, reader.num_batches) == (count, len(batches))


def test_the_order_changes_with_epoch_and_seed_and_is_otherwise_fixed(feed: Dataset) -> None:
    def reader(seed: int) -> RequestReader:
        return RequestReader(feed, "train", batch_size=10, seed=seed, sampler=None)

    first = ids(reader(0))
    assert ids(reader(0)) == first
    assert ids(reader(0), epoch=1) != first
    assert ids(reader(1)) != first
    assert ids(reader(0), epoch=1) == ids(reader(0), epoch=1)


def test_without_shuffling_requests_keep_the_order_of_the_files(feed: Dataset) -> None:
    reader = RequestReader(feed, "train", batch_size=7, sampler=None, shuffle=False)
    assert ids(reader) == [row["request_id"] for row in stored(feed, "train")]
    assert ids(reader, epoch=3) == ids(reader)


def test_shuffling_mixes_requests_of_different_row_groups(feed: Dataset) -> None:
    order = ids(RequestReader(feed, "train", batch_size=16, sampler=None, shuffle_groups=8))
    neighbours = np.abs(np.diff(order))
    # Eight groups of eight: two neighbours of a batch come from the same group 1 time in 8.
    assert np.mean(neighbours < 8) < 0.25


def test_a_limit_reads_no_row_group_without_a_wanted_request(
    feed: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    reader = RequestReader(feed, "train", batch_size=16, sampler=None, limit=5, prefetch=0)
    assert len(ids(reader)) == 5
    assert len(read) == 5


def test_the_buffer_is_bounded_and_the_next_one_is_read_bit_by_bit(
    feed: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    reader = RequestReader(feed, "train", batch_size=4, sampler=None, prefetch=0, shuffle_groups=4)
    served = 0
    for batch in reader.epoch(0):
        served += len(batch)
        assert sum(read) - served <= 2 * 4 * 8 + 4
        if served <= 12:
            assert len(read) < 8


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each row group that is read from now on."""
    read: list[int] = []
    original = RowGroups.read

    def counted(self: RowGroups, position: int) -> Any:
        rows = original(self, position)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(RowGroups, "read", counted)
    return read


@pytest.mark.parametrize("prefetch", [1, 2, 9])
@pytest.mark.parametrize("group_by_length", [False, True])
def test_prefetch_does_not_change_the_batches(
    clicks: Dataset, prefetch: int, group_by_length: bool
) -> None:
    def batches(depth: int) -> list[Batch]:
        reader = RequestReader(
            clicks,
            "train",
            batch_size=16,
            seed=5,
            sampler=NegativeSampler(clicks, Negatives(popularity="window"), seed=2),
            prefetch=depth,
            shuffle_groups=3,
            group_by_length=group_by_length,
        )
        return list(reader.epoch(1))

    for one, other in zip(batches(0), batches(prefetch), strict=True):
        assert_equal(one, other)


def test_grouping_by_length_saves_padding_and_mixes_long_and_short_batches(feed: Dataset) -> None:
    def lengths(group_by_length: bool) -> list[int]:
        reader = RequestReader(
            feed, "train", batch_size=8, sampler=None, group_by_length=group_by_length
        )
        return [batch.history_row.shape[1] for batch in reader.epoch(0)]

    grouped = lengths(True)
    assert sum(grouped) < 0.8 * sum(lengths(False))
    assert sorted(grouped) != grouped


def test_requests_without_a_history_get_eight_padded_places(tmp_path: Path) -> None:
    requests = random_requests(
        12, num_items=NUM_ITEMS, impressions=True, actions=["click"], context=[], longest=0
    )
    dataset = write_dataset(tmp_path, requests=requests)
    batches = list(RequestReader(dataset, "train", batch_size=4, sampler=None).epoch(0))
    assert batches
    for batch in batches:
        assert batch.history_row.tolist() == [[0] * 8] * len(batch)
        assert batch.history_age.tolist() == [[0.0] * 8] * len(batch)


def test_an_empty_split_has_no_batches(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path)
    reader = RequestReader(dataset, "next", batch_size=4, sampler=None)
    assert (reader.num_requests, reader.num_batches, list(reader.epoch(0))) == (0, 0, [])


def test_a_batch_moves_to_a_device_with_all_its_tensors(feed: Dataset) -> None:
    batch = next(iter(RequestReader(feed, "train", batch_size=4, sampler=None).epoch(0)))
    moved = batch.to("meta")
    assert moved.tensors().keys() == batch.tensors().keys()
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}


def test_the_padded_width_is_the_next_multiple_of_eight() -> None:
    assert [padded_width(length) for length in (1, 8, 9, 50)] == [8, 8, 16, 56]


@pytest.mark.parametrize("held_out", [False, True])
def test_sequences_equal_the_parquet_rows_padded_by_hand(feed: Dataset, held_out: bool) -> None:
    rows = [row for path in feed.sequence_files() for row in pq.read_table(path).to_pylist()]
    wanted = [row["item_row"] for row in rows if row["held_out"] == held_out]
    reader = SequenceReader(feed, held_out=held_out, batch_size=9, shuffle=False)
    counts = np.arange(NUM_ITEMS) + 1.0  # pretrain_count + 1
    share = np.log(np.concatenate([[1.0, 1.0 / counts.sum()], counts / counts.sum()]))
    start = 0
    for batch in reader.epoch(0):
        lists = wanted[start : start + 9]
        width = -(-max(map(len, lists)) // 8) * 8
        assert batch.item_row.tolist() == padded(lists, width)
        expected = torch.tensor(share[batch.item_row.numpy()], dtype=torch.float32)
        assert torch.allclose(batch.log_q, expected)
        start += len(batch)
    assert start == len(wanted) == reader.num_sequences


def test_sequences_are_shuffled_and_limited_like_requests(feed: Dataset) -> None:
    def epoch(index: int, limit: int | None = None, grouped: bool = False) -> list[list[int]]:
        reader = SequenceReader(
            feed, held_out=False, batch_size=8, limit=limit, group_by_length=grouped
        )
        lists = [line for batch in reader.epoch(index) for line in batch.item_row.tolist()]
        return [[row for row in line if row] for line in lists]

    assert epoch(0) != epoch(1)
    assert sorted(epoch(0)) == sorted(epoch(1)) == sorted(epoch(0, grouped=True))
    assert sorted(epoch(0, limit=7)) == sorted(epoch(1, limit=7))
    assert len(epoch(0, limit=7)) == 7


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "thawline-reader"]


def started(dataset: Dataset) -> Iterator[Batch]:
    batches = RequestReader(dataset, "train", batch_size=4, sampler=None, prefetch=2).epoch(0)
    next(batches)
    return batches


def test_the_thread_ends_with_the_epoch_and_never_starts_unasked(feed: Dataset) -> None:
    batches = started(feed)
    assert readers()
    assert len(list(batches)) > 1
    assert readers() == []
    RequestReader(feed, "train", batch_size=4, sampler=None).epoch(0)
    assert readers() == []


def test_closing_or_dropping_the_iterator_ends_the_thread(feed: Dataset) -> None:
    batches = started(feed)
    batches.close()  # type: ignore[attr-defined]
    assert readers() == []
    batches = started(feed)
    assert readers()
    del batches
    gc.collect()
    assert readers() == []


def test_closing_stops_a_reader_between_two_row_groups(
    feed: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    go_on = threading.Event()
    original = RowGroups.read

    def slow(self: RowGroups, position: int) -> Any:
        read.append(position)
        if len(read) == 10:
            go_on.wait(30)
        return original(self, position)

    monkeypatch.setattr(RowGroups, "read", slow)
    # One batch a buffer: the thread reads the next eight groups while the first batch is used.
    batches = RequestReader(
        feed, "train", batch_size=40, sampler=None, prefetch=2, shuffle_groups=8
    ).epoch(0)
    next(batches)
    threading.Timer(0.2, go_on.set).start()
    batches.close()  # type: ignore[attr-defined]
    assert len(read) <= 10


def test_a_consumer_that_fails_leaves_no_thread(feed: Dataset) -> None:
    def consume() -> None:
        for _ in RequestReader(feed, "train", batch_size=4, sampler=None).epoch(0):
            raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"):
        consume()
    gc.collect()
    assert readers() == []


def small(root: Path) -> tuple[Dataset, Path]:
    requests = random_requests(
        60, num_items=NUM_ITEMS, impressions=True, actions=["click"], context=[]
    )
    dataset = write_dataset(root, requests=requests)
    return dataset, dataset.request_files("train")[-1]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_corrupt_page_is_an_error_that_names_the_file(tmp_path: Path, prefetch: int) -> None:
    dataset, path = small(tmp_path)
    content = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    offset = columns["history_row.list.element"].data_page_offset
    content[offset : offset + 40] = b"\xff" * 40
    path.write_bytes(content)
    reader = RequestReader(
        dataset, "train", batch_size=8, sampler=None, shuffle=False, prefetch=prefetch
    )
    batches = reader.epoch(0)
    with pytest.raises(DataError, match=str(path)):
        list(batches)
    assert readers() == []


def test_a_truncated_file_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    dataset, path = small(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=str(path)):
        RequestReader(dataset, "train", batch_size=8, sampler=None)


def test_a_lost_part_file_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    dataset, path = small(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="the manifest says"):
        RequestReader(dataset, "train", batch_size=8, sampler=None)


def rewrite(path: Path, name: str, values: pa.Array | None) -> None:
    table = pq.ParquetFile(path).read()
    table = table.drop_columns([name])
    if values is not None:
        table = table.append_column(name, values)
    pq.write_table(table, path)


def test_a_missing_column_is_refused_by_name(tmp_path: Path) -> None:
    dataset, path = small(tmp_path)
    rewrite(path, "history_age", None)
    with pytest.raises(DataError, match="no column history_age"):
        RequestReader(dataset, "train", batch_size=8, sampler=None)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("candidate_row", [NUM_ITEMS + 2], "candidate_row holds rows"),
        ("label_click", [1, 0, 1, 0, 1, 0, 1, 0, 1], "label_click and candidate_row differ"),
        ("candidate_row", [None], "lists of candidate_row hold nulls"),
    ],
)
def test_damaged_values_are_refused_with_file_and_column(
    tmp_path: Path, name: str, values: list[int | None], message: str
) -> None:
    dataset, path = small(tmp_path)
    table = pq.ParquetFile(path).read()
    column = table.column(name).to_pylist()
    if name == "candidate_row":
        column[0] = values * len(column[0])
    else:
        column[0] = values
    rewrite(path, name, pa.array(column, table.schema.field(name).type))
    reader = RequestReader(dataset, "train", batch_size=8, sampler=None)
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        list(reader.epoch(0))
