"""Commands whose MLflow server is down say so in seconds; what runs already has more patience."""

import os
import socket
import time

import pytest
import torch
from mlflow_helpers import free_port
from typer.testing import CliRunner

from thawline import cli
from thawline.errors import TrackingError
from thawline.model.bundle import Bundle, Meta, save_bundle
from thawline.tracking import runs, server

pytest_plugins = ["mlflow_fixtures"]
pytestmark = pytest.mark.usefixtures("no_mlflow_environment")

RUN_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def model(tiny_config, tiny_dataset, tmp_path_factory):
    """An untrained model of the tiny dataset."""
    folder = tmp_path_factory.mktemp("model") / "model"
    folder.mkdir()
    meta = Meta.of(tiny_dataset, tiny_config)
    weights = {"item": torch.zeros(meta.num_rows, meta.model.dim)}
    bundle = Bundle(meta, meta.make_ranker().eval(), weights, tiny_dataset.catalog)
    save_bundle(folder, bundle, tiny_dataset.root / "catalog.parquet")
    (folder / "epochs.json").write_text("[]")
    return folder


@pytest.fixture
def invoke(tmp_path):
    """Runs a command whose server is a closed port; gives the error and the seconds it took."""

    def run(*command, uri=None):
        uri = uri or f"http://me:secret@127.0.0.1:{free_port()}"
        settings = [f"workdir={tmp_path / 'work'}", f"tracking.uri={uri}", "runtime.threads=1"]
        options = [part for each in settings for part in ("--set", each)]
        started = time.monotonic()
        result = CliRunner().invoke(cli.app, [*command, *options])
        return result.exception, time.monotonic() - started

    return run


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--dataset", "{dataset}", "--model", "{model}"],
        ["fetch", "--output", "{tmp}/fetched"],
        ["fetch", "--output", "{tmp}/fetched", "--model", "models:/ranker/3"],
        ["table", "--output", "{tmp}/item.parquet"],
        ["score", "--input", "{requests}", "--output", "{tmp}/scores.parquet"],
        ["compare", "models:/ranker/1", "models:/ranker/2", "--dataset", "{dataset}"],
        ["compare", RUN_ID, "{model}", "--dataset", "{dataset}"],
        ["windows"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_closed_port_is_named_in_seconds(command, invoke, tmp_path, tiny_dataset, model):
    requests = tiny_dataset.request_files("next")[0]
    named = {"dataset": tiny_dataset.root, "model": model, "tmp": tmp_path, "requests": requests}
    error, seconds = invoke(*(word.format(**named) for word in command))
    assert isinstance(error, TrackingError), error
    assert "http://***@127.0.0.1" in error.what
    assert "secret" not in str(error)
    assert "start the server" in error.remedy
    assert seconds < 15
    left = [path.name for path in tmp_path.iterdir()]
    assert left in ([], ["work"])


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_in_seconds(invoke, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error, seconds = invoke("fetch", "--output", str(tmp_path / "fetched"), uri=uri)
    assert isinstance(error, TrackingError)
    assert 3 < seconds < 15


def test_folders_of_this_machine_need_no_server(invoke, tmp_path, model):
    error, _ = invoke("table", "-o", str(tmp_path / "item.parquet"), "--model", str(model))
    assert error is None
    assert (tmp_path / "item.parquet").exists()


def test_a_stage_of_a_pipeline_has_the_patience_of_mlflow(sqlite_config, monkeypatch):
    """Its first question must outlive a server that is started again: earlier stages are done."""
    asked = []
    monkeypatch.setattr(server, "_ask", lambda config: asked.append("alone"))
    monkeypatch.setattr(server, "tracking_uri", lambda config: "http://127.0.0.1:1")
    parent = None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(server, "tracking_uri", runs.tracking_uri)
        parent = runs.start_parent(sqlite_config, "pipeline")
    monkeypatch.setattr(runs, "connect", lambda config: _raise(asked))
    with pytest.raises(LookupError), runs.stage_run(sqlite_config, "evaluate", parent):
        pass
    assert asked == [None]
    with pytest.raises(LookupError), runs.stage_run(sqlite_config, "evaluate"):
        pass
    assert asked == [None, "alone", None]


def _raise(asked):
    """Notes how often MLflow is to try."""
    asked.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
    raise LookupError
