"""The simulated feed: what its probabilities, its exposure and its clock promise."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from thawline.config import Simulate
from thawline.data.simulate import simulate
from thawline.errors import ConfigError

SETTINGS = Simulate(impressions=60_003, users=500, items=1_500, days=10)
DAY = 86_400_000_000


def columns(path):
    """Columns of a file as arrays; times as microseconds."""
    table = pq.read_table(path)
    arrays = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_timestamp(column.type):
            assert column.type == pa.timestamp("us", tz="UTC")
            column = column.cast(pa.int64())
        arrays[name] = column.to_numpy(zero_copy_only=False)
    return arrays


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return simulate(SETTINGS, tmp_path_factory.mktemp("feed") / "log")


@pytest.fixture(scope="module")
def events(log):
    return columns(log.events)


@pytest.fixture(scope="module")
def truth(log):
    return columns(log.truth)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path, log):
    again = simulate(SETTINGS, tmp_path / "again")
    assert again.events.read_bytes() == log.events.read_bytes()
    assert again.truth.read_bytes() == log.truth.read_bytes()
    assert again.items.read_bytes() == log.items.read_bytes()
    other = simulate(SETTINGS.model_copy(update={"seed": 1}), tmp_path / "other")
    assert other.events.read_bytes() != log.events.read_bytes()


def test_an_authors_items_are_about_the_same_and_few_authors_have_most(tmp_path):
    settings = SETTINGS.model_copy(update={"content_dim": 16, "authors": 100})
    items = pq.read_table(simulate(settings, tmp_path / "log").items)
    author = items["author_id"].to_numpy()
    sizes = np.sort(np.bincount(author)[1:])[::-1]
    assert sizes.sum() == 1_500
    # 1 / (1 + 1/2 + ... + 1/100) of the items, and half as many.
    assert sizes[0] == pytest.approx(1_500 / 5.187, abs=1)
    assert sizes[1] == pytest.approx(1_500 / 5.187 / 2, abs=1)
    content = items["content"].combine_chunks().flatten().to_numpy().reshape(1_500, 16)
    content = content / np.linalg.norm(content, axis=1, keepdims=True)
    alike = content @ content.T
    same = author[:, None] == author
    assert abs(alike[~same].mean()) < 0.02
    np.fill_diagonal(same, False)
    within = [alike[item][same[item]].mean() for item in range(1_500) if same[item].any()]
    assert np.mean(within) > 0.2


def test_authors_change_no_event(tmp_path, log):
    fewer = simulate(SETTINGS.model_copy(update={"authors": 3}), tmp_path / "log")
    assert fewer.events.read_bytes() == log.events.read_bytes()
    assert fewer.truth.read_bytes() == log.truth.read_bytes()


def test_every_impression_has_its_truth_and_there_are_as_many_as_asked_for(events, truth):
    assert len(events["item_id"]) == 60_003
    assert np.array_equal(events["request_id"], truth["request_id"])
    assert np.array_equal(events["item_id"], truth["item_id"])


@pytest.mark.parametrize("action", ["click", "save"])
def test_actions_happen_as_often_as_their_probabilities_say(events, truth, action):
    probability = truth[f"p_{action}"].astype(np.float64)
    happened = events[action]
    for part in (slice(None), events["position"] == 0, events["ctx_device"] == "ios"):
        expected = probability[part].sum()
        spread = np.sqrt((probability[part] * (1 - probability[part])).sum())
        assert abs(happened[part].sum() - expected) < 4 * spread


def test_probabilities_are_calibrated_in_every_tenth(events, truth):
    for action in ("click", "save"):
        probability = truth[f"p_{action}"].astype(np.float64)
        for tenth in np.array_split(np.argsort(probability), 10):
            expected = probability[tenth].sum()
            assert abs(events[action][tenth].sum() - expected) < 4 * np.sqrt(expected)


def test_a_save_is_a_click_too(events):
    assert not np.any(events["save"] & ~events["click"])


def test_rates_and_the_oracle_are_those_of_a_feed(events, truth):
    assert 0.10 < events["click"].mean() < 0.20
    assert 0.02 < events["save"].mean() < 0.05
    assert 0.75 < roc_auc_score(events["click"], truth["p_click"]) < 0.86
    assert 0.75 < roc_auc_score(events["save"], truth["p_save"]) < 0.88


def test_knowing_the_user_beats_knowing_the_best_items(events, truth):
    # The best score that ignores the user: the item's mean true probability.
    _, item = np.unique(events["item_id"], return_inverse=True)
    mean = np.bincount(item, truth["p_click"]) / np.bincount(item)
    assert roc_auc_score(events["click"], mean[item]) < 0.70


def test_only_born_items_are_shown_and_none_twice_in_a_request(log, events):
    items = columns(log.items)
    born = dict(zip(items["item_id"], items["born"], strict=True))
    shown_at = np.array([born[item] for item in events["item_id"]])
    assert np.all(shown_at <= events["timestamp"])
    pairs = np.stack([events["request_id"], events["item_id"]])
    assert len(np.unique(pairs, axis=1).T) == len(events["item_id"])


def test_half_of_the_items_are_born_after_the_start(log, events):
    born = columns(log.items)["born"]
    start = born.min()
    assert (born > start).sum() == 750
    late = born[born > start]
    assert np.all(np.abs(np.quantile(late - start, [0.25, 0.75]) / DAY - [2.5, 7.5]) < 0.5)


def test_requests_are_numbered_in_time_and_hold_one_user_and_positions_in_order(events):
    starts = np.flatnonzero(np.diff(events["request_id"], prepend=0))
    assert np.all(np.diff(events["timestamp"]) >= 0)
    assert np.array_equal(events["request_id"][starts], np.arange(1, len(starts) + 1))
    for name in ("user_id", "timestamp", "ctx_surface", "ctx_hour"):
        assert np.array_equal(np.repeat(events[name][starts], 10)[:60_003], events[name])
    assert np.array_equal(np.tile(np.arange(10), len(starts))[:60_003], events["position"])


def test_requests_fill_every_day_in_sessions(events):
    first = columns_of_requests(events)
    day = (first["timestamp"] - first["timestamp"][0] // DAY * DAY) // DAY
    assert np.array_equal(np.unique(day), np.arange(10))
    order = np.lexsort([first["timestamp"], first["user_id"]])
    same_user = np.diff(first["user_id"][order]) == 0
    gap = np.diff(first["timestamp"][order])[same_user]
    # 2.5 requests a session: more than half of the gaps lie within one.
    assert 0.5 < (gap < 310_000_000).mean() < 0.7


def columns_of_requests(events):
    starts = np.flatnonzero(np.diff(events["request_id"], prepend=0))
    return {name: values[starts] for name, values in events.items()}


def test_a_larger_exponent_makes_fewer_items_more_popular(tmp_path):
    shares = []
    for zipf in (0.0, 1.0, 2.0):
        log = simulate(SETTINGS.model_copy(update={"zipf": zipf}), tmp_path / f"{zipf}")
        counts = np.sort(np.unique(columns(log.events)["item_id"], return_counts=True)[1])[::-1]
        shares.append(counts[:15].sum() / counts.sum())
    assert shares[0] < 0.05
    assert shares[0] + 0.1 < shares[1] < shares[2] - 0.1


def test_interests_that_drift_are_worth_less_later(tmp_path):
    """A user's clicked items of the first days tell less about the last day after more drift."""
    found = []
    for drift in (0.0, 0.5):
        settings = SETTINGS.model_copy(update={"drift": drift, "content_dim": 32, "zipf": 0.5})
        log = simulate(settings, tmp_path / f"{drift}")
        items, events = pq.read_table(log.items), columns(log.events)
        content = np.zeros((items.num_rows + 1, 32))
        content[items["item_id"].to_numpy()] = np.stack(items["content"].to_numpy())
        early = events["timestamp"] < np.quantile(events["timestamp"], 0.7)
        profile = np.zeros((SETTINGS.users + 1, 32))
        liked = early & events["click"]
        np.add.at(profile, events["user_id"][liked], content[events["item_id"][liked]])
        shown = early & ~events["click"]
        np.add.at(profile, events["user_id"][shown], -0.15 * content[events["item_id"][shown]])
        score = (profile[events["user_id"]] * content[events["item_id"]]).sum(axis=1)
        found.append(roc_auc_score(events["click"][~early], score[~early]))
    assert found[0] > found[1] + 0.05


def test_content_vectors_are_there_when_asked_for(tmp_path, log):
    assert pq.read_schema(log.items).names == ["item_id", "born", "author_id"]
    settings = SETTINGS.model_copy(update={"content_dim": 5, "impressions": 1_000})
    content = pq.read_table(simulate(settings, tmp_path / "log").items)["content"]
    assert len(content) == 1_500
    assert {len(vector) for vector in content.to_pylist()} == {5}


def test_very_few_and_very_unequal_items_still_fill_a_request(tmp_path):
    settings = Simulate(
        impressions=2_000, users=3, items=12, days=3, candidates=10, zipf=3.0, born_during=0.1
    )
    events = columns(simulate(settings, tmp_path / "log").events)
    pairs = np.stack([events["request_id"], events["item_id"]])
    assert len(np.unique(pairs, axis=1).T) == 2_000


def test_fewer_items_than_candidates_are_refused(tmp_path):
    settings = Simulate(items=15, born_during=0.5, candidates=10)
    with pytest.raises(ConfigError, match=r"simulate\.items .* leave 8 items at the start"):
        simulate(settings, tmp_path / "log")
    assert not (tmp_path / "log").exists()
