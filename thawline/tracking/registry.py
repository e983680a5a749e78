"""The model registry: from a model folder to a version with tags and aliases, and back."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.model.bundle import Bundle
from thawline.model.vectors import vector_bytes, write_vectors
from thawline.tracking.fetch import ABSENT, VECTORS, FetchedModel, fetch_catalog, fetch_model
from thawline.tracking.lineage import PARENT_TAG, read_evaluation, version_tags
from thawline.tracking.packing import pack, upload
from thawline.tracking.promotion import give_alias, put
from thawline.tracking.run import Run
from thawline.tracking.server import CHALLENGER, check_names, explained

__all__ = [
    "FetchedModel",
    "Registration",
    "fetch_catalog",
    "fetch_model",
    "read_evaluation",
    "register",
]

ALIASED_TAG = "thawline.aliased"
READY_WITHIN_S = 300.0


@dataclass(frozen=True)
class Registration:
    """A registered version of a model."""

    name: str
    version: str
    alias: str
    """`tracking.alias`, or `challenger` where a person promotes."""

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
    """Registers a model folder as a new version of `tracking.model_name` and gives it its aliases.

    The packed model is loaded and asked for scores here before the registry hears of it. Called
    again for the same pipeline run, even at the same time, it gives the version that exists; it
    finishes what an earlier call left undone, but does not move an alias again.

    Args:
        config: Names the model and the aliases.
        model_dir: A model folder.
        evaluation_dir: An evaluation folder of that model.
        run: The open run of the stage, whose model it becomes.

    Raises:
        DataError: A damaged model folder.
        TrackingError: A name that cannot be used, a model that is too large or does not score when
            loaded, a version that does not become ready, the server's refusal.
    """
    check_names(config)
    if not _versions(config, run):
        _new_version(config, Path(model_dir), Path(evaluation_dir), run)
    version = _only_version(config, run)
    _await_ready(config, run, version)
    number, name, alias = str(version.version), version.name, config.tracking.alias
    if config.tracking.promote == "manual":
        alias = CHALLENGER
    if version.tags.get(ALIASED_TAG) != alias:
        with explained(config, f"giving {name} version {number} the alias {CHALLENGER}"):
            put(run.client.set_registered_model_alias, name, CHALLENGER, number)
        if alias != CHALLENGER:
            give_alias(config, run.client, version)
        with explained(config, f"tagging {name} version {number}"):
            put(run.client.set_model_version_tag, name, number, ALIASED_TAG, alias)
    run.set_tags({"thawline.model_version": f"{name}/{number}"})
    return Registration(name, number, alias)


def _versions(config: Config, run: Run) -> list[ModelVersion]:
    """The versions of this pipeline run, the oldest first."""
    name = config.tracking.model_name
    filters = f"name = '{name}' and tags.`{PARENT_TAG}` = '{run.pipeline_run_id}'"
    with explained(config, f"looking for versions of {name}"):
        found = list(run.client.search_model_versions(filters))
    usable = [version for version in found if version.status != "FAILED_REGISTRATION"]
    return sorted(usable, key=lambda version: int(version.version))


def _only_version(config: Config, run: Run) -> ModelVersion:
    """The oldest version of this pipeline run; others, registered at the same time, are deleted."""
    first, *others = _versions(config, run)
    for other in others:
        with explained(config, f"deleting {other.name} version {other.version}"):
            try:
                run.client.delete_model_version(other.name, str(other.version))
                if other.model_id:
                    run.client.delete_logged_model(other.model_id)
            except MlflowException as error:
                # Who registered it deletes it too.
                if error.error_code not in ABSENT:
                    raise
    return first


def _new_version(config: Config, model_dir: Path, evaluation_dir: Path, run: Run) -> None:
    bundle = Bundle.load(model_dir)
    evaluation = read_evaluation(evaluation_dir)
    _require_size(config, model_dir, bundle)
    name = config.tracking.model_name
    with tempfile.TemporaryDirectory(prefix="thawline-") as temporary:
        packed, vectors = Path(temporary) / "model", Path(temporary) / VECTORS
        pack(config, packed, model_dir, bundle)
        logged = upload(config, packed, run)
        if config.tracking.log_vectors:
            vectors.mkdir()
            write_vectors(bundle, vectors)
            run.log_artifact(vectors)
    tags = version_tags(config, bundle.meta, evaluation, run)
    with explained(config, f"registering a version of {name}"):
        try:
            run.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        run.client.create_model_version(
            name,
            # MLflow would look a models:/ URI up with its process-wide tracking URI.
            source=logged.artifact_location,
            run_id=run.run_id,
            tags=tags,
            model_id=logged.model_id,
            await_creation_for=0,
        )


def _require_size(config: Config, model_dir: Path, bundle: Bundle) -> None:
    """Sees to it, before anything is packed, that the server will take what is uploaded."""
    tracking = config.tracking
    model = sum(file.stat().st_size for file in model_dir.rglob("*") if file.is_file())
    vectors = vector_bytes(bundle) if tracking.log_vectors else 0
    if model + vectors > tracking.max_upload_gb * 1e9:
        raise TrackingError(
            f"{model_dir} has {model / 1e9:.3g} GB and its ID tables as Parquet {vectors / 1e9:.3g}"
            f" GB; tracking.max_upload_gb allows {tracking.max_upload_gb:g}",
            "raise tracking.max_upload_gb to what the artifact store and a proxy before it take, "
            "or leave the tables out: tracking.log_vectors=false",
        )


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
