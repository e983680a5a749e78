"""The calls of a Kubeflow Pipelines API (v2beta1) that the commands take, and what its errors mean.

Answers are plain JSON: Kubeflow's own models turn down a status that they do not know yet.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kfp_server_api as api
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from pipelines.connection import SINGLE_USER_NAMESPACE, Connection
from thawline.errors import ClusterError, ConfigError

POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECT_SECONDS = 10
PAGE = 100
LONGEST_REASON = 500
"""Characters of the server's words that an error shows."""

SHORTEST_SECRET = 6

Answer = dict[str, Any]


class Kfp:
    """A Kubeflow Pipelines API. Each call answers within the connection's seconds or raises.

    Every method raises a ClusterError where the endpoint does not answer or refuses.
    """

    def __init__(self, connection: Connection) -> None:
        """Calls nothing yet."""
        self.connection = connection
        self._multi_user: bool | None = None
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
        client = api.ApiClient(settings, cookie=connection.cookies or None)
        for name, value in connection.headers.items():
            client.set_default_header(name, value)
        self._pipelines = api.PipelineServiceApi(client)
        self._uploads = api.PipelineUploadServiceApi(client)
        self._experiments = api.ExperimentServiceApi(client)
        self._runs = api.RunServiceApi(client)
        self._recurring = api.RecurringRunServiceApi(client)
        self._health = api.HealthzServiceApi(client)

    @property
    def multi_user(self) -> bool:
        """Whether each user has a namespace; asked once."""
        if self._multi_user is None:
            doing = "asking the endpoint for its health"
            answer = self._call(doing, self._health.healthz_service_get_healthz)
            self._multi_user = bool(answer.get("multi_user"))
        return self._multi_user

    @property
    def namespace(self) -> str:
        """What the API takes for one: empty on an installation without users.

        Raises:
            ConfigError: There are users, and none is said.
        """
        if not self.multi_user:
            return ""
        if self.connection.namespace:
            return self.connection.namespace
        if POD_NAMESPACE.exists():
            return POD_NAMESPACE.read_text(encoding="utf-8").strip()
        raise ConfigError(
            "this Kubeflow has several users, and no namespace is given",
            "set KFP_NAMESPACE or --namespace to your profile's namespace",
        )

    @property
    def pod_namespace(self) -> str:
        """Where the pods of runs are."""
        return self.namespace or self.connection.namespace or SINGLE_USER_NAMESPACE

    def pipeline(self, name: str) -> str | None:
        """Id of a pipeline by name; None where there is none."""
        doing = f"looking for the pipeline {name}"
        found = self._call(
            doing,
            self._pipelines.pipeline_service_get_pipeline_by_name,
            name,
            missing=True,
            **self._in_namespace(),
        )
        return found.get("pipeline_id")

    def create_pipeline(self, name: str) -> str:
        """Makes a pipeline without a version; its id."""
        body = {"name": name, "display_name": name, **self._in_namespace()}
        doing = f"creating the pipeline {name}"
        made = self._call(doing, self._pipelines.pipeline_service_create_pipeline, body)
        return str(made["pipeline_id"])

    def version(self, pipeline_id: str, name: str) -> str | None:
        """Id of a pipeline's version by name; None where there is none."""
        found = self._pages(
            f"looking for the version {name}",
            self._pipelines.pipeline_service_list_pipeline_versions,
            "pipeline_versions",
            pipeline_id,
            filter=_equals("display_name", name),
        )
        return next((each["pipeline_version_id"] for each in found), None)

    def upload_version(self, pipeline_id: str, name: str, text: str, description: str) -> str:
        """Uploads the compiled text of a version; its id."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pipeline.yaml"
            file.write_text(text, encoding="utf-8")
            made = self._call(
                f"uploading the version {name}",
                self._uploads.upload_pipeline_version,
                str(file),
                pipelineid=pipeline_id,
                name=name,
                display_name=name,
                description=description,
            )
        return str(made["pipeline_version_id"])

    def experiment(self, name: str) -> str | None:
        """Id of an experiment by name; None where there is none."""
        found = self._pages(
            f"looking for the experiment {name}",
            self._experiments.experiment_service_list_experiments,
            "experiments",
            filter=_equals("display_name", name),
            **self._in_namespace(),
        )
        return next((each["experiment_id"] for each in found), None)

    def create_experiment(self, name: str) -> str:
        """Makes an experiment; its id."""
        body = {"display_name": name, **self._in_namespace()}
        doing = f"creating the experiment {name}"
        made = self._call(doing, self._experiments.experiment_service_create_experiment, body)
        return str(made["experiment_id"])

    def create_run(self, body: Answer) -> Answer:
        """Starts a run."""
        doing = f"starting the run {body['display_name']}"
        return self._call(doing, self._runs.run_service_create_run, body)

    def run(self, run_id: str) -> Answer:
        """A run with its tasks."""
        return self._call(f"reading the run {run_id}", self._runs.run_service_get_run, run_id)

    def newest_runs(self, count: int) -> list[Answer]:
        """The runs that were created last, the newest first."""
        answer = self._call(
            "listing runs",
            self._runs.run_service_list_runs,
            sort_by="created_at desc",
            page_size=count,
            **self._in_namespace(),
        )
        return list(answer.get("runs") or ())

    def recurring_runs(self) -> list[Answer]:
        """Every recurring run of the namespace, ours or not."""
        return list(
            self._pages(
                "listing recurring runs",
                self._recurring.recurring_run_service_list_recurring_runs,
                "recurringRuns",
                **self._in_namespace(),
            )
        )

    def create_recurring_run(self, body: Answer) -> str:
        """Makes a recurring run; its id."""
        doing = f"creating the recurring run {body['display_name']}"
        made = self._call(doing, self._recurring.recurring_run_service_create_recurring_run, body)
        return str(made["recurring_run_id"])

    def delete_recurring_run(self, recurring_run_id: str) -> None:
        """Deletes a recurring run; a run of it that is under way goes on."""
        self._call(
            f"deleting the recurring run {recurring_run_id}",
            self._recurring.recurring_run_service_delete_recurring_run,
            recurring_run_id,
            missing=True,
            propagation_policy="ORPHAN",
        )

    def enable_recurring_run(self, recurring_run_id: str, enabled: bool) -> None:
        """Lets a recurring run start runs again, or no more."""
        service = self._recurring
        self._call(
            f"{'enabling' if enabled else 'disabling'} the recurring run {recurring_run_id}",
            service.recurring_run_service_enable_recurring_run
            if enabled
            else service.recurring_run_service_disable_recurring_run,
            recurring_run_id,
        )

    def _in_namespace(self) -> dict[str, Any]:
        return {"namespace": self.namespace} if self.namespace else {}

    def _pages(
        self, doing: str, method: Any, key: str, *arguments: Any, **options: Any
    ) -> Iterator[Answer]:
        token = ""
        while True:
            answer = self._call(
                doing, method, *arguments, page_size=PAGE, page_token=token, **options
            )
            yield from answer.get(key) or ()
            token = answer.get("next_page_token") or ""
            if not token:
                return

    def _call(
        self, doing: str, method: Any, *arguments: Any, missing: bool = False, **options: Any
    ) -> Answer:
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


def _equals(key: str, value: str) -> str:
    predicate = {"operation": "EQUALS", "key": key, "string_value": value}
    return json.dumps({"predicates": [predicate]})


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
