"""The MLflow server: where it is, a client for it, and whether it and the names can be used.

Errors of MLflow and of the connection become a `TrackingError` here; passwords in a URI never
reach a message.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Experiment, LifecycleStage
from mlflow.exceptions import MlflowException

from thawline.config import Config
from thawline.errors import TrackingError

CHECK_RETRIES = 1
CHECK_TIMEOUT_S = 4
SQLITE_MAGIC = b"SQLite format 3\0"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
ALIAS = re.compile(r"[A-Za-z0-9_-]{1,200}")
RESERVED_ALIAS = re.compile(r"latest|v\d+", re.IGNORECASE)
CHALLENGER = "challenger"
"""Alias of the newest version that passed the gate."""


def tracking_uri(config: Config) -> str:
    """The tracking URI: `tracking.uri`, else `MLFLOW_TRACKING_URI`, else SQLite in `workdir`.

    It may hold a password: `masked` it before it is shown.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri or f"sqlite:///{Path(config.workdir).absolute() / 'mlflow.db'}"


def masked(text: str) -> str:
    """The text with `user:password@` of every URI in it replaced by `***@`."""
    return re.sub(r"://[^/\s'\"]*@", "://***@", text)


def connect(config: Config) -> MlflowClient:
    """A client of the tracking server and of its registry.

    A folder for an SQLite file is made. `MLFLOW_REGISTRY_URI` is honoured.

    Raises:
        TrackingError: A URI that MLflow cannot use, a file that is no SQLite database.
    """
    uri = tracking_uri(config)
    database = _sqlite_path(uri)
    if database is not None:
        _prepare_sqlite(database)
    with explained(config, "opening the tracking server"):
        return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI"))


def experiment_id(config: Config, client: MlflowClient) -> str:
    """The id of `tracking.experiment`, which is created where it does not exist.

    With a database and no server in front of it, artifacts go to `mlartifacts` beside the SQLite
    file (in `workdir` for other databases), whatever the working directory is.

    Raises:
        TrackingError: The experiment is deleted, or the server cannot be used.
    """
    name = config.tracking.experiment
    with explained(config, f"opening the experiment {name!r}"):
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=_artifacts(config)))
            except MlflowException as error:
                # Another process may have created it since.
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise error
    if found.lifecycle_stage == LifecycleStage.DELETED:
        raise TrackingError(
            f"the experiment {name!r} is deleted on {masked(tracking_uri(config))}",
            f"restore it (`mlflow experiments restore -x {found.experiment_id}`) or set "
            "tracking.experiment to another name",
        )
    return str(found.experiment_id)


def check(config: Config) -> None:
    """Checks, before anything is trained, that runs and models will find their place.

    Takes at most about ten seconds, whatever the server does.

    Raises:
        TrackingError: A name that cannot be used, a server that cannot be reached or refuses.
    """
    check_names(config)
    found = _ask(config)
    if found is not None and found.lifecycle_stage == LifecycleStage.DELETED:
        experiment_id(config, connect(config))


def require_answer(config: Config) -> None:
    """Asks the server once, where nothing is lost yet if it does not answer within seconds.

    What a command asks later is tried again for minutes, so that work that is done outlives a
    server that is started again. A file of SQLite needs no asking.

    Raises:
        TrackingError: It cannot be reached or refuses; after about fifteen seconds at most.
    """
    if not tracking_uri(config).startswith("sqlite"):
        _ask(config)


def _ask(config: Config) -> Experiment | None:
    """The experiment, if there is one; gives up after seconds."""
    _check_database_port(tracking_uri(config))
    with impatient():
        client = connect(config)
        with explained(config, "asking the tracking server"):
            found: Experiment | None = client.get_experiment_by_name(config.tracking.experiment)
            client.search_registered_models(max_results=1)
    return found


def check_names(config: Config) -> None:
    """Checks `tracking.model_name`, `tracking.experiment` and `tracking.alias`.

    Stricter than MLflow where a name that it stores could not be written in a `models:/` URI.

    Raises:
        TrackingError: Names the key and suggests a name that can be used.
    """
    tracking = config.tracking
    if not MODEL_NAME.fullmatch(tracking.model_name):
        raise TrackingError(
            f"tracking.model_name {tracking.model_name!r} cannot name a registered model: it must "
            "start with a letter or a digit and hold only letters, digits, '.', '_' and '-'",
            f"set tracking.model_name={_usable(tracking.model_name, 'thawline-ranker')}",
        )
    experiment = tracking.experiment
    if not experiment.strip() or experiment != experiment.strip() or len(experiment) > 500:
        raise TrackingError(
            f"tracking.experiment {experiment[:60]!r} cannot name an experiment: it must have 1 "
            "to 500 characters and neither start nor end with a space",
            f"set tracking.experiment={_usable(experiment, 'thawline')}",
        )
    alias = tracking.alias
    if not ALIAS.fullmatch(alias) or RESERVED_ALIAS.fullmatch(alias):
        why = "MLflow reserves it" if RESERVED_ALIAS.fullmatch(alias) else "it may hold only"
        why += "" if why.endswith("it") else " letters, digits, '_' and '-'"
        raise TrackingError(
            f"tracking.alias {alias!r} cannot be an alias: {why}",
            "set tracking.alias=champion",
        )
    if alias == CHALLENGER:
        raise TrackingError(
            f"tracking.alias {alias!r} is the alias of a version that waits to be promoted",
            "set tracking.alias=champion",
        )


@contextmanager
def explained(config: Config, doing: str) -> Iterator[None]:
    """Turns whatever MLflow raises inside into a `TrackingError`.

    Args:
        config: Names the server in the message.
        doing: What was tried, as in "logging metrics".
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        uri = tracking_uri(config)
        text = masked(str(error).strip().split("\n\n")[0])[:600]
        explanation = TrackingError(f"{doing} at {masked(uri)} failed: {text}", _remedy(text))
        # The original's own message would print a password that the URI holds.
        raise explanation from (error if masked(uri) == uri else None)


@contextmanager
def impatient(seconds: int = CHECK_TIMEOUT_S) -> Iterator[None]:
    """Lets MLflow give up after seconds instead of minutes, unless the environment says how long.

    Changes the environment of this process while it is open: MLflow has no other switch.

    Args:
        seconds: For which an answer is waited for, twice.
    """
    settings = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(CHECK_RETRIES),
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
    }
    added = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _sqlite_path(uri: str) -> Path | None:
    if not uri.startswith("sqlite"):
        return None
    database = sqlalchemy.make_url(uri).database
    return Path(database).absolute() if database and database != ":memory:" else None


def _prepare_sqlite(path: Path) -> None:
    # MLflow retries an SQLite file that cannot be opened for 100 s before it says so.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("r+b") as file:
                head = file.read(len(SQLITE_MAGIC))
        else:
            head = b""
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(13, "the folder cannot be written", str(path.parent))
    except OSError as error:
        raise TrackingError(
            f"the tracking database {path} cannot be used: {error.strerror}",
            "set workdir or tracking.uri to a place that can be written",
        ) from error
    if head and head != SQLITE_MAGIC:
        raise TrackingError(
            f"{path} is no SQLite database", "move the file away or set tracking.uri to another"
        )


def _check_database_port(uri: str) -> None:
    # MLflow's retries for a database without a server in front of it cannot be turned down.
    if uri.startswith(("http:", "https:", "sqlite")):
        return
    try:
        url = sqlalchemy.make_url(uri)
    except sqlalchemy.exc.ArgumentError:
        return
    if not url.host or not url.port:
        return
    try:
        socket.create_connection((url.host, url.port), timeout=CHECK_TIMEOUT_S).close()
    except OSError as error:
        raise TrackingError(
            f"nothing answers at {url.host}:{url.port} ({masked(uri)}): {error}",
            "start the database, or set tracking.uri or MLFLOW_TRACKING_URI to one that runs",
        ) from error


def _artifacts(config: Config) -> str | None:
    uri = tracking_uri(config)
    if uri.startswith(("http:", "https:", "databricks", "uc")):
        return None
    database = _sqlite_path(uri)
    beside = database.parent if database is not None else Path(config.workdir).absolute()
    return (beside / "mlartifacts").as_uri()


def _usable(name: str, fallback: str) -> str:
    parts = re.findall(r"[A-Za-z0-9._]+", name)
    return "-".join(parts).strip("._-")[:200].strip("._-") or fallback


def _remedy(text: str) -> str:
    kinds = [
        (
            r"Invalid Host header",
            "start the server with `--allowed-hosts` listing this host's name, with and without "
            "the port",
        ),
        (
            r"\b40[13]\b|PERMISSION_DENIED|UNAUTHENTICATED|not authenticated",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, "
            "to an account that may write there",
        ),
        (
            r"Max retries|timed out|Connection refused|Connection aborted|resolve|unreachable",
            "start the server (`mlflow server`), or set tracking.uri or MLFLOW_TRACKING_URI to "
            "one that runs",
        ),
        (
            r"unsupported URI|filesystem tracking backend",
            "set tracking.uri to sqlite:///<file>.db or to the http address of a server",
        ),
        (r"schema|migrat", "run `mlflow db upgrade <tracking.uri>` or use another database"),
    ]
    for pattern, remedy in kinds:
        if re.search(pattern, text, re.IGNORECASE):
            return remedy
    return "check tracking.uri and the server's log"
