"""One real MLflow server, on loopback, and what can go wrong between it and us."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow.entities import ViewType
from mlflow_helpers import INT_IDS, free_port, make_config, write_evaluation, write_model
from mlflow_proxy import proxied
from test_served import expected

from thawline.config import dump_config
from thawline.errors import TrackingError
from thawline.stages import fetch, register
from thawline.tracking import registry, runs
from thawline.tracking.promotion import promote, rollback
from thawline.tracking.round_trip import round_trip
from thawline.tracking.server import connect

pytest_plugins = ["mlflow_fixtures"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_mlflow_environment")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder and its evaluation."""
    root = tmp_path_factory.mktemp("inputs")
    write_model(root / "model", INT_IDS)
    return root / "model", write_evaluation(root / "evaluation")


@pytest.fixture
def proxy(server_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with proxied(server_uri) as proxy:
        yield proxy


def named(request, tmp_path, uri):
    """A config with a model of the test's own."""
    return make_config(tmp_path, uri=uri, model_name=f"of-{abs(hash(request.node.name)) % 10**9}")


def versions(config):
    found = connect(config).search_model_versions(f"name='{config.tracking.model_name}'")
    return sorted(int(version.version) for version in found)


def alias(config, name="champion"):
    return str(connect(config).get_model_version_by_alias(config.tracking.model_name, name).version)


def status_of(config, run_id):
    return connect(config).get_run(run_id).info.status


def test_parents_children_metrics_and_files_are_taken(server_uri, tmp_path):
    config = make_config(tmp_path, uri=server_uri)
    runs.check(config)
    parent = runs.start_parent(config, "retrain")
    (tmp_path / "report.html").write_text("report")
    with runs.stage_run(config, "evaluate", parent) as run:
        run.log_params({"epochs": 3})
        run.log_params({"epochs": 3})
        with pytest.raises(TrackingError, match="the param epochs"):
            run.log_params({"epochs": 4})
        run.log_metrics({"auc": 0.5}, step=1)
        run.log_artifact(tmp_path / "report.html")
    open_child = connect(config).create_run(
        connect(config).get_run(parent).info.experiment_id, tags={"mlflow.parentRunId": parent}
    )
    runs.finish_parent(config, parent, "FAILED")
    assert status_of(config, parent) == "FAILED"
    assert status_of(config, open_child.info.run_id) == "FAILED"
    assert status_of(config, run.run_id) == "FINISHED"
    files = connect(config).list_artifacts(run.run_id)
    assert [file.path for file in files] == ["report.html"]
    assert not (tmp_path / "mlartifacts").exists()


def test_versions_are_registered_promoted_rolled_back_and_deleted(
    server_uri, inputs, tmp_path, request
):
    config = named(request, tmp_path, server_uri)
    name = config.tracking.model_name
    older, newer = (runs.start_parent(config, "retrain") for _ in range(2))
    assert registry.fetch_model(config, f"models:/{name}@champion", tmp_path) is None
    first = register.run(config, *inputs, tmp_path / "out", parent_run_id=older)
    assert register.run(config, *inputs, tmp_path / "out", parent_run_id=older) == first
    assert (versions(config), alias(config), alias(config, "challenger")) == ([1], "1", "1")
    tracking = config.tracking.model_copy(update={"promote": "manual"})
    manual = config.model_copy(update={"tracking": tracking})
    waiting = register.run(manual, *inputs, tmp_path / "out", parent_run_id=newer)
    assert (waiting.version, waiting.alias) == ("2", "challenger")
    assert (versions(config), alias(config), alias(config, "challenger")) == ([1, 2], "1", "2")
    assert promote(manual).previous == "1"
    assert promote(manual).moved is False
    assert alias(config) == "2"
    fetch.table(config, f"models:/{name}@champion", "item", tmp_path / "table.parquet")
    assert pq.read_table(tmp_path / "table.parquet").column("item_id").to_pylist() == INT_IDS
    assert rollback(config).version == "1"
    connect(config).delete_model_version(name, "1")
    assert registry.fetch_model(config, f"models:/{name}@champion", tmp_path) is None
    fetched = registry.fetch_model(config, f"models:/{name}@challenger", tmp_path)
    assert fetched.version == "2"
    assert fetched.tags["thawline.gate"] == "passed"
    with pytest.raises(TrackingError, match="has the alias 'champion'"):
        rollback(config)
    assert not (tmp_path / "mlartifacts").exists()


REGISTER_IN_A_PROCESS = """
    import sys, time
    from pathlib import Path
    from mlflow import MlflowClient
    from thawline.config import parse_config
    from thawline.stages import register
    create = MlflowClient.create_model_version
    def together(*args, **kwargs):
        Path(sys.argv[1], "here").touch()
        while not Path(sys.argv[1], "there").exists():
            time.sleep(0.01)
        return create(*args, **kwargs)
    MlflowClient.create_model_version = together
    config = parse_config(sys.stdin.read())
    print(register.run(config, *sys.argv[2:5], parent_run_id=sys.argv[5]).version)
"""


def test_two_processes_at_one_instant_make_one_version(
    server_uri, inputs, tmp_path, request, monkeypatch
):
    config = named(request, tmp_path, server_uri)
    parent = runs.start_parent(config, "retrain")
    arguments = [tmp_path, *inputs, tmp_path / "theirs", parent]
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(REGISTER_IN_A_PROCESS), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    other.stdin.write(dump_config(config))
    other.stdin.close()
    client = type(connect(config))
    create = client.create_model_version

    def together(*args, **kwargs):
        (tmp_path / "there").touch()
        deadline = time.monotonic() + 120
        while not (tmp_path / "here").exists():
            assert other.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return create(*args, **kwargs)

    monkeypatch.setattr(client, "create_model_version", together)
    ours = register.run(config, *inputs, tmp_path / "ours", parent_run_id=parent)
    assert other.wait(120) == 0
    # MLflow prints where the run can be seen.
    assert other.stdout.read().split()[-1] == ours.version
    assert len(versions(config)) == 1
    assert [alias(config), alias(config, "challenger")] == [ours.version] * 2


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ("mlflow-artifacts/artifacts", []),
        ("model-versions/create", []),
        ("registered-models/alias", [1]),
    ],
)
def test_a_server_that_goes_down_in_the_middle_leaves_nothing_half_registered(
    proxy, inputs, tmp_path, request, place, left
):
    config = named(request, tmp_path, proxy.uri)
    parent = runs.start_parent(config, "retrain")
    proxy.seen.clear()
    proxy.down_at = place
    started = time.monotonic()
    with pytest.raises(TrackingError, match="start the server"):
        register.run(config, *inputs, tmp_path / "out", parent_run_id=parent)
    assert time.monotonic() - started < 60
    assert sum(place in path for path in proxy.seen) == 2
    assert not (tmp_path / "out").exists()
    proxy.up()
    assert versions(config) == left
    assert (
        registry.fetch_model(config, f"models:/{config.tracking.model_name}@champion", tmp_path)
        is None
    )
    register.run(config, *inputs, tmp_path / "out", parent_run_id=parent)
    assert (versions(config), alias(config)) == ([1], "1")


def test_a_server_that_is_started_again_while_a_stage_runs_is_waited_for(
    server_uri, tmp_path, monkeypatch
):
    with proxied(server_uri) as proxy:
        config = make_config(tmp_path, uri=proxy.uri)
        with runs.stage_run(config, "finetune") as run:
            proxy.seen.clear()

            def refuses(path):
                # Three times in a row: more than a command asks before it gives up.
                proxy.down = len(proxy.seen) <= 3
                return proxy.down

            monkeypatch.setattr(proxy, "refuses", refuses)
            run.log_metrics({"loss": 0.5})
        assert sum("log-batch" in path for path in proxy.seen) >= 3
        found = connect(config).get_run(run.run_id)
        assert (found.data.metrics["loss"], found.info.status) == (0.5, "FINISHED")


def test_a_version_whose_making_was_not_heard_of_is_not_made_twice(
    proxy, inputs, tmp_path, request
):
    config = named(request, tmp_path, proxy.uri)
    parent = runs.start_parent(config, "retrain")
    proxy.loses = "model-versions/create"
    registered = register.run(config, *inputs, tmp_path / "out", parent_run_id=parent)
    assert sum("model-versions/create" in path for path in proxy.seen) == 2
    assert (registered.version, versions(config), alias(config)) == ("1", [1], "1")


def test_a_wrong_password_is_told_at_once_and_not_shown(proxy, inputs, tmp_path):
    proxy.password = "right"  # noqa: S105
    place = proxy.uri.removeprefix("http://")
    runs.check(make_config(tmp_path, uri=f"http://me:right@{place}"))
    config = make_config(tmp_path, uri=f"http://me:wr0ng@{place}")
    proxy.seen.clear()
    for asked in (runs.check, lambda c: register.run(c, *inputs, tmp_path / "out")):
        with pytest.raises(TrackingError, match="not authenticated") as told:
            asked(config)
        assert "MLFLOW_TRACKING_PASSWORD" in told.value.remedy
        assert "wr0ng" not in str(told.value)
    assert len(proxy.seen) == 2


def test_a_round_trip_leaves_nothing_and_names_the_step_that_the_server_refuses(proxy, tmp_path):
    config = make_config(tmp_path, uri=proxy.uri, experiment="round-trip")
    assert "wrote, logged, registered, loaded, deleted" in round_trip(config)
    proxy.forbids = "registered-models/create"
    with pytest.raises(TrackingError, match=r"the step `register` failed: .*403") as told:
        round_trip(config)
    assert "MLFLOW_TRACKING_USERNAME" in told.value.remedy
    proxy.forbids = None
    client = connect(config)
    experiments = [client.get_experiment_by_name("round-trip").experiment_id]
    assert client.search_registered_models("name LIKE 'thawline-doctor%'") == []
    assert client.search_logged_models(experiments) == []
    assert client.search_runs(experiments) == []
    deleted = client.search_runs(experiments, run_view_type=ViewType.DELETED_ONLY)
    assert len(deleted) == 2
    assert [client.list_artifacts(run.info.run_id) for run in deleted] == [[], []]


def test_the_served_model_answers_over_http_without_pickle(server_uri, inputs, tmp_path, request):
    config = named(request, tmp_path, server_uri)
    registered = register.run(config, *inputs, tmp_path / "out")
    port = free_port()
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", registered.uri),
            *("--env-manager", "local", "--port", str(port), "--workers", "1"),
        ],
        env={
            **os.environ,
            # It starts uvicorn by its name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MLFLOW_TRACKING_URI": server_uri,
            "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        },
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        requests = [
            {"history": [42, 5, 700], "candidates": [8, 12345, 5], "surface": "home"},
            {"history": [], "candidates": [8]},
        ]
        reply = ask(server, port, {"dataframe_records": requests, "params": {"counts": True}})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    class Loaded:
        bundle = write_model(tmp_path / "same", INT_IDS)

    for given, row in zip(requests, reply["predictions"], strict=True):
        found = np.array([row["save"], row["click"]]).T
        np.testing.assert_allclose(found, expected(Loaded, INT_IDS, given), atol=1e-6)
    assert [row["unknown_candidates"] for row in reply["predictions"]] == [1, 0]


def ask(server, port, body):
    deadline = time.monotonic() + 180
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    while True:
        assert server.poll() is None
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(call, timeout=60) as reply:  # noqa: S310
                return json.loads(reply.read())
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(0.2)
