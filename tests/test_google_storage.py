"""Logs and datasets in gs://, against a server on loopback that asks for credentials."""

import pyarrow.parquet as pq
import pytest
from engine_helpers import tables
from fake_gcs import FakeGcs

from thawline.data import storage
from thawline.data.inputs import local_inputs
from thawline.data.manifest import Dataset
from thawline.data.storage import fetch_files, fetch_folder, publish_folder
from thawline.data.windows import build_dataset
from thawline.errors import DataError


@pytest.fixture
def google(monkeypatch, tmp_path):
    """A server with credentials in the environment."""
    with FakeGcs() as server:
        secret = tmp_path / "credentials.json"
        secret.write_text(server.credentials(), encoding="utf-8")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(secret))
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", server.url)
        monkeypatch.setattr(storage, "GOOGLE_SECONDS", 2)
        monkeypatch.setattr(storage, "FIRST_PAUSE", 0.01)
        yield server
        server.shutdown()


def test_a_log_in_google_storage_gives_the_dataset_of_the_same_log_here(
    google, tiny_clicks_config, tiny_clicks_dataset, tmp_path
):
    log = pq.read_table(tiny_clicks_config.events.path)
    half = log.num_rows // 2
    for name, part in (("0.parquet", log.slice(0, half)), ("1.parquet", log.slice(half))):
        pq.write_table(part, tmp_path / name)
        google.objects["logs", f"clicks/day={name[0]}/{name}"] = (tmp_path / name).read_bytes()
    google.objects["logs", "clicks/_SUCCESS"] = b""
    events = tiny_clicks_config.events.model_copy(update={"path": "gs://logs/clicks"})
    config = tiny_clicks_config.model_copy(update={"events": events})
    out = tmp_path / "dataset"
    with local_inputs(config, out) as local:
        out.mkdir()
        build_dataset(local, out)
    publish_folder(out, "gs://data/sets/clicks")
    fetched = Dataset.open(fetch_folder("gs://data/sets/clicks", tmp_path / "cache"))
    for name, table in tables(tiny_clicks_dataset.root).items():
        assert tables(fetched.root)[name].equals(table), name


def test_a_download_that_was_cut_is_finished(google, tmp_path):
    content = bytes(range(256)) * 4_000
    google.objects["logs", "log.csv"] = content
    google.drops = 2
    (file,) = fetch_files("gs://logs/*.csv", tmp_path, "events.path")
    assert google.drops == 0
    assert file.read_bytes() == content


def test_a_dataset_that_could_not_be_put_whole_is_not_taken_for_one(google, tmp_path):
    folder = tmp_path / "dataset"
    (folder / "days").mkdir(parents=True)
    (folder / "manifest.json").write_text("old", encoding="utf-8")
    (folder / "days" / "one").write_text("1", encoding="utf-8")
    publish_folder(folder, "gs://data/set")
    assert google.objects["data", "set/manifest.json"] == b"old"
    (folder / "manifest.json").write_text("new", encoding="utf-8")
    (folder / "days" / "one").write_text("2", encoding="utf-8")
    google.refused = {"set/days/one"}
    with pytest.raises(DataError, match=r"set/days/one of gs://data/set"):
        publish_folder(folder, "gs://data/set")
    assert ("data", "set/manifest.json") not in google.objects
    google.refused = frozenset()
    publish_folder(folder, "gs://data/set")
    assert google.objects["data", "set/manifest.json"] == b"new"
    assert google.objects["data", "set/days/one"] == b"2"


def test_credentials_that_nobody_confirms_are_an_error_and_no_endless_wait(
    google, tmp_path, monkeypatch
):
    google.objects["logs", "log.csv"] = b"x"
    secret = tmp_path / "credentials.json"
    secret.write_text(google.credentials().replace(google.url, "http://127.0.0.1:9"))
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    with pytest.raises(DataError, match=r"gs://logs/log\.csv: .*OAuth2") as caught:
        fetch_files("gs://logs/log.csv", tmp_path, "events.path")
    assert "credentials in the environment" in caught.value.remedy
