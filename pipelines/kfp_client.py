"""What the commands ask of a Kubeflow Pipelines API (v2beta1)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import kfp_server_api as api

from pipelines.connection import SINGLE_USER_NAMESPACE, Connection
from pipelines.kfp_call import Answer, Caller
from thawline.errors import ConfigError

POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Kfp:
    """A Kubeflow Pipelines API. Each call answers within the connection's seconds or raises.

    Every method raises a ClusterError where the endpoint does not answer or refuses.
    """

    def __init__(self, connection: Connection) -> None:
        """Calls nothing yet."""
        self.connection = connection
        self._multi_user: bool | None = None
        self._api = Caller(connection)
        client = self._api.client
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
            answer = self._api.call(doing, self._health.healthz_service_get_healthz)
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
        found = self._api.call(
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
        made = self._api.call(doing, self._pipelines.pipeline_service_create_pipeline, body)
        return str(made["pipeline_id"])

    def version(self, pipeline_id: str, name: str) -> str | None:
        """Id of a pipeline's version by name; None where there is none."""
        found = self._api.pages(
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
            made = self._api.call(
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
        found = self._api.pages(
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
        made = self._api.call(doing, self._experiments.experiment_service_create_experiment, body)
        return str(made["experiment_id"])

    def create_run(self, body: Answer) -> Answer:
        """Starts a run."""
        doing = f"starting the run {body['display_name']}"
        return self._api.call(doing, self._runs.run_service_create_run, body)

    def run(self, run_id: str) -> Answer:
        """A run with its tasks."""
        return self._api.call(f"reading the run {run_id}", self._runs.run_service_get_run, run_id)

    def newest_runs(self, count: int) -> list[Answer]:
        """The runs that were created last, the newest first."""
        answer = self._api.call(
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
            self._api.pages(
                "listing recurring runs",
                self._recurring.recurring_run_service_list_recurring_runs,
                "recurringRuns",
                **self._in_namespace(),
            )
        )

    def create_recurring_run(self, body: Answer) -> str:
        """Makes a recurring run; its id."""
        doing = f"creating the recurring run {body['display_name']}"
        made = self._api.call(
            doing, self._recurring.recurring_run_service_create_recurring_run, body
        )
        return str(made["recurring_run_id"])

    def delete_recurring_run(self, recurring_run_id: str) -> None:
        """Deletes a recurring run; a run of it that is under way goes on."""
        self._api.call(
            f"deleting the recurring run {recurring_run_id}",
            self._recurring.recurring_run_service_delete_recurring_run,
            recurring_run_id,
            missing=True,
            propagation_policy="ORPHAN",
        )

    def enable_recurring_run(self, recurring_run_id: str, enabled: bool) -> None:
        """Lets a recurring run start runs again, or no more."""
        service = self._recurring
        self._api.call(
            f"{'enabling' if enabled else 'disabling'} the recurring run {recurring_run_id}",
            service.recurring_run_service_enable_recurring_run
            if enabled
            else service.recurring_run_service_disable_recurring_run,
            recurring_run_id,
        )

    def _in_namespace(self) -> dict[str, Any]:
        return {"namespace": self.namespace} if self.namespace else {}


def _equals(key: str, value: str) -> str:
    predicate = {"operation": "EQUALS", "key": key, "string_value": value}
    return json.dumps({"predicates": [predicate]})
