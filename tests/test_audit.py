from pathlib import Path

import numpy as np
import pytest
from datasets import HOUR, START, write_dataset

from thawline.config import Negatives
from thawline.data.audit import trivial_scores
from thawline.data.manifest import Dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(
        tmp_path,
        first_seen=[START, START + HOUR, START + 2 * HOUR],
        support=[3, 0, 1],
        popularity=[
            (START, 2, 8),
            (START + HOUR, 2, 4),
            (START + HOUR, 3, 5),
            (START + 3 * HOUR, 2, 1),
        ],
    )


def test_trivial_scores_equal_numbers_worked_out_by_hand(dataset: Dataset) -> None:
    rows = np.array([2, 2, 2, 2, 3, 4, 1, 0])
    hours = np.array([0.5, 1.0, 2.5, 4.0, 2.0, 4.5, 4.0, 4.0])
    scores = trivial_scores(dataset, rows, START + (hours * HOUR).astype(np.int64))
    assert {name: values.tolist() for name, values in scores.items()} == {
        "never_trained": [1, 1, 1, 1, 0, 1, 0, 0],
        "item_age": [0.5, 1.0, 2.5, 4.0, 1.0, 2.5, 0, 0],
        "as_of_popularity": [0, 8, 12, 13, 5, 0, 0, 0],
    }


def test_recent_popularity_halves_every_half_life_after_its_bucket(dataset: Dataset) -> None:
    negatives = Negatives(popularity="decayed", half_life_hours=1.0)
    hours = np.array([0.5, 1.0, 2.0, 3.0, 4.0])
    timestamps = START + (hours * HOUR).astype(np.int64)
    scores = trivial_scores(dataset, np.full(5, 2), timestamps, negatives)
    # 8 at 1:00; halved and 4 more at 2:00; halved at 3:00; halved and 1 more at 4:00.
    assert scores["recent_popularity"].tolist() == [0, 8, 8, 4, 3]


def test_popularity_equals_a_count_over_all_earlier_buckets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = {(int(rng.integers(0, 40)), int(rng.integers(2, 22))) for _ in range(300)}
    counts = [(START + b * HOUR, r, int(rng.integers(1, 9))) for b, r in sorted(pairs)]
    dataset = write_dataset(tmp_path, num_items=21, popularity=counts)
    rows = rng.integers(0, 23, 500)
    timestamps = START + rng.integers(-HOUR, 45 * HOUR, 500)
    negatives = Negatives(popularity="decayed", half_life_hours=7.0)
    scores = trivial_scores(dataset, rows, timestamps, negatives)
    for index, (row, timestamp) in enumerate(zip(rows.tolist(), timestamps.tolist(), strict=True)):
        past = [
            (start, count) for start, r, count in counts if r == row and start + HOUR <= timestamp
        ]
        assert scores["as_of_popularity"][index] == sum(count for _, count in past)
        recent = sum(count * 0.5 ** ((timestamp - s - HOUR) / HOUR / 7) for s, count in past)
        assert scores["recent_popularity"][index] == pytest.approx(recent)


def test_a_log_without_positives_scores_0(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, num_items=2)
    scores = trivial_scores(dataset, np.array([2, 3]), np.array([START, START]))
    assert scores["as_of_popularity"].tolist() == [0, 0]
