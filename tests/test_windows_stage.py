"""The stage that builds a dataset: what it logs, what a failure leaves, and the news log."""

import contextlib
import datetime
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from window_reference import DAY, built

from thawline.config import Config
from thawline.data.manifest import Dataset
from thawline.errors import DataError
from thawline.stages import windows as stage


class Recorder:
    """Stands for an MLflow run: keeps what it is told."""

    def __init__(self):
        self.params, self.metrics, self.artifacts = {}, {}, []

    def log_params(self, params):
        self.params |= params

    def log_metrics(self, metrics):
        self.metrics |= metrics

    def log_artifact(self, path):
        self.artifacts.append(path.read_text(encoding="utf-8"))


@pytest.fixture
def recorder(monkeypatch):
    record = Recorder()
    monkeypatch.setattr(stage, "stage_run", lambda *_: contextlib.nullcontext(record))
    return record


def test_the_stage_logs_its_counts_and_the_data_version(tmp_path, recorder, tiny_clicks_config):
    manifest = stage.run(tiny_clicks_config, tmp_path / "dataset")
    assert Dataset.open(tmp_path / "dataset").manifest == manifest
    assert recorder.params["data_version"] == manifest.data_version
    assert recorder.params["finetune_window"] == "2026-01-05 to 2026-01-07"
    assert recorder.metrics["items"] == manifest.num_items
    assert recorder.metrics["requests"] == manifest.requests
    assert recorder.metrics["audit"]["error"] == 0
    # The manifest and the audit.
    assert [json.loads(text)["data_version"] for text in recorder.artifacts] == [
        manifest.data_version
    ] * 2


def test_a_stage_that_fails_leaves_the_earlier_dataset_and_nothing_else(
    tmp_path, recorder, tiny_clicks_config
):
    out = tmp_path / "dataset"
    out.mkdir()
    (out / "manifest.json").write_text("earlier", encoding="utf-8")
    windows = tiny_clicks_config.windows.model_copy(update={"end": datetime.date(2030, 1, 1)})
    with pytest.raises(DataError, match="has no requests"):
        stage.run(tiny_clicks_config.model_copy(update={"windows": windows}), out)
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    assert (out / "manifest.json").read_text(encoding="utf-8") == "earlier"
    assert recorder.params == {}


@pytest.mark.slow
def test_the_news_log_becomes_a_dataset(tmp_path):
    path = Path(__file__).parent.parent / "../shared/data/news_clicks.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    config = Config.model_validate(
        {
            "events": {
                "path": str(path),
                "timestamp_unit": "ms",
                "columns": {"item_id": "click_article_id", "timestamp": "click_timestamp"},
                "context": {"device": "click_deviceGroup", "region": "click_region"},
                "sample_users": 0.2,
            },
            "windows": {
                "end": "2017-10-16",
                "finetune_days": 7,
                "pretrain_days": 13,
                "pretrain_overlap": True,
            },
        }
    )
    dataset = built(config, tmp_path / "dataset")
    table = pq.read_table(path, columns=["user_id", "click_timestamp"])
    users = [
        user
        for user in table["user_id"].unique().to_pylist()
        if int(hashlib.md5(f"sample:{user}".encode()).hexdigest()[:12], 16) / 16**12 < 0.2  # noqa: S324
    ]
    kept = table.filter(pc.is_in(table["user_id"], pa.array(users, pa.int32())))
    day = pc.divide(kept["click_timestamp"], DAY // 1_000).to_numpy()
    first = (datetime.date(2017, 10, 9) - datetime.date(1970, 1, 1)).days
    counts = dataset.manifest.requests_by_day
    assert list(counts.values()) == [int((day == first + offset).sum()) for offset in range(8)]
    assert dataset.manifest.rejected == {}
