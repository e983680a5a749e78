from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from datasets import HOUR, START, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from thawline.config import Negatives, parse_config
from thawline.data.batches import RequestReader
from thawline.data.manifest import Dataset
from thawline.data.negatives import NegativeSampler
from thawline.errors import ConfigError, DataError
from thawline.evaluation.holdouts import evaluation_sampler

Kind = Literal["window", "as_of", "decayed"]
KINDS: tuple[Kind, ...] = ("window", "as_of", "decayed")

FIRST_SEEN = [START, START, START + HOUR, START + 2 * HOUR, START + 2 * HOUR, START + 5 * HOUR]
PRETRAIN = [4, 0, 7, 1, 0, 20]
SUPPORT = [1, 10, 0, 30, 0, 3]
COUNTS = [
    (START, 2, 8),
    (START, 3, 1),
    (START + HOUR, 2, 1),
    (START + HOUR, 4, 20),
    (START + 2 * HOUR, 5, 6),
    (START + 3 * HOUR, 2, 2),
    (START + 3 * HOUR, 5, 3),
    (START + 5 * HOUR, 7, 50),
    (START + 5 * HOUR, 4, 1),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six items (rows 2 to 7) born over five hours; row 6 was never positive."""
    return write_dataset(
        tmp_path_factory.mktemp("items"),
        first_seen=FIRST_SEEN,
        pretrain_count=PRETRAIN,
        support=SUPPORT,
        popularity=COUNTS,
    )


def sampler(dataset: Dataset, kind: Kind, seed: int = 0, **keys: Any) -> NegativeSampler:
    return NegativeSampler(dataset, Negatives(popularity=kind, **keys), seed)


def draw(
    source: NegativeSampler,
    timestamp: int,
    *,
    requests: int = 1,
    count: int = 4,
    positives: list[int] | None = None,
    epoch: int = 0,
    first_id: int = 0,
) -> np.ndarray:
    return source.draw(
        np.arange(first_id, first_id + requests),
        np.full(requests, timestamp),
        np.array([positives or [0]] * requests),
        count,
        epoch,
    )


def exact(kind: Kind, timestamp: int, alpha: float, half_life: float) -> dict[int, float]:
    """Each row's share of popularity^alpha at a time, counted in the plainest way."""
    popularity: Counter[int] = Counter()
    if kind == "window":
        for index, seen in enumerate(FIRST_SEEN):
            if seen < timestamp:
                popularity[index + 2] = PRETRAIN[index] + SUPPORT[index]
    else:
        for start, row, count in COUNTS:
            if start + HOUR <= timestamp:
                hours = (timestamp - start) / HOUR
                popularity[row] += count * (  # type: ignore[assignment]
                    0.5 ** (hours / half_life) if kind == "decayed" else 1.0
                )
    weights = {row: value**alpha for row, value in popularity.items() if value > 0}
    return {row: weight / sum(weights.values()) for row, weight in weights.items()}


def assert_drawn_as(drawn: np.ndarray, shares: dict[int, float]) -> None:
    """A chi-square test with a bound six standard deviations above its mean."""
    seen = Counter(drawn.ravel().tolist())
    assert set(seen) <= set(shares)
    statistic = sum(
        (seen[row] - share * drawn.size) ** 2 / (share * drawn.size)
        for row, share in shares.items()
    )
    freedom = len(shares) - 1
    assert statistic < freedom + 6 * np.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.0, 0.75, 1.0, 2.0])
@pytest.mark.parametrize("hours", [1, 2.5, 3, 4.25, 6, 50])
def test_rows_are_drawn_in_proportion_to_popularity_to_the_alpha(
    dataset: Dataset, kind: Kind, alpha: float, hours: float
) -> None:
    timestamp = START + int(hours * HOUR)
    source = sampler(dataset, kind, alpha=alpha, half_life_hours=1.5)
    drawn = draw(source, timestamp, requests=500, count=40)
    assert_drawn_as(drawn, exact(kind, timestamp, alpha, 1.5))


def test_a_positive_is_drawn_again_and_the_others_keep_their_proportions(dataset: Dataset) -> None:
    timestamp = START + 6 * HOUR
    shares = exact("as_of", timestamp, 0.75, 1.0)
    del shares[7], shares[4]
    kept = {row: share / sum(shares.values()) for row, share in shares.items()}
    drawn = draw(sampler(dataset, "as_of"), timestamp, requests=500, count=40, positives=[7, 0, 4])
    given_up = drawn == 0
    # Rows 7 and 4 hold 0.73 of the weight: 0.73^9 = 0.06 of the draws hit them nine times.
    assert 0.03 < given_up.mean() < 0.1
    assert_drawn_as(drawn[~given_up], kept)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_where_the_positive_is_all_there_is(tmp_path: Path, kind: Kind) -> None:
    dataset = write_dataset(tmp_path, first_seen=[START], support=[3], popularity=[(START, 2, 3)])
    source = sampler(dataset, kind)
    assert draw(source, START + 2 * HOUR, positives=[2]).tolist() == [[0] * 4]
    assert draw(source, START + 2 * HOUR, positives=[5]).tolist() == [[2] * 4]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_before_the_first_item_or_from_an_empty_log(
    dataset: Dataset, tmp_path: Path, kind: Kind
) -> None:
    source = sampler(dataset, kind)
    assert not draw(source, START).any()
    mixed = source.draw(
        np.array([1, 2]), np.array([START - 1, START + 9 * HOUR]), np.zeros((2, 1), int), 3, 0
    )
    assert mixed[0].tolist() == [0, 0, 0]
    assert mixed[1].all()
    empty = write_dataset(tmp_path, num_items=3)
    assert not draw(sampler(empty, kind), START + 9 * HOUR).any()


def test_an_item_may_be_drawn_right_after_it_was_first_seen(dataset: Dataset) -> None:
    source = sampler(dataset, "window")
    assert 5 not in draw(source, START + 2 * HOUR, requests=100)
    assert 5 in draw(source, START + 2 * HOUR + 1, requests=100)


@pytest.mark.parametrize("kind", ["as_of", "decayed"])
def test_a_bucket_counts_from_its_last_microsecond_on(dataset: Dataset, kind: Kind) -> None:
    source = sampler(dataset, kind)
    assert set(draw(source, START + 2 * HOUR - 1, requests=100).ravel()) == {2, 3}
    assert set(draw(source, START + 2 * HOUR, requests=100).ravel()) == {2, 3, 4}


@given(
    born=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    positives=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 20)), max_size=30),
    kind=st.sampled_from(KINDS),
    minutes=st.lists(st.integers(-60, 4000), min_size=1, max_size=10),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_future_item_is_never_drawn(
    tmp_path_factory: pytest.TempPathFactory,
    born: list[int],
    positives: list[tuple[int, int]],
    kind: Kind,
    minutes: list[int],
) -> None:
    first_seen = sorted(START + hour * HOUR // 2 for hour in born)
    counts: Counter[tuple[int, int]] = Counter()
    support = [0] * len(born)
    for item, later in positives:
        item %= len(born)
        moment = first_seen[item] + later * HOUR
        counts[moment - (moment - START) % HOUR, item + 2] += 1
        support[item] += 1
    dataset = write_dataset(
        tmp_path_factory.mktemp("random"),
        first_seen=first_seen,
        support=support,
        popularity=[(start, row, count) for (start, row), count in sorted(counts.items())],
    )
    timestamp = START + np.array(minutes) * HOUR // 60
    ids = np.arange(len(minutes))
    source = sampler(dataset, kind, half_life_hours=0.02)
    drawn = source.draw(ids, timestamp, np.zeros((len(ids), 1), int), 30, 0)
    for row, moment in zip(drawn.tolist(), timestamp.tolist(), strict=True):
        if kind == "window":
            allowed = {i + 2 for i, s in enumerate(first_seen) if s < moment and support[i]}
        else:
            allowed = {row for start, row in counts if start + HOUR <= moment}
        assert set(row) <= (allowed or {0})
        assert all(first_seen[drawn - 2] < moment for drawn in row if drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_draws_the_same_alone_as_in_any_batch(dataset: Dataset, kind: Kind) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**62), 2**62, 200)
    timestamp = START + rng.integers(0, 8 * HOUR, 200)
    positives = rng.integers(2, 8, (200, 2))
    source = sampler(dataset, kind, seed=3)
    together = source.draw(ids, timestamp, positives, 6, epoch=4)
    order = rng.permutation(200)
    shuffled = source.draw(ids[order], timestamp[order], positives[order], 6, epoch=4)
    assert np.array_equal(shuffled, together[order])
    for index in range(20):
        one = slice(index, index + 1)
        alone = source.draw(ids[one], timestamp[one], positives[one], 6, epoch=4)
        assert np.array_equal(alone, together[one])
        fewer = source.draw(ids[one], timestamp[one], positives[one], 2, epoch=4)
        assert np.array_equal(fewer, together[one, :2])
    again = sampler(dataset, kind, seed=3).draw(ids, timestamp, positives, 6, epoch=4)
    assert np.array_equal(again, together)


def test_draws_change_with_the_epoch_only_if_resampling_is_on(dataset: Dataset) -> None:
    def epoch(index: int, *, resample: bool, seed: int = 0) -> list[list[int]]:
        source = sampler(dataset, "window", seed=seed, resample=resample)
        return draw(source, START + 9 * HOUR, requests=50, epoch=index).tolist()

    assert epoch(0, resample=True) != epoch(1, resample=True)
    assert epoch(0, resample=False) == epoch(1, resample=False)
    assert epoch(0, resample=False) != epoch(0, resample=False, seed=1)


def test_neighbouring_requests_slots_and_seeds_draw_independently(dataset: Dataset) -> None:
    def rows(first_id: int, seed: int) -> np.ndarray:
        source = sampler(dataset, "window", seed=seed)
        return draw(source, START + 9 * HOUR, requests=2000, count=2, first_id=first_id)

    shares = exact("window", START + 9 * HOUR, 0.75, 1.0)
    by_chance = sum(share**2 for share in shares.values())
    base = rows(0, 0)
    pairs = [
        (base[:, 0], base[:, 1]),
        (base[1:, 0], base[:-1, 0]),
        (base[:, 0], rows(0, 1)[:, 0]),
        (base[:, 0], rows(1, 0)[:, 0]),
    ]
    for one, other in pairs:
        assert abs(np.mean(one == other) - by_chance) < 5 * np.sqrt(by_chance / 2000)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_decay_over_thousands_of_half_lives_neither_overflows_nor_forgets(
    tmp_path: Path, alpha: float
) -> None:
    gap = 2600 * HOUR
    hours = [0, 1, 450, 451, 451 + 390, 1700, 1701]
    counts = [
        *((START + hour * HOUR, 2 + index % 3, 1 + index) for index, hour in enumerate(hours)),
        (START + gap, 2, 1),
    ]
    dataset = write_dataset(tmp_path, num_items=3, popularity=counts)
    source = sampler(dataset, "decayed", alpha=alpha, half_life_hours=1.0)
    for hour in [1, 2, 449, 452, 841.5, 1600, 1702, 2599, 2601, 9000]:
        timestamp = START + int(hour * HOUR)
        available = [entry for entry in counts if entry[0] + HOUR <= timestamp]
        newest = available[-1][0]
        popularity: dict[int, float] = {}
        for start, row, count in available:
            # As of the newest bucket: the same shares, without underflow.
            left = 0.5 ** ((newest - start) / HOUR)
            popularity[row] = popularity.get(row, 0.0) + count * left
        weights = {row: value**alpha for row, value in popularity.items()}
        total = sum(weights.values())
        drawn = draw(source, timestamp, requests=100, count=40)
        likely = {row: weight / total for row, weight in weights.items() if weight > 1e-6 * total}
        assert_drawn_as(drawn, likely)


def test_other_buckets_than_the_dataset_was_built_with_are_refused(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"negatives\.bucket_minutes is 30"):
        sampler(dataset, "as_of", bucket_minutes=30)


@pytest.mark.parametrize("counts", [[(START + HOUR, 2, 1), (START, 2, 1)], [(START, 2, 0)]])
def test_a_damaged_popularity_file_is_refused_by_name(
    tmp_path: Path, counts: list[tuple[int, int, int]]
) -> None:
    dataset = write_dataset(tmp_path, num_items=2, popularity=counts)
    with pytest.raises(DataError, match=r"popularity\.parquet"):
        sampler(dataset, "as_of")
    (tmp_path / "popularity.parquet").unlink()
    with pytest.raises(DataError, match=r"popularity\.parquet"):
        sampler(dataset, "as_of")


def test_wide_lists_of_taken_rows_exclude_as_narrow_ones_do(dataset: Dataset) -> None:
    rng = np.random.default_rng(0)
    ids, timestamp = np.arange(300), np.full(300, START + 9 * HOUR)
    narrow = rng.integers(0, 8, (300, 3))
    wide = np.zeros((300, 40), int)
    wide[:, [5, 17, 39]] = narrow
    source = sampler(dataset, "window")
    few, many = (source.draw(ids, timestamp, taken, 6, 0) for taken in (narrow, wide))
    assert np.array_equal(few, many)
    assert not any(set(row) & set(taken) - {0} for row, taken in zip(many, narrow, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_known_positives_are_left_out_and_the_rest_keep_their_shares(
    dataset: Dataset, kind: Kind
) -> None:
    moment = START + 9 * HOUR
    shares = exact(kind, moment, 0.75, 1.0)
    history = np.tile([0, 5, 7, 0, 0, 0, 0, 0, 0, 5], (3_000, 1))
    source = sampler(dataset, kind, exclude_known=True, half_life_hours=1.0)
    ids, times = np.arange(3_000), np.full(3_000, moment)
    drawn = source.negatives(ids, times, np.full((3_000, 1), 3), history, 0)
    left = {row: share for row, share in shares.items() if row not in (3, 5, 7)}
    total = sum(left.values())
    assert_drawn_as(drawn[drawn > 0], {row: share / total for row, share in left.items()})
    # Given up after 32 draws that were all known.
    assert (drawn == 0).mean() == pytest.approx((1 - total) ** 32, abs=0.01)
    off = sampler(dataset, kind, half_life_hours=1.0)
    assert 5 in off.negatives(ids, times, np.full((3_000, 1), 3), history, 0)


@pytest.mark.parametrize("half_life", [1.0, 0.004])
@pytest.mark.parametrize("kind", KINDS)
def test_expected_draws_are_the_sum_of_every_requests_shares(
    dataset: Dataset, kind: Kind, half_life: float
) -> None:
    rng = np.random.default_rng(1)
    timestamp = START + rng.integers(-HOUR, 8 * HOUR, 60)
    source = sampler(dataset, kind, per_positive=3, half_life_hours=half_life)
    expected, early = source.expected_draws(timestamp)
    slow = np.zeros(len(expected))
    for moment in timestamp.tolist():
        shares = exact(kind, moment, 0.75, half_life)
        for row, share in shares.items():
            slow[row] += 3 * share
    assert expected == pytest.approx(slow, rel=1e-6, abs=1e-9)
    assert not early.any()
    assert not source.expected_draws(np.empty(0, np.int64))[0].any()


def test_a_catalogue_leak_draws_what_the_whole_log_likes_before_it_exists(
    dataset: Dataset,
) -> None:
    counts: Counter[int] = Counter()
    for _, row, count in COUNTS:
        counts[row] += count
    weights = {row: count**0.75 for row, count in counts.items()}
    shares = {row: weight / sum(weights.values()) for row, weight in weights.items()}
    source = sampler(dataset, "as_of", catalogue_leak=True)
    assert_drawn_as(draw(source, START + HOUR, requests=2_000), shares)
    expected, early = source.expected_draws(np.array([START + HOUR, START + 9 * HOUR]))
    assert expected[2:] == pytest.approx([8 * shares.get(row, 0.0) for row in range(2, 8)])
    # At the first request, rows 4 and later are not yet born: row 4 at that very moment.
    assert early[2:] == pytest.approx(
        [4 * shares.get(row, 0.0) if row >= 4 else 0.0 for row in range(2, 8)]
    )


def test_in_batch_negatives_are_other_requests_positives_that_existed(dataset: Dataset) -> None:
    ids = np.arange(4)
    times = START + np.array([1, 3, 9, 9]) * HOUR
    positives = np.array([[2, 0], [4, 3], [7, 4], [5, 0]])
    seen: list[set[int]] = [set() for _ in ids]
    source = sampler(dataset, "window", in_batch=5, per_positive=2)
    for epoch in range(60):
        drawn = source.negatives(ids, times, positives, np.zeros((4, 0), int), epoch)
        assert drawn.shape == (4, 7)
        plain = source.draw(ids, times, positives, 2, epoch)
        assert np.array_equal(drawn[:, :2], plain)
        for row, found in zip(drawn[:, 2:].tolist(), seen, strict=True):
            found.update(row)
    # Born: 2 and 3 at 0:00, 4 at 1:00, 5 at 2:00, 7 at 5:00.
    assert [rows - {0} for rows in seen] == [{3}, {2, 5}, {2, 3, 5}, {2, 3, 4, 7}]
    again = source.negatives(ids, times, positives, np.zeros((4, 0), int), 59)
    assert np.array_equal(again, drawn)


def test_in_batch_negatives_follow_the_batch_and_may_leave_out_what_is_known(
    dataset: Dataset,
) -> None:
    ids, times = np.arange(600), np.full(600, START + 9 * HOUR)
    positives = np.tile([[2], [2], [3], [4], [5], [5]], (100, 1))
    history = np.tile([[4, 0]], (600, 1))
    source = sampler(dataset, "window", in_batch=8, exclude_known=True)
    drawn = source.negatives(ids, times, positives, history, 0)[:, source.count :]
    mine = drawn[positives[:, 0] == 3]
    assert_drawn_as(mine, {2: 0.5, 5: 0.5})
    alone = source.negatives(ids[:1], times[:1], positives[:1], history[:1], 0)
    assert not alone[:, source.count :].any()


def test_a_reader_puts_both_kinds_after_the_positive_and_avoids_the_history(
    tiny_clicks_dataset: Dataset,
) -> None:
    config = Negatives(per_positive=3, in_batch=2, exclude_known=True)
    source = NegativeSampler(tiny_clicks_dataset, config, seed=0)
    reader = RequestReader(tiny_clicks_dataset, "train", batch_size=64, sampler=source)
    in_batch = 0
    for batch in reader.epoch(0):
        assert batch.candidate_row.shape[1] == 1 + 3 + 2
        assert not batch.labels[:, 1:].any()
        positives = set(batch.candidate_row[:, 0].tolist())
        for history, candidates, mask in zip(
            batch.history_row.tolist(),
            batch.candidate_row.tolist(),
            batch.candidate_mask,
            strict=True,
        ):
            negatives = {row for row in candidates[1:] if row}
            assert not negatives & {candidates[0], *history}
            assert {row for row in candidates[4:] if row} <= positives
            assert mask.tolist() == [row != 0 for row in candidates]
            in_batch += sum(row > 0 for row in candidates[4:])
    assert in_batch > 100


def test_evaluation_takes_no_negatives_from_the_batch(tiny_clicks_dataset: Dataset) -> None:
    config = parse_config("{events: {path: x}, negatives: {in_batch: 4, per_positive: 2}}")
    sampler = evaluation_sampler(config, tiny_clicks_dataset)
    assert sampler is not None
    reader = RequestReader(tiny_clicks_dataset, "next", batch_size=9, sampler=sampler)
    assert {batch.candidate_row.shape[1] for batch in reader.epoch(0)} == {3}
