"""The bootstrap over users against a hold-out in which the drawn users really come that often."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thawline.evaluation import intervals, metrics
from thawline.evaluation.figures import Column, Measured
from thawline.evaluation.intervals import UserSums, draws, figure_names
from thawline.evaluation.scored import Scored

ONE_TIER = np.zeros(50, np.int8)


def make_scored(seed: int, requests: int, users: int, *, weighted: bool = False) -> Scored:
    """Requests of 1 to 4 candidates, with scores that are often tied and users' own rates."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5, requests)
    count = int(sizes.sum())
    user = generator.integers(0, users, requests)
    taste = generator.normal(size=users)[np.repeat(user, sizes)]
    scores = np.round(generator.normal(size=count) + taste, 1).astype(np.float32)
    labels = generator.random(count) < 1 / (1 + np.exp(1 - scores - taste))
    return Scored(
        actions=["save"],
        request_id=np.arange(requests),
        timestamp=np.zeros(requests, np.int64),
        offsets=np.concatenate(([0], np.cumsum(sizes))),
        row=generator.integers(2, 52, count),
        labels=labels.astype(np.int8)[:, None],
        logits=scores[:, None],
        oracle=None,
        user_id=pa.array([f"u{number}" for number in user]),
        weight=generator.integers(0, 4, requests).astype(float) if weighted else None,
    )


def take(scored: Scored, requests: np.ndarray, user_id: list[str]) -> Scored:
    """The requests at some places, which may come again, of users by other names."""
    spans = [np.arange(scored.offsets[r], scored.offsets[r + 1]) for r in requests]
    chosen = np.concatenate([*spans, np.empty(0, np.int64)]).astype(np.int64)
    return replace(
        scored,
        request_id=np.arange(len(requests)),
        timestamp=scored.timestamp[requests],
        offsets=np.concatenate(([0], np.cumsum([len(span) for span in spans]))).astype(np.int64),
        row=scored.row[chosen],
        labels=scored.labels[chosen],
        logits=scored.logits[chosen],
        user_id=pa.array(user_id, pa.string()),
        weight=None if scored.weight is None else scored.weight[requests],
    )


def drawn(scored: Scored, counts: np.ndarray) -> Scored:
    """A hold-out in which user `u` is there `counts[u]` times, as users of their own."""
    assert scored.user is not None
    requests, names = [], []
    for user, count in enumerate(counts.astype(int)):
        own = np.flatnonzero(scored.user == user)
        for copy in range(count):
            requests.append(own)
            names += [f"{user}/{copy}"] * len(own)
    return take(scored, np.concatenate([*requests, np.empty(0, np.int64)]).astype(np.int64), names)


def measured(scored: Scored) -> Measured:
    column = Column(scored, scored.logits[:, 0], scored.labels[:, 0], 2)
    return column.measure(column.whole)


def resampled(scored: Scored, counts: np.ndarray) -> dict[str, np.ndarray]:
    assert scored.user is not None
    sums = UserSums(measured(scored), scored.user)
    return sums.figures(counts, counts @ sums.sums)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.booleans())
def test_every_figure_of_a_resample_is_that_of_a_hold_out_with_the_users_drawn(
    seed: int, weighted: bool
) -> None:
    scored = make_scored(seed, 12, 4, weighted=weighted)
    counts = next(draws(scored.num_users or 0, 3, seed))
    found = resampled(scored, counts)
    assert tuple(found) == figure_names(2)
    for number, row in enumerate(counts):
        expected = metrics.holdout_metrics(drawn(scored, row), ONE_TIER, hit_at=2)["pooled"]["save"]
        for name, values in found.items():
            value = values[number] if np.isfinite(values[number]) else None
            assert value == (
                None if expected[name] is None else pytest.approx(expected[name], abs=1e-9)
            ), name


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000))
def test_a_weight_counts_as_so_many_copies_of_the_request(seed: int) -> None:
    scored = make_scored(seed, 12, 4, weighted=True)
    assert scored.weight is not None
    assert scored.user_id is not None
    copies = np.repeat(np.arange(scored.num_requests), scored.weight.astype(int))
    names = scored.user_id.take(pa.array(copies)).to_pylist()
    repeated = replace(take(scored, copies, names), weight=None)
    found, expected = (
        metrics.holdout_metrics(one, ONE_TIER, hit_at=2)["pooled"]["save"]
        for one in (scored, repeated)
    )
    # Counts count candidates, whatever their weight.
    for name in ("positives", "candidates"):
        found.pop(name)
    for name, value in found.items():
        assert value == (
            None if expected[name] is None else pytest.approx(expected[name], abs=1e-9)
        ), name


def test_intervals_of_weighted_requests_are_those_of_so_many_copies() -> None:
    scored = make_scored(3, 60, 25, weighted=True)
    assert scored.weight is not None
    assert scored.user_id is not None
    copies = np.repeat(np.arange(scored.num_requests), scored.weight.astype(int))
    # A user who is left without a request would change who is drawn.
    names = scored.user_id.take(pa.array(copies)).to_pylist()
    kept = replace(
        take(scored, np.unique(copies), [names[np.searchsorted(copies, r)] for r in set(copies)]),
    )
    repeated = replace(take(scored, copies, names), weight=None)
    found, expected = (
        metrics.holdout_metrics(one, ONE_TIER, hit_at=2, resamples=50)["intervals"]["pooled"]
        for one in (kept, repeated)
    )
    assert found["save"].keys() == expected["save"].keys()
    for name, ends in found["save"].items():
        assert ends == pytest.approx(expected["save"][name], abs=1e-9), name


def test_the_linear_part_of_an_auc_gives_the_interval_of_the_exact_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored = make_scored(1, 4_000, 1_900)
    counts = np.concatenate(list(draws(scored.num_users or 0, 300)))
    exact = resampled(scored, counts)["auc"]
    monkeypatch.setattr(intervals, "LINEAR_FROM", 0)
    linear = resampled(scored, counts)["auc"]
    assert not np.array_equal(exact, linear)
    # About 1 / sqrt(1,900) of the spread, and no bias.
    gap = (exact - linear) / exact.std()
    assert gap.std() < 0.04
    assert abs(gap.mean()) < 0.01
    assert np.percentile(gap, [2.5, 97.5]) == pytest.approx([0, 0], abs=0.1)


def test_an_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    scored = make_scored(2, 3_000, 3_000)
    tree = metrics.holdout_metrics(scored, ONE_TIER, hit_at=2, resamples=800)
    loss = tree["pooled"]["save"]["log_loss"]
    low, high = tree["intervals"]["pooled"]["save"]["log_loss"]
    one = measured(scored)
    # Of a ratio of sums over users, by its linear part.
    assert scored.user is not None
    who = scored.user[one.column.request]
    gap = np.bincount(who, one.column.loss - loss)
    error = np.sqrt((gap**2).sum()) / len(who)
    assert (low, high) == pytest.approx((loss - 1.96 * error, loss + 1.96 * error), abs=0.3 * error)


def test_intervals_hold_every_slice_and_come_out_the_same_again() -> None:
    scored = make_scored(3, 200, 40)
    tier = np.arange(50, dtype=np.int8) % 3
    tree, again = (
        metrics.holdout_metrics(scored, tier, hit_at=2, resamples=50)["intervals"] for _ in "ab"
    )
    assert tree == again
    pooled = metrics.holdout_metrics(scored, tier, hit_at=2)["pooled"]["save"]
    for name, ends in tree["pooled"]["save"].items():
        assert ends[0] < pooled[name] < ends[1]
    assert set(tree["tiers"]) == {"head", "torso", "tail", "cold"}
    # No item is cold.
    assert set(tree["tiers"]["cold"]["save"].values()) == {None}
    assert tree["tiers"]["tail"]["save"]["auc"] is not None


def test_a_single_user_has_no_interval() -> None:
    tree = metrics.holdout_metrics(make_scored(4, 30, 1), ONE_TIER, hit_at=2, resamples=20)
    assert tree["users"] == 1
    assert set(tree["intervals"]["pooled"]["save"].values()) == {None}


def test_without_users_or_resamples_there_are_no_intervals() -> None:
    scored = make_scored(5, 30, 5)
    assert metrics.holdout_metrics(scored, ONE_TIER, hit_at=2)["intervals"] is None
    unknown = replace(scored, user_id=None)
    tree = metrics.holdout_metrics(unknown, ONE_TIER, hit_at=2, resamples=20)
    assert (tree["intervals"], tree["users"]) == (None, None)
    assert tree["pooled"]["save"]["user_auc"] is None


def test_draws_do_not_depend_on_how_many_are_held_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = np.concatenate(list(draws(7, 30)))
    monkeypatch.setattr(intervals, "BLOCK", 28)
    blocks = list(draws(7, 30))
    assert len(blocks) == 8
    assert np.array_equal(np.concatenate(blocks), whole)
    assert set(whole.sum(axis=1)) == {7.0}
