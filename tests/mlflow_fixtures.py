"""A ready MLflow database and a real server.

A test module takes the fixtures by `pytest_plugins = ["mlflow_fixtures"]`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import sqlalchemy
from mlflow_helpers import free_port, make_config

from thawline.tracking.server import connect

MLFLOW_VARIABLES = (
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    "MLFLOW_HTTP_REQUEST_TIMEOUT",
    "THAWLINE_GIT_COMMIT",
)


@sqlalchemy.event.listens_for(sqlalchemy.Engine, "connect")
def _without_waiting_for_the_disk(connection, _):
    connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture
def no_mlflow_environment(monkeypatch):
    for name in MLFLOW_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory):
    """An empty database of MLflow, to be copied: MLflow takes seconds to make one."""
    folder = tmp_path_factory.mktemp("mlflow-once")
    with pytest.MonkeyPatch.context() as environment:
        for name in MLFLOW_VARIABLES:
            environment.delenv(name, raising=False)
        connect(make_config(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def sqlite_config(tmp_path, mlflow_database, no_mlflow_environment):
    """A config whose SQLite database exists."""
    (tmp_path / "work").mkdir()
    shutil.copyfile(mlflow_database, tmp_path / "work" / "mlflow.db")
    return make_config(tmp_path / "work")


@pytest.fixture(scope="session")
def server_uri(tmp_path_factory, mlflow_database):
    """The address of a real `mlflow server` with proxied artifacts, on loopback."""
    root = tmp_path_factory.mktemp("server")
    shutil.copyfile(mlflow_database, root / "server.db")
    uri = f"http://127.0.0.1:{free_port()}"
    with (root / "log.txt").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
                *("--port", uri.rpartition(":")[2], "--workers", "1"),
                *("--backend-store-uri", f"sqlite:///{root / 'server.db'}"),
                *("--artifacts-destination", str(root / "artifacts")),
            ],
            stdout=log,
            stderr=log,
            cwd=root,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 180
            while not answers(uri):
                assert server.poll() is None, (root / "log.txt").read_text()
                assert time.monotonic() < deadline, (root / "log.txt").read_text()
                time.sleep(0.3)
            yield uri
        finally:
            # The command starts workers; the whole group is ours.
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=2) as reply:  # noqa: S310
            return reply.status == 200
    except OSError:
        return False
