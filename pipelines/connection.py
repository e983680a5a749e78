"""Where a Kubeflow Pipelines API is and how it is spoken to: options and environment variables.

What is secret comes from variables and files alone: an option could be read by everyone who may
list the processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thawline.errors import ConfigError, ThawlineError

if TYPE_CHECKING:
    from pipelines.kfp_client import Kfp

POD_TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Where Kubeflow mounts a service account's token for its API."""
POD_ENDPOINT = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
SINGLE_USER_NAMESPACE = "kubeflow"
"""Where the pods of runs are on an installation without users."""

EndpointOption = Annotated[
    str | None,
    typer.Option(
        envvar=["KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"],
        help="Address of Kubeflow Pipelines, e.g. `http://localhost:8080` or "
        "`https://kubeflow.example/pipeline`. In a pod of the cluster it is found.",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        envvar="KFP_NAMESPACE",
        help="Your profile's namespace, where Kubeflow has several users.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar=["KFP_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH"],
        help="File of a bearer token, read again with each call. A token itself goes into the "
        "variable `KFP_TOKEN`, cookies into `KFP_COOKIES`, headers (`name: value`, one a line) "
        "into `KFP_HEADERS`.",
    ),
]


@dataclass(frozen=True)
class Connection:
    """Everything that a call needs but its content."""

    endpoint: str
    """Without a slash at the end; the API is below `/apis/v2beta1`."""
    namespace: str = ""
    """Of a user's profile; empty: that of the pod, where there are several users."""
    ui: str = ""
    """Address for links; empty: the endpoint."""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    cookies: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: str = ""
    """Certificates that the endpoint's is checked against; empty: the public ones."""
    seconds: int = 30
    """Within which an answer has to begin."""

    def link(self, run_id: str) -> str:
        """Address of a run in the UI."""
        return f"{self.ui or self.endpoint}/#/runs/details/{run_id}"


def connection(
    endpoint: str | None,
    namespace: str | None,
    token_file: Path | None,
    environment: Mapping[str, str] | None = None,
) -> Connection:
    """What options and variables say together.

    Args:
        endpoint: Of Kubeflow Pipelines; None: that of the cluster that this is a pod of.
        namespace: None or empty: none is said.
        token_file: None: the pod's, where it has one and no token is given.
        environment: Variables. None: the process's.

    Raises:
        ConfigError: There is no endpoint, or a value is malformed; it is never shown.
    """
    variables = os.environ if environment is None else environment
    token = _printable(variables.get("KFP_TOKEN", ""), "KFP_TOKEN")
    if not token and token_file is None and POD_TOKEN.exists():
        token_file = POD_TOKEN
    if not endpoint and POD_TOKEN.exists():
        endpoint = POD_ENDPOINT
    if not endpoint:
        raise ConfigError(
            "no address of Kubeflow Pipelines is given",
            "set KFP_ENDPOINT or --endpoint, e.g. http://localhost:8080 after "
            "`kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80`",
        )
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"the endpoint {endpoint!r} is no web address", "start it with https:// or http://"
        )
    return Connection(
        endpoint=endpoint.rstrip("/"),
        namespace=namespace or "",
        ui=_first(variables, "KFP_UI_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT").rstrip("/"),
        token=token,
        token_file=None if token else token_file,
        cookies=_printable(variables.get("KFP_COOKIES", ""), "KFP_COOKIES"),
        headers=_headers(variables.get("KFP_HEADERS", "").splitlines()),
        ca_file=variables.get("KFP_CA_FILE", ""),
        seconds=_seconds(variables.get("KFP_TIMEOUT", "30")),
    )


def connect(endpoint: str | None, namespace: str | None, token_file: Path | None) -> Kfp:
    """A client of the API that options and variables name; nothing is called yet.

    Raises:
        ThawlineError: Kubeflow's packages are not installed.
        ConfigError: See `connection`.
    """
    try:
        from pipelines.kfp_client import Kfp
    except ModuleNotFoundError as error:
        raise not_installed(error) from error
    return Kfp(connection(endpoint, namespace, token_file))


def not_installed(error: ModuleNotFoundError) -> ThawlineError:
    """What is said where the packages of the `kubeflow` extra are not there."""
    return ThawlineError(
        f"Kubeflow's SDK is not installed: {error}", "pip install 'thawline[kubeflow]'"
    )


def _first(variables: Mapping[str, str], *names: str) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")


def _printable(text: str, what: str) -> str:
    stripped = text.strip()
    if not stripped.isprintable():
        raise ConfigError(f"{what} holds a line break or a control character", f"correct {what}")
    return stripped


def _headers(lines: Sequence[str]) -> dict[str, str]:
    headers = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(
                f"line {number} of KFP_HEADERS is no header", "write `name: value`, one a line"
            )
        headers[_printable(name, "KFP_HEADERS")] = _printable(value, "KFP_HEADERS")
    return headers


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"KFP_TIMEOUT is {text!r}", "write a whole number of seconds, e.g. 30")
    return int(text)
