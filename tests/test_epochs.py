"""Epochs that several readers share, that go on after a break, and that start soon."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import random_requests, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from thawline.config import Negatives
from thawline.data.batches import Batch, RequestReader, SequenceReader, Shard
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.data.row_groups import RowGroups
from thawline.errors import ConfigError, DataError

NUM_ITEMS = 30


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """300 requests with one positive each, in row groups of eight; 100 sequences."""
    return write_dataset(
        tmp_path_factory.mktemp("clicks"),
        requests=random_requests(
            300, num_items=NUM_ITEMS, impressions=False, actions=["click"], context=[]
        ),
        sequences=[
            {"user_id": user, "held_out": False, "item_row": [2 + user % NUM_ITEMS] * (2 + user)}
            for user in range(100)
        ],
        support=[3] * NUM_ITEMS,
        impressions=False,
    )


def make_reader(dataset: Dataset, **options: Any) -> RequestReader:
    sampler = NegativeSampler(dataset, Negatives(popularity="window"), seed=2)
    return RequestReader(dataset, "train", **{"batch_size": 8, "sampler": sampler} | options)


def ids(batches: Iterator[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.request_id.tolist()]


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the row groups that were read."""
    positions: list[int] = []
    original = RowGroups.read

    def counted(self: RowGroups, position: int) -> Any:
        positions.append(position)
        return original(self, position)

    monkeypatch.setattr(RowGroups, "read", counted)
    return positions


orders = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 60),
        "shuffle_groups": st.integers(1, 30),
        "limit": st.none() | st.integers(1, 250),
        "shuffle": st.booleans(),
        "group_by_length": st.booleans(),
    }
)


@given(order=orders, count=st.sampled_from([1, 2, 3, 5, 8, 40]), epoch=st.integers(0, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_shards_read_every_request_once_between_them_and_equally_many(
    clicks: Dataset, order: dict[str, Any], count: int, epoch: int
) -> None:
    whole = ids(make_reader(clicks, prefetch=0, **order).epoch(epoch))
    parts = []
    for index in range(count):
        reader = make_reader(clicks, prefetch=0, shard=Shard(index, count), **order)
        batches = list(reader.epoch(epoch))
        parts.append(ids(iter(batches)))
        assert (reader.num_requests, reader.num_batches) == (len(parts[-1]), len(batches))
    assert sorted(index for part in parts for index in part) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shards_read_other_requests_in_each_epoch(clicks: Dataset) -> None:
    reader = make_reader(clicks, shard=Shard(1, 3))
    assert set(ids(reader.epoch(0))) != set(ids(reader.epoch(1)))


def test_without_shuffling_shards_are_consecutive_in_time(clicks: Dataset) -> None:
    parts = [
        ids(make_reader(clicks, shuffle=False, shard=Shard(index, 3)).epoch(0))
        for index in range(3)
    ]
    assert [*parts[0], *parts[1], *parts[2]] == ids(make_reader(clicks, shuffle=False).epoch(0))


def test_a_shard_reads_no_row_group_of_another(clicks: Dataset, read: list[int]) -> None:
    ids(make_reader(clicks, prefetch=0).epoch(0))
    groups = len(read)
    read.clear()
    ids(make_reader(clicks, prefetch=0, shard=Shard(1, 4)).epoch(0))
    assert len(read) <= groups / 4 + 2


def test_every_worker_of_every_rank_is_another_shard() -> None:
    shards = {
        Shard.of(rank, 3, worker, 2).index: Shard.of(rank, 3, worker, 2).count
        for rank in range(3)
        for worker in range(2)
    }
    assert shards == dict.fromkeys(range(6), 6)


@pytest.mark.parametrize(
    ("rank", "world", "worker", "workers"),
    [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 0, 0, 1), (0, 2, 3, 3)],
)
def test_a_rank_or_worker_that_does_not_exist_is_refused(
    rank: int, world: int, worker: int, workers: int
) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Shard.of(rank, world, worker, workers)


class Worker(IterableDataset[list[int]]):
    """Request ids of rank 1 of 2, read by the processes of a DataLoader."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __iter__(self) -> Iterator[list[int]]:
        info = get_worker_info()
        assert info is not None
        shard = Shard.of(1, 2, info.id, info.num_workers)
        for batch in make_reader(Dataset.open(self.root), shard=shard).epoch(0):
            yield batch.request_id.tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # On a machine of one core.
def test_the_workers_of_a_data_loader_share_their_ranks_requests(clicks: Dataset) -> None:
    loader = DataLoader(Worker(clicks.root), batch_size=None, num_workers=2)
    read = [index for batch in loader for index in batch]
    other = ids(make_reader(clicks, shard=Shard(0, 2)).epoch(0))
    assert sorted(read + other) == sorted(ids(make_reader(clicks).epoch(0)))


@given(
    order=orders,
    shard=st.sampled_from([Shard(0, 1), Shard(0, 2), Shard(4, 5)]),
    prefetch=st.sampled_from([0, 3]),
    start=st.floats(0, 1),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_an_epoch_goes_on_with_the_batches_of_an_unbroken_one(
    clicks: Dataset, order: dict[str, Any], shard: Shard, prefetch: int, start: float
) -> None:
    reader = make_reader(clicks, prefetch=prefetch, shard=shard, **order)
    unbroken = list(reader.epoch(1))
    step = round(start * len(unbroken))
    state = json.loads(json.dumps(reader.state(1, step)))
    again = make_reader(clicks, prefetch=prefetch, shard=shard, **order)
    for one, other in zip(again.resume(state), unbroken[step:], strict=True):
        assert_equal(one, other)


def test_sequences_go_on_as_well(clicks: Dataset) -> None:
    reader = SequenceReader(clicks, held_out=False, batch_size=7, shuffle_groups=4)
    unbroken = list(reader.epoch(2))
    for one, other in zip(reader.resume(reader.state(2, 5)), unbroken[5:], strict=True):
        assert torch.equal(one.item_row, other.item_row)


def test_what_comes_before_the_break_is_not_read_again(clicks: Dataset, read: list[int]) -> None:
    reader = make_reader(clicks, batch_size=8, shuffle_groups=2, prefetch=0)
    batches = reader.num_batches
    assert len(list(reader.epoch(0, start=batches - 2))) == 2
    # The last buffer's two row groups, and those that its carried rows came from.
    assert len(read) <= 5


def test_a_state_of_another_reader_is_refused_with_what_has_changed(clicks: Dataset) -> None:
    state = make_reader(clicks).state(0, 3)
    with pytest.raises(DataError, match=r"batch_size is 9, was 8; seed is 1, was 0"):
        make_reader(clicks, batch_size=9, seed=1).resume(state)
    with pytest.raises(DataError, match=r"shard is \[0, 2\], was \[0, 1\]"):
        make_reader(clicks, shard=Shard(0, 2)).resume(state)


def test_the_first_batch_waits_for_an_eighth_of_a_buffer(clicks: Dataset, read: list[int]) -> None:
    batches = make_reader(clicks, batch_size=4, shuffle_groups=16, prefetch=0).epoch(0)
    next(batches)
    assert len(read) == 2


def test_batches_are_pinned_where_they_are_made(
    clicks: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    ids(make_reader(clicks).epoch(0))
    assert not pinned
    (batch, *_) = make_reader(clicks, pin_memory=True, batch_size=10_000).epoch(0)
    assert len(pinned) == len(batch.tensors()) == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_pinned_batches_reach_the_device_unchanged(clicks: Dataset) -> None:
    plain = make_reader(clicks).epoch(0)
    for one, other in zip(make_reader(clicks, pin_memory=True).epoch(0), plain, strict=True):
        assert one.history_row.is_pinned()
        assert_equal(one.to("cuda").to("cpu"), other)
