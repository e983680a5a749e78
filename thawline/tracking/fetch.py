"""From the registry to a folder: a registered model, or its catalog alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import mlflow.artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from thawline.config import Config
from thawline.data.storage import fetch_folder, is_remote
from thawline.errors import TrackingError
from thawline.tracking.server import connect, explained, tracking_uri

SCHEME = "models:"
REGISTERED = "models:/"
"""How the name of a registered model begins."""
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""Error codes for a model or an alias that does not exist."""


VECTORS = "vectors"
"""Folder of the registering run's artifacts that holds the ID tables as Parquet."""
ORIGIN_FILE = "registered.json"
"""In a fetched model folder: which version it is."""


@dataclass(frozen=True)
class FetchedModel:
    """A registered model on the local disk."""

    folder: Path
    """A model folder, as `Bundle.load` takes it."""
    name: str
    version: str
    tags: dict[str, str]
    """The version's tags."""


def fetch_model(config: Config, uri: str, folder: Path) -> FetchedModel | None:
    """Fetches the whole model folder of a registered model.

    Args:
        config: Names the server.
        uri: `models:/<name>@<alias>` or `models:/<name>/<version>`.
        folder: Under which it is put.

    Returns:
        The model; None where no version has the alias, or there is no such model yet.

    Raises:
        TrackingError: A URI of another form, a version that does not exist, one that is no model of
            ours, the server's refusal.
    """
    version = find_version(config, uri)
    if version is None:
        return None
    with explained(config, f"fetching {uri}"):
        (fetched,) = _download(config, version, [""], folder)
    facts = {"name": version.name, "version": str(version.version)}
    (fetched / ORIGIN_FILE).write_text(json.dumps(facts), encoding="utf-8")
    return FetchedModel(fetched, **facts, tags=dict(version.tags))


def read_origin(folder: Path) -> str:
    """The `models:/<name>/<version>` that a folder was fetched from; empty for any other folder."""
    try:
        facts = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
        return f"models:/{facts['name']}/{facts['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def require_model(config: Config, uri: str, folder: Path) -> FetchedModel:
    """As `fetch_model`, where there must be one.

    Raises:
        TrackingError: No version has the alias, or what `fetch_model` raises.
    """
    fetched = fetch_model(config, uri, folder)
    if fetched is None:
        raise TrackingError(
            f"no registered version is {uri}",
            "see `thawline versions`, and name one as models:/<name>/<version>",
        )
    return fetched


def local_model(config: Config, model: str, folder: Path) -> Path:
    """A model folder on the local disk.

    Args:
        config: Names the server.
        model: A `models:/` URI, a folder, or the URL of one.
        folder: Under which it is put where it has to be fetched.

    Raises:
        DataError: A URL that cannot be read.
        TrackingError: No such version or alias, the server's refusal.
    """
    if is_remote(model):
        return fetch_folder(model, folder)
    if model.startswith(SCHEME):
        return require_model(config, model, folder).folder
    return Path(model)


def fetch_vectors(config: Config, uri: str, name: str, folder: Path) -> Path | None:
    """Fetches the vectors of an ID table that were registered with a model.

    Args:
        config: Names the server.
        uri: A `models:/` URI.
        name: Of the table.
        folder: Where the file is put.

    Returns:
        The file; None where there is none: the model was registered without, or is no registered
        one.

    Raises:
        TrackingError: A URI of another form, a version that does not exist, the server's refusal.
    """
    version = find_version(config, uri) if uri.startswith(SCHEME) else None
    if version is None or not version.run_id:
        return None
    client = connect(config)
    path = f"{VECTORS}/{name}.parquet"
    with explained(config, f"fetching the vectors of {uri}"):
        files = [file.path for file in client.list_artifacts(version.run_id, VECTORS)]
        if path not in files:
            return None
        return Path(client.download_artifacts(version.run_id, path, str(folder)))


def fetch_catalog(config: Config, uri: str, folder: Path) -> Path | None:
    """Fetches `catalog.parquet` and `model.json` of a registered model, not its weights.

    Args:
        config: Names the server.
        uri: `models:/<name>@<alias>` or `models:/<name>/<version>`.
        folder: Where they are put.

    Returns:
        The folder that holds them; None where no version has the alias, or there is no such model
        yet.

    Raises:
        TrackingError: A URI of another form, a version that does not exist, one that is no model of
            ours, the server's refusal.
    """
    version = find_version(config, uri)
    if version is None:
        return None
    with explained(config, f"fetching the catalog of {uri}"):
        _download(config, version, ["/model.json", "/catalog.parquet"], folder)
    return folder


def find_version(config: Config, uri: str) -> ModelVersion | None:
    """The version that a `models:/` URI names; None where no version has the alias.

    Raises:
        TrackingError: A URI of another form, a version that does not exist, the server's refusal.
    """
    match = MODEL_URI.fullmatch(uri)
    if match is None:
        raise TrackingError(
            f"{uri!r} names no registered model",
            "write models:/<name>@<alias> or models:/<name>/<version>",
        )
    client = connect(config)
    with explained(config, f"looking for {uri}"):
        if match["version"]:
            try:
                return client.get_model_version(match["name"], match["version"])
            except MlflowException as error:
                if error.error_code not in ABSENT:
                    raise
                raise TrackingError(
                    f"there is no version {match['version']} of {match['name']}",
                    "see `thawline versions`",
                ) from error
        try:
            found = client.get_model_version_by_alias(match["name"], match["alias"])
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            return None
        # The one found by its alias may come without tags.
        return client.get_model_version(found.name, found.version)


def _download(config: Config, version: ModelVersion, files: list[str], folder: Path) -> list[Path]:
    server = tracking_uri(config)
    source = connect(config).get_model_version_download_uri(version.name, version.version)
    (packed,) = mlflow.artifacts.list_artifacts(f"{source}/artifacts", tracking_uri=server)
    root = f"{source}/artifacts/{Path(packed.path).name}"
    return [
        Path(
            mlflow.artifacts.download_artifacts(
                artifact_uri=f"{root}{file}", dst_path=str(folder), tracking_uri=server
            )
        )
        for file in files
    ]
