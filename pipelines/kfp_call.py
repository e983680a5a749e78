"""One call of a Kubeflow Pipelines API: who calls, within which time, and what errors mean.

Answers are plain JSON: Kubeflow's own models turn down a status that they do not know yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kfp_server_api as api
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from pipelines.connection import Connection
from thawline.errors import ClusterError, ConfigError

CONNECT_SECONDS = 10
PAGE = 100
LONGEST_REASON = 500
"""Characters of the server's words that an error shows."""
SHORTEST_SECRET = 6

Answer = dict[str, Any]


class Caller:
    """Calls methods of Kubeflow's generated client; each answers in time, or raises."""

    def __init__(self, connection: Connection) -> None:
        """Calls nothing yet.

        Raises:
            ConfigError: The file of the token or of certificates cannot be used.
        """
        self.connection = connection
        settings = api.Configuration()
        settings.host = connection.endpoint
        # A login page that the endpoint sends to would be read as an answer.
        settings.retries = Retry(total=0, redirect=0, raise_on_redirect=False)
        settings.ssl_ca_cert = connection.ca_file or None
        if connection.token or connection.token_file:
            settings.api_key_prefix["authorization"] = "Bearer"
            settings.api_key["authorization"] = self._token()
            # Kubernetes replaces the token in the file from time to time.
            settings.refresh_api_key_hook = self._refresh
        if connection.ca_file and not Path(connection.ca_file).is_file():
            raise ConfigError(
                f"there is no file of certificates {connection.ca_file}", "correct KFP_CA_FILE"
            )
        self.client = api.ApiClient(settings, cookie=connection.cookies or None)
        for name, value in connection.headers.items():
            self.client.set_default_header(name, value)

    def pages(
        self, doing: str, method: Any, key: str, *arguments: Any, **options: Any
    ) -> Iterator[Answer]:
        """What all pages of a list hold under a key; see `call`."""
        token = ""
        while True:
            answer = self.call(
                doing, method, *arguments, page_size=PAGE, page_token=token, **options
            )
            yield from answer.get(key) or ()
            token = answer.get("next_page_token") or ""
            if not token:
                return

    def call(
        self, doing: str, method: Any, *arguments: Any, missing: bool = False, **options: Any
    ) -> Answer:
        """The answer to a call.

        Args:
            doing: What names it in an error.
            method: Of one of the generated services.
            arguments: For it.
            missing: An object that is not there is an empty answer, and no error.
            options: For it.

        Raises:
            ClusterError: The endpoint does not answer in time, refuses, or is no API.
        """
        timeout = (min(CONNECT_SECONDS, self.connection.seconds), self.connection.seconds)
        try:
            response = method(
                *arguments, **options, _preload_content=False, _request_timeout=timeout
            )
            content = response.data
        except api.ApiException as error:
            if error.status == 404 and missing and _is_api(error):
                return {}
            raise self._refused(doing, error) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(
                f"{doing}: {self.connection.endpoint} does not answer: {self._shown(str(error))}",
                "check the address and the network; a port-forward may have ended",
                passing=True,
            ) from None
        answer = _parsed(content)
        if answer is None:
            raise ClusterError(
                f"{doing}: {self.connection.endpoint} answers with a page, not as an API",
                "take the address that ends before /apis/v2beta1; where it leads to a login, set "
                "KFP_TOKEN, KFP_COOKIES or KFP_HEADERS",
            )
        return answer

    def _refused(self, doing: str, error: api.ApiException) -> ClusterError:
        status = int(error.status or 0)
        reason = self._shown(_reason(error))
        return ClusterError(
            f"{doing}: {self.connection.endpoint} answers {status}: {reason}",
            self._remedy(status, reason),
            passing=status == 429 or status >= 500,
        )

    def _remedy(self, status: int, reason: str) -> str:
        place = self.connection.namespace
        if 300 <= status < 400 or status == 401:
            return (
                "say who you are: a token in KFP_TOKEN or --token-file, or the cookies or headers "
                "of your login in KFP_COOKIES or KFP_HEADERS"
            )
        if status == 403:
            where = f"the namespace {place}" if place else "this installation"
            return (
                f"check that --namespace is your profile's, and have kubeflow-pipelines-edit "
                f"granted to you in {where}"
            )
        if status == 404:
            return "check the id, --namespace and the endpoint"
        if status == 409:
            return "another process has made it meanwhile: do it again"
        if status == 413 or "too large" in reason.lower() or "exceeds" in reason.lower():
            return "make the config smaller: lists belong into files that it names"
        if status == 429 or status >= 500:
            return "try again later; look at the log of Kubeflow's deployment ml-pipeline"
        return "correct what the server names"

    def _shown(self, text: str) -> str:
        """A text without anything secret, in case that the endpoint echoes it."""
        told = [self._token(), self.connection.cookies, *self.connection.headers.values()]
        for secret in told:
            # A short value is no secret, and may be a part of any word.
            if len(secret) >= SHORTEST_SECRET:
                text = text.replace(secret, "***")
        return text[:LONGEST_REASON]

    def _refresh(self, settings: api.Configuration) -> None:
        settings.api_key["authorization"] = self._token()

    def _token(self) -> str:
        file = self.connection.token_file
        if file is None:
            return self.connection.token
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the token in {file}: {type(error).__name__}", "check --token-file"
            ) from None
        if not token or not token.isprintable():
            raise ConfigError(f"{file} holds no token on one line", "check --token-file")
        return token


def _is_api(error: api.ApiException) -> bool:
    """Whether the API itself said so, rather than a proxy that knows no such path."""
    return _parsed(error.body) is not None


def _reason(error: api.ApiException) -> str:
    told = _parsed(error.body) or {}
    words = [str(told[key]).strip() for key in ("message", "error_message", "error") if key in told]
    return next((each.splitlines()[0] for each in words if each), str(error.reason))


def _parsed(content: bytes | str | None) -> Answer | None:
    """A JSON object; None where the text is none."""
    try:
        answer = json.loads(content or "{}")
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
