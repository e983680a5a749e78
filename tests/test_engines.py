"""DuckDB and Spark give the same rows of the same expressions."""

import datetime
import sys
from pathlib import Path

import delayed_log
import ibis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from engine_helpers import assert_same, with_engine
from typer.testing import CliRunner
from window_reference import config_for, every_request, random_log, write_log

import thawline.data
from thawline import cli
from thawline.config import CatalogRows, Config, Runtime, Windows
from thawline.data.engine import epoch_us, hash63, open_engine, stream, text_epoch_us, text_float
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset
from thawline.errors import ConfigError, DataError

pytest_plugins = ["engine_fixtures"]


@pytest.fixture
def duckdb(tmp_path):
    with open_engine(Windows(), Runtime(threads=1), tmp_path / "scratch") as engine:
        yield engine


def built(config, root):
    root.mkdir(parents=True)
    build_dataset(config, root)
    return Dataset.open(root)


def on_both_engines(config, tmp_path):
    """The dataset of a config, which both engines have built alike."""
    one = built(with_engine(config, "duckdb"), tmp_path / "duckdb")
    other = built(with_engine(config, "spark"), tmp_path / "spark")
    assert_same(one, other)
    return one


def small(config):
    """Two days of requests instead of five: each day costs Spark seconds."""
    windows = config.windows.model_copy(update={"finetune_days": 1, "test_days": 1})
    return config.model_copy(update={"windows": windows})


def given(engine, table):
    name = ibis.util.gen_name("given")
    if engine.name == "duckdb":
        engine.con.register(name, table)
        return engine.table(name)
    return engine.create_table(name, table, temp=True)


def on_both(engines, table, make):
    """What an expression gives over an Arrow table, by engine."""
    found = []
    for engine in engines:
        kept = given(engine, table)
        found.append(kept.select("number", value=make(kept)).order_by("number").to_pyarrow())
    return [each["value"].to_pylist() for each in found]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["impressions-text", "clicks-int"])
def test_both_engines_build_the_same_dataset_row_for_row(spark, case, tmp_path):
    kind, ids = case.split("-")
    log = write_log(random_log(ids), tmp_path / "log.parquet")
    config = small(config_for(log, kind == "impressions"))
    dataset = on_both_engines(config, tmp_path)
    assert min(dataset.manifest.requests.values()) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_engines_join_the_same_delayed_actions_to_requests_with_ids(spark, tmp_path):
    log = delayed_log.write_log(delayed_log.random_log(6, named=True), tmp_path / "log.parquet")
    config = delayed_log.config_for(log, named=True, hours=6.0)
    catalog = CatalogRows(min_support=6, buckets=3)
    windows = config.windows.model_copy(update={"finetune_days": 1, "catalog": catalog})
    dataset = on_both_engines(config.model_copy(update={"windows": windows}), tmp_path)
    assert dataset.manifest.rows.buckets == 3
    assert dataset.manifest.rows.bucketed > 3
    assert min(dataset.manifest.requests.values()) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_engines_group_by_gaps_and_evict_the_same(spark, tmp_path):
    """A second window follows six days after the first, whose other items are gone."""
    six_days = 6 * delayed_log.DAY
    earlier = [
        (kind, user, item + 10, time - six_days, request, position)
        for kind, user, item, time, request, position in delayed_log.random_log(7, named=False)
    ]
    log = delayed_log.write_log(earlier, tmp_path / "earlier.parquet")
    config = delayed_log.config_for(log, named=False, hours=6.0)
    windows = config.windows.model_copy(
        update={"end": datetime.date(2026, 2, 27), "finetune_days": 1}
    )
    built(config.model_copy(update={"windows": windows}), tmp_path / "earlier")
    delayed_log.write_log([*earlier, *delayed_log.random_log(6, named=False)], log)
    windows = config.windows.model_copy(
        update={
            "finetune_days": 1,
            "previous": str(tmp_path / "earlier"),
            "catalog": CatalogRows(min_support=2, buckets=3, evict_after_days=5),
        }
    )
    dataset = on_both_engines(config.model_copy(update={"windows": windows}), tmp_path)
    assert dataset.manifest.rows.generation == 1
    assert dataset.manifest.rows.evicted > 3
    assert (dataset.root / "moved.parquet").exists()
    assert min(dataset.manifest.requests.values()) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_engines_give_requests_the_same_weights(spark, tmp_path):
    weights = [0.1, 1 / 3, 2.0, 12_345_678.9, 3e-7, 1.0000000000000002]
    rows = random_log("int")
    for row in rows:
        row["w"] = weights[row["request"] % len(weights)]
    rows[0]["w"] = -1.0
    config = small(config_for(write_log(rows, tmp_path / "log.parquet"), True, max_rejected=0.05))
    config = config.model_copy(update={"events": config.events.model_copy(update={"weight": "w"})})
    dataset = on_both_engines(config, tmp_path)
    assert dataset.manifest.rejected["bad weight"] == 1
    expected = {row["request"]: weights[row["request"] % len(weights)] for row in rows}
    requests = every_request(dataset)
    assert len({row["weight"] for row in requests}) == len(weights)
    assert all(row["weight"] == expected[row["request_id"]] for row in requests)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_engines_read_the_same_from_csv_with_its_faults(spark, tmp_path):
    rows = ["user::item::time::stars"]
    rows += [
        f"{n % 7}::{n % 11}::2026-03-0{1 + n % 8} 0{n % 10}:30:00::{n % 5}" for n in range(300)
    ]
    rows += ["::1::2026-03-05 10:00:00::5", "1::2::yesterday::5", "1::2::2026-03-05T10:00:00Z::4.5"]
    (tmp_path / "log.dat").write_text("\n".join(rows) + "\n")
    config = Config.model_validate(
        {
            "events": {
                "path": str(tmp_path / "log.dat"),
                "separator": "::",
                "columns": {"user_id": "user", "item_id": "item", "timestamp": "time"},
                "actions": {"like": {"column": "stars", "at_least": 4}, "watch": {}},
            },
            "windows": {
                "test_days": 1,
                "finetune_days": 1,
                "pretrain_days": 5,
                "max_rejected": 0.5,
            },
        }
    )
    rejected = on_both_engines(config, tmp_path).manifest.rejected
    assert rejected["null user_id"] == 1
    assert rejected["impossible timestamp"] == 1


def test_text_is_hashed_alike(spark, duckdb):
    words = ["", "a", "user-7", "naïve", "日本語", "x" * 1000, "0", " "]
    table = pa.table({"number": range(len(words)), "text": words})
    one, other = on_both([duckdb, spark], table, lambda t: hash63(t.text))
    assert one == other
    assert one[1] == 0x0CC175B9C0F1B6A8 >> 1  # MD5 of `a`, known since 1992.
    assert all(0 <= value < 2**63 for value in one)


def test_times_in_text_are_read_alike(spark, duckdb):
    times = [
        *("2026-01-31 12:00:00", "2026-01-31T12:00:00Z", "2026-01-31 12:00:00.123456"),
        *("2026-01-31", "2026/01/31 12:00", "2026-01-31 12:00:00+02:00", "2026-1-3 04:05:06"),
        *("2026", "2026-01", "12:30", "yesterday", "2026-02-30", "2026-01-31 25:00:00"),
        None,
    ]
    table = pa.table({"number": range(len(times)), "text": times})
    one, other = on_both([duckdb, spark], table, lambda t: text_epoch_us(t.text))
    assert dict(zip(times, one, strict=True)) == dict(zip(times, other, strict=True))
    assert one[0] == one[1] == 1_769_860_800_000_000
    assert one[-7:] == [None] * 7


def test_numbers_in_text_are_read_alike(spark, duckdb):
    numbers = ["1", "-2.5", "1e3", ".5", "1.", "+7", "1.5d", "2f", "nan", "inf", "x", "1 2", None]
    table = pa.table({"number": range(len(numbers)), "text": numbers})
    one, other = on_both([duckdb, spark], table, lambda t: text_float(t.text))
    assert list(map(str, one)) == list(map(str, other))
    assert one[:6] == [1.0, -2.5, 1000.0, 0.5, 1.0, 7.0]
    assert one[6:8] == [None, None]


def test_timestamps_of_every_precision_are_read_alike(spark, duckdb, tmp_path):
    moment = 1_769_860_800_123_456_789
    for unit, zone in (("ns", None), ("us", "UTC"), ("us", None), ("ms", "UTC")):
        value = moment // {"ns": 1, "us": 1_000, "ms": 1_000_000}[unit]
        column = pa.array([value, None], pa.timestamp(unit, tz=zone))
        file = tmp_path / f"{unit}{zone}.parquet"
        pq.write_table(pa.table({"time": column}), file)
        read = [duckdb.read_parquet(str(file)), spark.open_parquet([file])]
        found = [
            table.select(us=epoch_us(table.time.cast("timestamp"))).order_by("us").to_pyarrow()
            for table in read
        ]
        expected = {"ns": moment // 1_000 + 1, "us": moment // 1_000}.get(
            unit, moment // 1_000_000 * 1_000
        )
        assert [each["us"].to_pylist() for each in found] == [[expected, None]] * 2


def test_lists_are_collected_in_the_same_order_with_their_nulls(spark, duckdb):
    table = pa.table(
        {
            "number": [0, 0, 0, 0, 1],
            "place": [3, None, 1, 2, None],
            "value": pa.array([30, 40, None, 20, 1], pa.int64()),
        }
    )
    found = []
    for engine in (duckdb, spark):
        kept = given(engine, table)
        groups = kept.group_by("number").aggregate(
            every=kept.value.collect(order_by=[kept.place], include_null=True),
            known=kept.value.collect(order_by=[kept.place]),
            first=kept.value.first(order_by=[kept.place], include_null=True),
            known_first=kept.value.first(order_by=[kept.place]),
        )
        found.append(groups.order_by("number").to_pyarrow().to_pylist())
    assert found[0] == found[1]
    assert found[0][0] == {
        "number": 0,
        "every": [None, 20, 30, 40],
        "known": [20, 30, 40],
        "first": None,
        "known_first": 20,
    }


def test_a_large_integer_beside_a_null_stays_what_it_is(spark):
    table = pa.table({"number": [0, 1], "value": pa.array([2**62 + 1, None], pa.int64())})
    kept = spark.create_table("large", table, temp=True)
    assert kept.order_by("number").value.to_pyarrow().to_pylist() == [2**62 + 1, None]


def test_rows_stream_in_order_from_spark(spark):
    frame = spark.view("counted", spark._session.range(10_000, numPartitions=7))
    batches = list(stream(spark, frame.order_by(frame.id.desc()), rows=1_000))
    assert max(batch.num_rows for batch in batches) <= 1_000
    ids = [value for batch in batches for value in batch.column("id").to_pylist()]
    assert ids == list(range(9_999, -1, -1))


def test_a_damaged_file_is_named_by_spark_too(spark, tmp_path):
    log = write_log(random_log("int"), tmp_path / "log.parquet")
    data = bytearray(log.read_bytes())
    data[200:2_000] = bytes(1_800)
    log.write_bytes(data)
    (tmp_path / "dataset").mkdir()
    with pytest.raises(DataError, match=r"log\.parquet cannot be read as Parquet"):
        build_dataset(with_engine(config_for(log, True), "spark"), tmp_path / "dataset")


def test_spark_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "thawline.data.spark", None)
    monkeypatch.delattr(thawline.data, "spark", raising=False)
    with (
        pytest.raises(ConfigError, match=r"thawline\[spark\]"),
        open_engine(Windows(engine="spark"), Runtime(), tmp_path),
    ):
        pass


def test_sizes_are_told_to_java():
    java_size = pytest.importorskip("thawline.data.spark").java_size
    assert java_size("4GiB") == "4096m"
    assert java_size("4 GB") == "3814m"
    with pytest.raises(ConfigError, match="is not a size"):
        java_size("much")


def test_a_cluster_reads_what_was_fetched_from_where_it_came(tmp_path):
    location = pytest.importorskip("thawline.data.spark").location
    fetched = tmp_path / ".dataset.inputs" / ".fetched" / "s3" / "logs" / "day=1" / "0.parquet"
    assert location(fetched, cluster=True) == "s3a://logs/day=1/0.parquet"
    assert location(fetched, cluster=False) == f"file://{fetched}"
    assert location(tmp_path / "0.parquet", cluster=True) == f"file://{tmp_path}/0.parquet"


def test_the_spark_application_runs_a_command_that_exists():
    folder = Path(__file__).parent.parent / "k8s" / "spark"
    application = yaml.safe_load((folder / "windows.yaml").read_text())
    spec = application["spec"]
    pyspark = pytest.importorskip("pyspark")
    assert spec["sparkVersion"] == pyspark.__version__
    assert spec["mainApplicationFile"].endswith("k8s/spark/main.py")
    assert "from thawline.cli import main" in (folder / "main.py").read_text()
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    config = generated["files"][0].partition("=")[2]
    command = [
        str(folder / config) if word == "/etc/thawline/config.yaml" else word
        for word in spec["arguments"]
    ]
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(
            "thawline.stages.windows.run", lambda settings, out: seen.append(settings) or 1 / 0
        )
        result = CliRunner().invoke(cli.app, [word.strip("<>") for word in command])
    assert isinstance(result.exception, ZeroDivisionError), result.output
    (settings,) = seen
    assert settings.windows.engine == "spark"
    assert settings.events.path.startswith("s3://")
    assert settings.workdir == "/work"
