"""Logs, datasets and tables in S3, against a server on loopback, through a line that can break."""

import contextlib
import json
import socket
import threading
from types import SimpleNamespace

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_helpers import assert_same, tables
from moto.server import ThreadedMotoServer
from pyarrow import fs
from typer.testing import CliRunner

from thawline import cli
from thawline.config import Config
from thawline.data import storage
from thawline.data.inputs import local_inputs
from thawline.data.manifest import Dataset
from thawline.data.storage import Remote, fetch_files, fetch_folder, publish_folder
from thawline.data.windows import build_dataset
from thawline.errors import ConfigError, DataError


class Line:
    """A TCP line to a server that can be cut."""

    def __init__(self, port):
        self.server_port = port
        self.cuts = 0
        """Connections still to be cut once they have brought more than 64 KiB."""
        self.puts = 0
        self.allowed_puts = None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.server_port))
            for pair in ((client, server, self._sees), (server, client, self._brings())):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target, allows):
        with contextlib.suppress(OSError):
            while (chunk := source.recv(1 << 16)) and allows(chunk):
                target.sendall(chunk)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _sees(self, chunk):
        # Others are the markers of folders that pyarrow makes.
        if chunk.startswith(b"PUT ") and b"partNumber=" in chunk.partition(b"\r\n")[0]:
            self.puts += 1
            return self.allowed_puts is None or self.puts <= self.allowed_puts
        return True

    def _brings(self):
        brought = 0

        def allows(chunk):
            nonlocal brought
            brought += len(chunk)
            if brought > 1 << 16 and self.cuts > 0:
                self.cuts -= 1
                return False
            return True

        return allows


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        _, port = moto.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="logs")
        yield port
        moto.stop()


@pytest.fixture
def line(server, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.01)
    line = Line(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
    yield line
    line.listener.close()


@pytest.fixture
def bucket(server):
    s3 = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{server}")
    yield s3.Bucket("logs")
    s3.Bucket("logs").objects.all().delete()


def keys(bucket):
    return sorted(found.key for found in bucket.objects.all() if not found.key.endswith("/"))


def folder_of(root, **files):
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def contents(root):
    return {
        str(file.relative_to(root)): file.read_text()
        for file in root.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def build(config, out):
    with local_inputs(config, out) as local:
        out.mkdir(parents=True)
        build_dataset(local, out)
    return Dataset.open(out)


def test_a_log_in_s3_gives_the_dataset_of_the_same_log_here(
    line, bucket, tiny_clicks_config, tiny_clicks_dataset, tmp_path
):
    log = pq.read_table(tiny_clicks_config.events.path)
    half = log.num_rows // 2
    for name, part in (("0.parquet", log.slice(0, half)), ("1.parquet", log.slice(half))):
        pq.write_table(part, tmp_path / name)
        bucket.upload_file(str(tmp_path / name), f"clicks/day={name[0]}/{name}")
    bucket.put_object(Key="clicks/_SUCCESS", Body=b"")
    for url in ("s3://logs/clicks", "s3://logs/clicks/day=*/*.parquet"):
        events = tiny_clicks_config.events.model_copy(update={"path": url})
        config = tiny_clicks_config.model_copy(update={"events": events})
        built = build(config, tmp_path / url.rpartition("/")[2].strip("*") / "dataset")
        assert tables(built.root).keys() == tables(tiny_clicks_dataset.root).keys()
        for name, table in tables(tiny_clicks_dataset.root).items():
            assert tables(built.root)[name].equals(table), name
    assert not list(tmp_path.rglob(".dataset.inputs"))


def test_a_dropped_connection_is_tried_again(line, bucket, tmp_path):
    numbers = pa.table({"x": np.random.default_rng(0).integers(0, 2**60, 100_000)})
    pq.write_table(numbers, tmp_path / "log.parquet")
    bucket.upload_file(str(tmp_path / "log.parquet"), "log.parquet")
    line.cuts = 2
    (fetched,) = fetch_files("s3://logs/log.parquet", tmp_path / "cache", "events.path")
    assert line.cuts == 0
    assert pq.read_table(fetched).equals(numbers)


def test_a_storage_that_stays_away_is_named_and_nothing_half_fetched_is_left(
    line, bucket, tmp_path, monkeypatch
):
    bucket.put_object(Key="log.csv", Body=b"user_id\n" * 100_000)
    line.cuts = 1_000
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    with pytest.raises(DataError, match=r"logs/log\.csv of s3://logs/log\.csv.*attempt 2 of 2"):
        fetch_files("s3://logs/log.csv", tmp_path, "events.path")
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_published_folder_comes_back_as_it_was(line, bucket, tmp_path):
    folder = folder_of(tmp_path / "dataset", manifest_json="{}", days__one="1", days__two="2")
    publish_folder(folder, "s3://logs/data/set")
    assert contents(fetch_folder("s3://logs/data/set", tmp_path)) == {
        "manifest.json": "{}",
        "days/one": "1",
        "days/two": "2",
    }


def test_a_new_dataset_replaces_the_old_and_sends_only_what_is_new(line, bucket, tmp_path):
    folder = folder_of(tmp_path / "dataset", manifest_json="1", days__one="1", days__two="2")
    publish_folder(folder, "s3://logs/set")
    line.puts = 0
    publish_folder(folder, "s3://logs/set")
    assert line.puts == 0
    (folder / "days/one").unlink()
    folder_of(folder, manifest_json="2", days__three="3")
    publish_folder(folder, "s3://logs/set")
    assert line.puts == 3  # The day, what was published, and the manifest.
    assert keys(bucket) == [
        "set/.published.json",
        "set/days/three",
        "set/days/two",
        "set/manifest.json",
    ]
    assert contents(fetch_folder("s3://logs/set", tmp_path))["manifest.json"] == "2"


def test_only_what_has_changed_is_fetched_again(line, bucket, tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "dataset", manifest_json="1", days__one="1", days__two="2")
    publish_folder(folder, "s3://logs/set")
    fetch_folder("s3://logs/set", tmp_path)
    fetched = []
    get = Remote.get
    monkeypatch.setattr(Remote, "get", lambda *a: (fetched.append(a[1]), get(*a)))
    (folder / "days/one").unlink()
    folder_of(folder, manifest_json="2", days__three="three")
    publish_folder(folder, "s3://logs/set")
    fetched.clear()
    assert contents(fetch_folder("s3://logs/set", tmp_path)) == contents(folder)
    assert sorted(fetched) == ["logs/set/days/three", "logs/set/manifest.json"]


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [0, 2])
def test_a_dataset_that_could_not_be_put_whole_is_not_taken_for_one(
    line, bucket, tmp_path, monkeypatch, allowed
):
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    old = folder_of(tmp_path / "old", manifest_json="old", a="old", b="old")
    publish_folder(old, "s3://logs/set")
    new = folder_of(tmp_path / "new", manifest_json="new", a="new!", b="new!")
    line.puts, line.allowed_puts = 0, allowed
    with pytest.raises(DataError, match="s3://logs/set"):
        publish_folder(new, "s3://logs/set")
    line.allowed_puts = None
    assert "set/manifest.json" not in keys(bucket)
    with pytest.raises(DataError, match=r"manifest\.json"):
        Dataset.open(fetch_folder("s3://logs/set", tmp_path / "cache"))
    publish_folder(new, "s3://logs/set")
    assert contents(fetch_folder("s3://logs/set", tmp_path / "cache")) == contents(new)


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        fetch_files("s3://someone:hush@logs/x", None, "events.path")
    assert "hush" not in str(caught.value)


def test_a_path_that_is_not_there_is_named(line, bucket, tmp_path):
    with pytest.raises(DataError, match=r"events\.path: s3://logs/none/\*\.csv names no data file"):
        fetch_files("s3://logs/none/*.csv", tmp_path, "events.path")
    with pytest.raises(DataError, match="s3://nobody/set"):
        fetch_folder("s3://nobody/set", tmp_path)


def test_hdfs_without_its_client_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ConfigError, match="libhdfs"):
        fetch_files("hdfs://namenode:8020/logs", tmp_path, "events.path")


def test_a_storage_with_folders_of_its_own_is_read_and_written_like_a_bucket(monkeypatch, tmp_path):
    """The local file system stands for HDFS, whose client is not here."""
    cluster = tmp_path / "cluster"

    class Here:
        @staticmethod
        def from_uri(uri):
            assert uri == "hdfs://namenode:8020"
            return fs.LocalFileSystem(), str(cluster)

    monkeypatch.setattr(storage, "fs", SimpleNamespace(**vars(fs) | {"FileSystem": Here}))
    folder = folder_of(tmp_path / "dataset", manifest_json="1", days__one="1", days__two="2")
    publish_folder(folder, "hdfs://namenode:8020/data/set")
    assert contents(cluster / "data" / "set") == contents(folder)
    (folder / "days/one").unlink()
    folder_of(folder, manifest_json="2", days__three="3")
    publish_folder(folder, "hdfs://namenode:8020/data/set")
    assert contents(cluster / "data" / "set") == contents(folder)
    assert contents(fetch_folder("hdfs://namenode:8020/data/set", tmp_path)) == contents(folder)
    found = fetch_files("hdfs://namenode:8020/data/set/days/t*", tmp_path, "events.path")
    assert [file.read_text() for file in found] == ["3", "2"]
    url = "hdfs://namenode:8020/data/set/days/three"
    (one,) = fetch_files(url, tmp_path, "events.path")
    assert storage.origin(one) == f"hdfs://namenode:8020{cluster}/data/set/days/three"


def test_the_commands_take_urls_for_what_they_read_and_write(
    line, bucket, tiny_clicks_config, tmp_path, monkeypatch
):
    bucket.upload_file(tiny_clicks_config.events.path, "clicks.parquet")
    tree = json.loads(tiny_clicks_config.model_dump_json())
    tree["events"]["path"] = "s3://logs/clicks.parquet"
    tree["workdir"] = str(tmp_path / "work")
    tree["pretrain"] = {"epochs": 1, "batch_size": 32, "negatives": 16}
    tree["model"] = {"dim": 8}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = ["--config", str(tmp_path / "config.yaml")]
    for command in (
        ["windows", *config, "--dataset", "s3://logs/out/dataset"],
        ["pretrain", *config, "--dataset", "s3://logs/out/dataset", "--table", "s3://logs/out/t"],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
    found = keys(bucket)
    assert {"out/dataset/manifest.json", "out/t/table.json", "out/t/item.safetensors"} <= set(found)


def test_a_table_of_any_ibis_backend_can_be_the_log(
    tiny_clicks_config, tiny_clicks_dataset, tmp_path
):
    import sqlite3

    log = pq.read_table(tiny_clicks_config.events.path)
    micros = log["timestamp"].cast(pa.timestamp("us")).cast(pa.int64()).to_pylist()
    with sqlite3.connect(tmp_path / "log.db") as base:
        base.execute("CREATE TABLE clicks (u INTEGER, i INTEGER, t INTEGER, d TEXT, other TEXT)")
        rows = zip(
            log["user_id"].to_pylist(),
            log["item_id"].to_pylist(),
            micros,
            log["ctx_device"].to_pylist(),
            strict=True,
        )
        base.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?, 'x')", rows)
    tree = json.loads(tiny_clicks_config.model_dump_json())
    tree["events"] |= {
        "path": None,
        "table": "clicks",
        "connect": f"sqlite:///{tmp_path}/${{BASE}}.db",
        "columns": {"user_id": "u", "item_id": "i", "timestamp": "t"},
        "timestamp_unit": "us",
        "context": {"device": "d"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BASE", "log")
        config = Config.model_validate(tree)
        one, two = (build(config, tmp_path / name / "dataset") for name in ("one", "two"))
    assert_same(one, two)
    for name, table in tables(tiny_clicks_dataset.root).items():
        assert tables(one.root)[name].equals(table), name


def test_a_table_that_is_not_there_is_named(tmp_path):
    events = {"table": "main.clicks", "connect": f"sqlite:///{tmp_path}/log.db"}
    config = Config.model_validate({"events": events})
    with (
        pytest.raises(DataError, match=r"events\.table: there is no main\.clicks"),
        local_inputs(config, tmp_path / "dataset"),
    ):
        pass


def test_a_password_in_the_config_is_refused():
    with pytest.raises(ValueError, match="connect holds a password"):
        Config.model_validate({"events": {"table": "t", "connect": "postgres://a:b@host/base"}})
