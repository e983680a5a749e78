"""The model registry: from a model folder to a version with tags and an alias."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pyarrow as pa
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, Schema, TensorSpec
from mlflow.types.schema import AnyType, Array

import thawline
from thawline.config import Config
from thawline.errors import TrackingError
from thawline.model.bundle import Bundle
from thawline.tracking.fetch import FetchedModel, fetch_catalog, fetch_model
from thawline.tracking.origin import git_commit
from thawline.tracking.run import Run
from thawline.tracking.server import check_names, explained

__all__ = [
    "FetchedModel",
    "Registration",
    "fetch_catalog",
    "fetch_model",
    "input_example",
    "read_evaluation",
    "register",
    "signature",
]

PARENT_TAG = "thawline.parent_run_id"
ALIASED_TAG = "thawline.aliased"
READY_WITHIN_S = 300.0
SERVED = Path(__file__).with_name("served.py")
REQUIREMENTS = (
    "mlflow",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "safetensors",
    "torch",
)


@dataclass(frozen=True)
class Registration:
    """A registered version of a model."""

    name: str
    version: str
    alias: str

    @property
    def uri(self) -> str:
        """What `mlflow.pyfunc.load_model` takes for exactly this version."""
        return f"models:/{self.name}/{self.version}"

    def to_json(self) -> str:
        """The content of `registration.json`."""
        return json.dumps({**asdict(self), "uri": self.uri}, indent=2)


def register(
    config: Config, model_dir: str | Path, evaluation_dir: str | Path, run: Run
) -> Registration:
    """Registers a model folder as a new version of `tracking.model_name` and gives it the alias.

    The packed model is loaded and asked for scores here before the registry hears of it. Called
    again for the same pipeline run, it gives the version that exists; it finishes what an earlier
    call left undone, but does not move the alias again.

    Args:
        config: Names the model and the alias.
        model_dir: A model folder.
        evaluation_dir: An evaluation folder of that model.
        run: The open run of the stage, whose model it becomes.

    Raises:
        DataError: A damaged model folder.
        TrackingError: A name that cannot be used, a model that does not score when loaded, a
            version that does not become ready, the server's refusal.
    """
    check_names(config)
    version = _registered(config, run)
    if version is None:
        version = _new_version(config, Path(model_dir), Path(evaluation_dir), run)
    _await_ready(config, run, version)
    number, name, alias = str(version.version), version.name, config.tracking.alias
    if version.tags.get(ALIASED_TAG) != alias:
        with explained(config, f"giving {name} version {number} the alias {alias}"):
            run.client.set_registered_model_alias(name, alias, number)
            run.client.set_model_version_tag(name, number, ALIASED_TAG, alias)
    run.set_tags({"thawline.model_version": f"{name}/{number}"})
    return Registration(name, number, alias)


def read_evaluation(evaluation_dir: str | Path) -> dict[str, Any]:
    """Reads `evaluation.json`.

    Raises:
        TrackingError: A missing or damaged file.
    """
    path = Path(evaluation_dir) / "evaluation.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree["passed"], bool) or not isinstance(tree["metrics"], dict):
            raise TypeError("`passed` or `metrics` is of the wrong kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path} cannot be read: {error}", "evaluate the model again: `thawline evaluate`"
        ) from error
    return tree


def signature(bundle: Bundle) -> ModelSignature:
    """Names and types of the columns; lists may have any length, optional columns may miss."""
    whole = pa.types.is_integer(bundle.catalog.item_id.type)
    ids = Array(DataType.long if whole else DataType.string)
    optional: dict[str, Array | AnyType] = {
        "history_action": Array(DataType.long),
        "history_age": Array(DataType.double),
        **{name: AnyType() for name in [*bundle.meta.context, *_id_columns(bundle)]},
    }
    inputs: list[ColSpec | TensorSpec] = [ColSpec(ids, "history"), ColSpec(ids, "candidates")]
    inputs += [ColSpec(kind, name, required=False) for name, kind in optional.items()]
    return ModelSignature(
        inputs=Schema(inputs),
        outputs=Schema([ColSpec(Array(DataType.double), name) for name in bundle.meta.actions]),
    )


def input_example(bundle: Bundle) -> pd.DataFrame:
    """Two requests with different lengths, of ids that the catalog holds."""
    ids = bundle.catalog.item_id.drop_null().slice(0, 5).to_pylist()
    actions, ages = [1, 1, 1], [48.0, 5.5, 0.25]
    example: dict[str, Any] = {
        "history": [ids[:3], ids[:1]],
        "candidates": [ids[-2:], ids],
        "history_action": [actions[: len(ids)], actions[:1]],
        "history_age": [ages[: len(ids)], ages[:1]],
    }
    for name, vocabulary in bundle.meta.context.items():
        example[name] = [vocabulary[0], vocabulary[-1]] if vocabulary else ["", ""]
    example |= {name: ["1", "2"] for name in _id_columns(bundle) if name not in example}
    return pd.DataFrame(example)


def _id_columns(bundle: Bundle) -> list[str]:
    """The columns of requests from which further ID tables are read."""
    return [table.column for table in bundle.meta.tables.values() if table.of == "request"]


def _registered(config: Config, run: Run) -> ModelVersion | None:
    name = config.tracking.model_name
    filters = f"name = '{name}' and tags.`{PARENT_TAG}` = '{run.pipeline_run_id}'"
    with explained(config, f"looking for versions of {name}"):
        found = list(run.client.search_model_versions(filters))
        usable = [version for version in found if version.status != "FAILED_REGISTRATION"]
        return min(usable, key=lambda version: int(version.version)) if usable else None


def _new_version(config: Config, model_dir: Path, evaluation_dir: Path, run: Run) -> ModelVersion:
    bundle = Bundle.load(model_dir)
    evaluation = read_evaluation(evaluation_dir)
    name = config.tracking.model_name
    with tempfile.TemporaryDirectory(prefix="thawline-") as temporary:
        packed = Path(temporary) / "model"
        with explained(config, "packing the model"):
            _pack(packed, model_dir, bundle)
        _check_packed(packed, bundle)
        logged = _upload(config, packed, run)
    with explained(config, f"registering a version of {name}"):
        try:
            run.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return run.client.create_model_version(
            name,
            # MLflow would look a models:/ URI up with its process-wide tracking URI.
            source=logged.artifact_location,
            run_id=run.run_id,
            tags=_version_tags(bundle, evaluation, run),
            model_id=logged.model_id,
            await_creation_for=0,
        )


def _pack(packed: Path, model_dir: Path, bundle: Bundle) -> None:
    mlflow.pyfunc.save_model(
        packed,
        python_model=str(SERVED),
        artifacts={"model": str(model_dir.absolute())},
        # The model then loads where Thawline is not installed, and with the code that made it.
        code_paths=[str(Path(thawline.__file__).parent)],
        signature=signature(bundle),
        input_example=input_example(bundle),
        pip_requirements=[
            # A local part as in 2.13.0+cpu is in no registry.
            f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
            for package in REQUIREMENTS
        ],
        metadata={"actions": bundle.meta.actions, "data_version": bundle.meta.data_version},
    )


def _check_packed(packed: Path, bundle: Bundle) -> None:
    example = input_example(bundle)
    try:
        with _same_import_path():
            scores = mlflow.pyfunc.load_model(str(packed)).predict(example)
    except Exception as error:
        raise TrackingError(
            f"the packed model does not load and score: {error}",
            "fine-tune again with this Thawline; nothing was registered",
        ) from error
    for action in bundle.meta.actions:
        for row, candidates in enumerate(example["candidates"]):
            values = np.asarray(scores[action][row], float)
            if len(values) != len(candidates) or not np.isfinite(values).all():
                raise TrackingError(
                    f"the packed model scores {action} of its example as {values.tolist()}",
                    "the model has diverged: fine-tune with lower learning rates; nothing was "
                    "registered",
                )


def _upload(config: Config, packed: Path, run: Run) -> LoggedModel:
    with explained(config, "uploading the model"):
        experiment = run.client.get_run(run.run_id).info.experiment_id
        logged = run.client.create_logged_model(experiment, name="ranker", source_run_id=run.run_id)
        try:
            described = Model.load(str(packed))
            described.artifact_path = logged.artifact_location
            described.model_id = logged.model_id
            described.run_id = run.run_id
            described.save(str(packed / "MLmodel"))
            run.client.log_model_artifacts(logged.model_id, str(packed))
            run.client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step=0)])
        except BaseException:
            run.client.finalize_logged_model(logged.model_id, "FAILED")
            raise
        run.client.finalize_logged_model(logged.model_id, "READY")
    return logged


def _version_tags(bundle: Bundle, evaluation: dict[str, Any], run: Run) -> dict[str, str]:
    primary = bundle.meta.actions[0]
    tags = {
        PARENT_TAG: run.pipeline_run_id,
        "thawline.data_version": bundle.meta.data_version,
        "thawline.recipe": bundle.meta.recipe,
        "thawline.version": bundle.meta.thawline_version,
    }
    commit = git_commit()
    if commit:
        tags["thawline.git_commit"] = commit
    for holdout, metrics in evaluation["metrics"].items():
        auc = metrics.get("pooled", {}).get(primary, {}).get("auc")
        if auc is not None:
            tags[f"thawline.auc.{primary}.{holdout}"] = f"{auc:.6f}"
    return tags


def _await_ready(config: Config, run: Run, version: ModelVersion) -> None:
    name, number = version.name, str(version.version)
    deadline = time.monotonic() + READY_WITHIN_S
    with explained(config, f"waiting for {name} version {number}"):
        while version.status != "READY":
            if version.status == "FAILED_REGISTRATION" or time.monotonic() > deadline:
                raise TrackingError(
                    f"{name} version {number} is {version.status}: {version.status_message}",
                    "look at the server's log and register again",
                )
            time.sleep(0.5)
            version = run.client.get_model_version(name, number)


@contextmanager
def _same_import_path() -> Iterator[None]:
    # MLflow leaves the packed model's code folder on the path, which is about to be removed.
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before
