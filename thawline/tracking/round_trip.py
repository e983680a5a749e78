"""Through everything that a pipeline asks of MLflow, and away again."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlflow.artifacts
import mlflow.pyfunc
import pandas as pd
from mlflow import MlflowClient
from mlflow.models import ModelSignature
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.types import ColSpec, DataType, Schema

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.tracking.packing import upload
from thawline.tracking.run import Run
from thawline.tracking.server import (
    check,
    connect,
    experiment_id,
    explained,
    impatient,
    masked,
    tracking_uri,
)

CODE = Path(__file__).with_name("doubled.py")
NAME = "thawline-doctor"
"""How the names of the run and of the registered model begin."""
ALIAS = "doctor"
REQUEST_SECONDS = 20
"""For an answer: a server that is slow is slow, not gone."""

Undo = list[Callable[[], object]]


def round_trip(config: Config) -> str:
    """Writes a run, logs files and a model, registers the model, loads it, deletes everything.

    The experiment `tracking.experiment` stays where it was made, as by the first run of a
    pipeline; the registered model has a name of its own. MLflow keeps a deleted run until its
    `mlflow gc`, without its files.

    Returns:
        Where it went.

    Raises:
        TrackingError: Names the step that failed; what was there by then is deleted.
    """
    undo: Undo = []
    try:
        with impatient(REQUEST_SECONDS):
            version = _there_and_back(config, undo)
    except BaseException:
        for each in reversed(undo):
            with suppress(Exception), impatient():
                each()
        raise
    with impatient(REQUEST_SECONDS), _step(config, "delete"):
        _undo_all(undo)
    return f"{masked(tracking_uri(config))}: wrote, logged, registered, loaded, deleted ({version})"


def _there_and_back(config: Config, undo: Undo) -> str:
    with _step(config, "reach"):
        check(config)
    with _step(config, "write"):
        client = connect(config)
        experiment = experiment_id(config, client)
        info = client.create_run(experiment, run_name=NAME, tags={"thawline.stage": "doctor"}).info
        undo.append(lambda: client.delete_run(info.run_id))
        run = Run(info.run_id, info.run_id, config, client)
        run.log_params({"asked_by": "thawline doctor"})
        run.log_metrics({"answer": 42.0})
    with tempfile.TemporaryDirectory(prefix="thawline-") as temporary:
        with _step(config, "log"):
            undo.append(lambda: _delete_files(config, str(info.artifact_uri)))
            client.log_text(run.run_id, NAME, "doctor.txt")
            packed = Path(temporary) / "model"
            _pack(packed)
            undo.append(lambda: _delete_models(config, client, experiment, run.run_id))
            logged = upload(config, packed, run)
        with _step(config, "register"):
            name = f"{NAME}-{secrets.token_hex(4)}"
            client.create_registered_model(name)
            undo.append(lambda: client.delete_registered_model(name))
            made = client.create_model_version(
                name,
                source=logged.artifact_location,
                run_id=run.run_id,
                model_id=logged.model_id,
                await_creation_for=REQUEST_SECONDS,
            )
            client.set_registered_model_alias(name, ALIAS, str(made.version))
        with _step(config, "load"):
            _load(config, client, name, Path(temporary) / "back")
    return f"{name}/{made.version}"


def _pack(folder: Path) -> None:
    column = ColSpec(DataType.double, "value")
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(CODE),
        signature=ModelSignature(inputs=Schema([column]), outputs=Schema([column])),
        input_example=pd.DataFrame({"value": [1.0]}),
        # MLflow would load the model in another process to find them out.
        pip_requirements=["mlflow"],
    )


def _load(config: Config, client: MlflowClient, name: str, folder: Path) -> None:
    version = client.get_model_version_by_alias(name, ALIAS)
    source = client.get_model_version_download_uri(name, str(version.version))
    folder.mkdir()
    local = mlflow.artifacts.download_artifacts(
        artifact_uri=source, dst_path=str(folder), tracking_uri=tracking_uri(config)
    )
    answer = mlflow.pyfunc.load_model(local).predict(pd.DataFrame({"value": [1.5, -2.0]}))
    if answer["value"].tolist() != [3.0, -4.0]:
        raise TrackingError(
            f"the model that came back doubles 1.5 and -2 to {answer['value'].tolist()}",
            "look at the artifact store and at what stands between",
        )


def _delete_models(config: Config, client: MlflowClient, experiment: str, run_id: str) -> None:
    """Those that a run logged, one whose upload failed as well."""
    for logged in client.search_logged_models([experiment], f"source_run_id = '{run_id}'"):
        _delete_files(config, str(logged.artifact_location))
        client.delete_logged_model(logged.model_id)


def _delete_files(config: Config, uri: str) -> None:
    get_artifact_repository(uri, tracking_uri=tracking_uri(config)).delete_artifacts()


def _undo_all(undo: Undo) -> None:
    """Each of them, whatever becomes of the others; then the first error."""
    errors = []
    for each in reversed(undo):
        try:
            each()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def _step(config: Config, name: str) -> Iterator[None]:
    try:
        with explained(config, "the request"):
            yield
    except TrackingError as error:
        # The original's own message may hold the password of the address.
        raise TrackingError(f"the step `{name}` failed: {error.what}", error.remedy) from None
