"""MLflow, Kubeflow Pipelines and, by what they say the time is, the clock."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from thawline.config import Config
from thawline.errors import ClusterError, ConfigError
from thawline.stages.doctor.findings import Skipped

HEALTH = "/apis/v2beta1/healthz"
SECONDS = 5.0
"""Within which a server has to take a connection, and then to go on answering."""
LARGEST_SKEW = 60.0
"""Seconds; signatures of S3 and tokens fail at a few minutes, and times in MLflow mislead."""


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A login page that the endpoint sends to is no answer."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def ask(url: str, headers: Mapping[str, str] | None = None, ca_file: str = "") -> Reply:
    """A GET, whatever the status.

    Raises:
        OSError: No answer, or no certificates in `ca_file`.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310
    try:
        with opener.open(request, timeout=SECONDS) as reply:
            return Reply(reply.status, dict(reply.headers), reply.read(100_000))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, dict(error.headers), error.read(100_000))
    except http.client.HTTPException as error:
        raise OSError(f"it answers no HTTP: {error!r}") from error


def mlflow(config: Config) -> str:
    """A run and a model there and back; the error names the step that failed."""
    from thawline.tracking.round_trip import round_trip

    return round_trip(config)


def kubeflow(environment: Mapping[str, str] | None = None) -> str:
    """Whether Kubeflow Pipelines says that it is well; `KFP_ENDPOINT` says where it is."""
    variables = os.environ if environment is None else environment
    endpoint = _endpoint(variables)
    if not endpoint:
        raise Skipped("KFP_ENDPOINT is not set")
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"KFP_ENDPOINT {endpoint!r} is no web address", "start it with https:// or http://"
        )
    try:
        reply = ask(endpoint + HEALTH, _credentials(variables), variables.get("KFP_CA_FILE", ""))
    except OSError as error:
        raise ClusterError(
            f"{endpoint} does not answer: {_reason(error)}",
            "forward its port (`kubectl -n kubeflow port-forward service/ml-pipeline 8888`), or "
            "correct KFP_ENDPOINT; KFP_CA_FILE names certificates of your own",
        ) from error
    if 300 <= reply.status < 400 or reply.status in (401, 403):
        raise ClusterError(
            f"{endpoint} wants to know who asks ({reply.status})",
            "set KFP_TOKEN, KFP_TOKEN_FILE or KFP_COOKIES to an account that may use it",
        )
    try:
        told = json.loads(reply.body)
        if reply.status != 200 or not isinstance(told, dict):
            raise ValueError
    except ValueError as error:
        raise ClusterError(
            f"{endpoint}{HEALTH} answers {reply.status} and no health of Kubeflow Pipelines",
            "correct KFP_ENDPOINT: that of the API (service/ml-pipeline) or of its UI",
        ) from error
    users = "several users" if told.get("multi_user") else "one user"
    return f"{endpoint} is well: {told.get('tag_name') or 'version unknown'}, {users}"


def clock(config: Config, environment: Mapping[str, str] | None = None) -> str:
    """Whether this machine and a server agree about the time, within `LARGEST_SKEW`."""
    from thawline.tracking.server import tracking_uri

    variables = os.environ if environment is None else environment
    tracking, endpoint = _bare(tracking_uri(config)), _endpoint(variables)
    servers = {"MLflow": f"{tracking}/version", "Kubeflow Pipelines": f"{endpoint}{HEALTH}"}
    asked = {name: url for name, url in servers.items() if url.startswith("http")}
    if not asked:
        raise Skipped("neither MLflow nor Kubeflow Pipelines is a server to compare with")
    for name, url in asked.items():
        before = datetime.now(UTC)
        try:
            # Whoever is not let in is told the time as well.
            date = ask(url).headers.get("Date", "")
            theirs = parsedate_to_datetime(date)
        except (OSError, ValueError):
            continue
        between = before + (datetime.now(UTC) - before) / 2
        skew = (between - theirs).total_seconds()
        if abs(skew) > LARGEST_SKEW:
            raise ConfigError(
                f"this clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} "
                f"that of {name}",
                "let both machines keep the time by NTP: `timedatectl set-ntp true`",
            )
        return f"within {max(1.0, abs(skew)):.0f} s of that of {name}"
    raise Skipped(f"{' and '.join(asked)} said no time")


def _endpoint(variables: Mapping[str, str]) -> str:
    names = ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
    return next((variables[name] for name in names if variables.get(name)), "").rstrip("/")


def _credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """As the commands that talk to Kubeflow send them (docs/kubeflow.md)."""
    token, headers = variables.get("KFP_TOKEN", "").strip(), {}
    file = variables.get("KFP_TOKEN_FILE") or variables.get("KF_PIPELINES_SA_TOKEN_PATH")
    if not token and file:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"the token's file {file} cannot be read: {error.strerror}",
                "correct KFP_TOKEN_FILE",
            ) from error
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if cookies := variables.get("KFP_COOKIES", "").strip():
        headers["Cookie"] = cookies
    for line in variables.get("KFP_HEADERS", "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def _bare(uri: str) -> str:
    """A web address without user and password."""
    if not uri.startswith(("http://", "https://")):
        return ""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error)
