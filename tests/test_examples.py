"""Epochs that show a part of the training requests: the same one again, or another."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_requests, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from thawline.config import Negatives
from thawline.data.batches import RequestReader, Shard
from thawline.data.examples import Examples, split_by_id
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.errors import DataError
from thawline.evaluation.schedule import words
from thawline.training.schedule import Plan, Schedule, TrainingWindow
from thawline.training.timeline import describe

NUM_ITEMS = 30


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """About 190 requests to train on, in row groups of eight."""
    return write_dataset(
        tmp_path_factory.mktemp("clicks"),
        requests=random_requests(
            300, num_items=NUM_ITEMS, impressions=False, actions=["click"], context=[]
        ),
        support=[3] * NUM_ITEMS,
        impressions=False,
    )


def make_reader(dataset: Dataset, **options: Any) -> RequestReader:
    sampler = NegativeSampler(dataset, Negatives(popularity="window"), seed=2)
    return RequestReader(dataset, "train", **{"batch_size": 8, "sampler": sampler} | options)


def ids(batches) -> list[int]:
    return [index for batch in batches for index in batch.request_id.tolist()]


def splitmix64(value: int) -> int:
    """Its finalizer on a Python integer, as Steele, Lea and Flood have it."""
    wrap = (1 << 64) - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & wrap
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & wrap
    return value ^ (value >> 31)


def parts_by_hand(request_ids: list[int], parts: int) -> list[list[int]]:
    """The ids in the order of their hash, cut into equal stretches."""
    ordered = sorted(request_ids, key=lambda each: splitmix64(each & ((1 << 64) - 1)))
    size = len(ordered) // parts
    return [sorted(ordered[part * size : (part + 1) * size]) for part in range(parts)]


def test_ids_are_cut_in_the_order_of_their_hash_and_negative_ones_too() -> None:
    request_id = [5, -3, 1 << 62, 0, -(1 << 63), 17, 4]
    found = split_by_id(np.array(request_id), 3)
    for part, wanted in enumerate(parts_by_hand(request_id, 3)):
        assert sorted(np.array(request_id)[found == part].tolist()) == wanted
    assert Counter(found.tolist()) == {0: 2, 1: 2, 2: 2, -1: 1}


def test_requests_that_share_an_id_fill_parts_of_equal_size_all_the_same() -> None:
    found = split_by_id(np.array([7] * 5), 2)
    assert found.tolist() == [0, 0, 1, 1, -1]


orders = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 60),
        "shuffle_groups": st.integers(1, 30),
        "limit": st.none() | st.integers(20, 150),
        "shuffle": st.booleans(),
        "group_by_length": st.booleans(),
        "prefetch": st.sampled_from([0, 2]),
    }
)


@given(order=orders, epochs=st.integers(2, 9), start=st.integers(0, 5), count=st.integers(1, 3))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_each_epoch_shows_its_part_once_in_equally_many_batches(
    clicks: Dataset, order: dict[str, Any], epochs: int, start: int, count: int
) -> None:
    everything = ids(make_reader(clicks, **order).epoch(0))
    wanted = parts_by_hand(everything, epochs)
    shown = []
    for kind in ("fresh", "replay"):
        readers = [
            make_reader(clicks, examples=Examples(kind, epochs), shard=Shard(i, count), **order)
            for i in range(count)
        ]
        for epoch in range(epochs):
            found = []
            for reader in readers:
                batches = list(reader.epoch(epoch))
                assert len(batches) == reader.num_batches
                own = ids(batches)
                assert len(own) == reader.num_requests
                assert ids(reader.epoch(epoch, start)) == own[start * order["batch_size"] :]
                found += own
            assert sorted(found) == wanted[epoch if kind == "fresh" else 0]
            if kind == "fresh":
                shown += found
    assert len(shown) == len(set(shown)) == len(everything) // epochs * epochs


def test_a_replayed_part_comes_in_another_order_each_epoch(clicks: Dataset) -> None:
    reader = make_reader(clicks, examples=Examples("replay", 3))
    first, second = ids(reader.epoch(0)), ids(reader.epoch(1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first == ids(make_reader(clicks, examples=Examples("replay", 3)).epoch(0))


def test_the_first_epoch_is_the_same_whether_others_replay_or_not(clicks: Dataset) -> None:
    replay, fresh = (make_reader(clicks, examples=Examples(k, 3)) for k in ("replay", "fresh"))
    for one, other in zip(replay.epoch(0), fresh.epoch(0), strict=True):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_a_reader_goes_on_within_a_part_and_refuses_the_state_of_another_choice(
    clicks: Dataset,
) -> None:
    reader = make_reader(clicks, examples=Examples("fresh", 3))
    state = reader.state(2, 4)
    assert ids(reader.resume(state)) == ids(reader.epoch(2))[4 * 8 :]
    with pytest.raises(DataError, match="examples is"):
        make_reader(clicks, examples=Examples("replay", 3)).resume(state)


def test_more_parts_than_requests_are_refused(clicks: Dataset) -> None:
    with pytest.raises(DataError, match=r"5 training requests cannot be cut into 6 parts") as error:
        make_reader(clicks, examples=Examples("fresh", 6), limit=5)
    assert "finetune.examples=all" in error.value.remedy


def test_fresh_requests_are_never_replayed_after_their_row_was_written() -> None:
    schedule = Schedule(3, {"item": Plan((TrainingWindow(0, 1),))})
    found = {
        kind: describe(schedule, ["item"], examples=kind)["components"]["item"]["replayed"]
        for kind in ("all", "replay", "fresh")
    }
    assert found == {"all": 1.0, "replay": 1.0, "fresh": 0.0}


def test_the_report_says_that_fresh_examples_are_not_seen_again() -> None:
    schedule = Schedule(3, {"item": Plan((TrainingWindow(0, 1),))})
    replay, fresh = (
        words(describe(schedule, ["item"], examples=kind)) for kind in ("replay", "fresh")
    )
    assert "every example is seen again" in replay[0]
    assert "no example is seen again" in fresh[0]
