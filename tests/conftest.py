"""Datasets that several tests read; nobody writes into them."""

import pyarrow.parquet as pq
import pytest

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset

TINY_FEED = {
    "simulate": {
        "impressions": 6_000,
        "users": 120,
        "items": 200,
        "days": 8,
        "candidates": 6,
        "interests": 8,
    },
    "windows": {
        "test_days": 1,
        "finetune_days": 3,
        "pretrain_days": 4,
        "history_length": 12,
        "sequence_length": 10,
        "holdout_users": 0.2,
        "tiers": {"head": 10, "torso": 4},
        "rows_per_file": 150,
        "rows_per_group": 32,
    },
    "runtime": {"threads": 1},
}
"""Impressions with two actions, three context columns and known probabilities."""


def built(config, root):
    """The dataset of a config, as `thawline windows` builds it."""
    root.mkdir(parents=True, exist_ok=True)
    build_dataset(config, root)
    return Dataset.open(root)


@pytest.fixture(scope="session")
def tiny_config():
    return Config.model_validate(TINY_FEED)


@pytest.fixture(scope="session")
def tiny_dataset(tiny_config, tmp_path_factory):
    """About 300 requests to train on, 6 candidates each; the log lies in its `source`."""
    return built(tiny_config, tmp_path_factory.mktemp("data") / "feed")


@pytest.fixture(scope="session")
def tiny_clicks_config(tiny_dataset, tmp_path_factory):
    """The clicks of the tiny feed alone, as a log without impressions."""
    events = pq.read_table(tiny_dataset.root / "source" / "events.parquet")
    clicks = events.filter(events["click"]).select(
        ["user_id", "item_id", "timestamp", "ctx_device"]
    )
    path = tmp_path_factory.mktemp("log") / "clicks.parquet"
    pq.write_table(clicks, path)
    return Config.model_validate(
        {
            "events": {"path": str(path), "context": {"device": "ctx_device"}},
            "windows": TINY_FEED["windows"],
            "runtime": TINY_FEED["runtime"],
        }
    )


@pytest.fixture(scope="session")
def tiny_clicks_dataset(tiny_clicks_config, tmp_path_factory):
    """About 300 requests to train on, of one positive each; negatives have to be sampled."""
    return built(tiny_clicks_config, tmp_path_factory.mktemp("data") / "clicks")
