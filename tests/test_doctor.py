"""`thawline doctor` on machines that are well, and on some that are not."""

import json
import os
import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import mlflow.artifacts
import pytest
import torch
import yaml
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow_helpers import make_config
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from pipelines.needs import needs
from pipelines.profiles import BUILT_IN
from thawline import cli
from thawline.data.storage import Remote
from thawline.errors import ClusterError, ConfigError, DataError, ThawlineError, TrackingError
from thawline.stages.doctor import cluster, lookup, machine, servers, storage
from thawline.stages.doctor.cluster import Needs
from thawline.stages.doctor.findings import Look, Skipped, examine, take
from thawline.stages.doctor.looks import looks
from thawline.tracking import packing, round_trip
from thawline.tracking.server import connect

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch, no_mlflow_environment):
    for name in list(os.environ):
        if name.startswith(("KFP_", "KF_", "THAWLINE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def quick(monkeypatch):
    """Without the process that imports TorchRec."""
    monkeypatch.setattr(machine, "engine", lambda config: "not asked")


@contextmanager
def answering(reply):
    """The address of a server that answers each GET with `reply(path, headers)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = reply(self.path, self.headers)
            self.send_response_only(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def doctor(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)], catch_exceptions=False)


# Findings


def test_a_machine_that_is_well_passes_and_nothing_is_left_behind(sqlite_config):
    workdir = sqlite_config.workdir
    before = len(MlflowClient(f"sqlite:///{workdir}/mlflow.db").search_experiments())
    done = doctor("--json", "--set", f"workdir={workdir}")
    told = json.loads(done.stdout)
    statuses = {each["check"]: each["status"] for each in told["checks"]}
    passing = ("python", "packages", "torch", "engine", "workdir", "mlflow")
    assert {name: statuses[name] for name in passing} == dict.fromkeys(passing, "pass"), told
    for name in ("kubeflow", "cluster", "clock"):
        assert statuses[name] == "skipped"
    assert (done.exit_code, told["passed"]) == (0, True)
    assert all(each["remedy"] == "" and each["detail"] for each in told["checks"])
    assert_nothing_is_left(sqlite_config)
    # The experiment stays, as the first run of a pipeline would make it.
    assert len(connect(sqlite_config).search_experiments()) == before + 1


def assert_nothing_is_left(config):
    client = connect(config)
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert client.search_runs(experiments, run_view_type=ViewType.ACTIVE_ONLY) == []
    assert client.search_registered_models() == []
    assert client.search_logged_models(experiments) == []
    for run in client.search_runs(experiments, run_view_type=ViewType.DELETED_ONLY):
        assert mlflow.artifacts.list_artifacts(run.info.artifact_uri) == []


def test_one_failure_makes_the_exit_code_one_and_stands_with_its_remedy(
    sqlite_config, tmp_path, quick, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COLUMNS", "200")
    uri = f"sqlite:///{sqlite_config.workdir}/mlflow.db"
    done = doctor("--set", f"workdir={tmp_path}/file/runs", "--set", f"tracking.uri={uri}")
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("workdir")]
    assert "fail" in line
    assert f"{tmp_path}/file/runs cannot be written to: Not a directory" in line
    assert "What to do: set workdir to a folder that user" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mlflow")]
    assert "pass" in line


def test_a_config_that_cannot_be_read_is_no_finding(tmp_path):
    with pytest.raises(ConfigError, match="there is no"):
        doctor("--config", tmp_path / "there is no.yaml")


def test_a_look_that_hangs_is_left_behind_and_the_next_one_taken():
    ended = threading.Event()
    found = examine(
        [Look("hangs", lambda: str(ended.wait(20)), 0.05, "pull the plug"), Look("after", str)]
    )
    ended.set()
    assert (found[0].status, found[0].remedy) == ("fail", "pull the plug")
    assert found[0].detail == "did not come to an end within 0.05 s"
    assert found[0].seconds < 10
    assert found[1].status == "pass"


def test_whatever_a_look_raises_is_a_finding(monkeypatch):
    monkeypatch.setenv("KFP_TOKEN", "correct-horse")

    def raising(error):
        def look():
            raise error

        found = take(Look("x", look))
        return found.status, found.detail, found.remedy

    assert raising(Skipped("why")) == ("skipped", "why", "")
    assert raising(DataError("gone", "find it")) == ("fail", "gone", "find it")
    status, detail, remedy = raising(ModuleNotFoundError("No module named 'torch'"))
    assert (status, detail) == ("fail", "No module named 'torch'")
    assert "pip install" in remedy
    assert raising(KeyError("correct-horse"))[1] == "KeyError: '***'"


# The machine


def test_a_package_that_is_missing_or_too_old_is_named():
    with pytest.raises(ConfigError) as told:
        machine.packages(["thawline-none>=1", "numpy>=999", "rich", "no-such; extra == 'gpu'"])
    missing, old = told.value.what.split("; ")
    assert missing == "thawline-none is not installed"
    assert old.startswith("numpy is ")
    assert old.endswith("and Thawline needs >=999")
    assert "pip install" in told.value.remedy


def test_a_python_that_is_too_old_is_told():
    with pytest.raises(ConfigError, match=r"this is Python 3\..*needs >=4"):
        machine.python(">=4")


def test_an_engine_that_is_missing_fails_only_where_it_is_needed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "thawline.tables.sharded", None)
    out = json.dumps(lookup.look_up())
    with pytest.raises(Skipped, match="TorchRec or FBGEMM cannot be imported"):
        machine.read_lookup(0, out, "", needed=False)
    with pytest.raises(ConfigError, match="TorchRec or FBGEMM") as told:
        machine.read_lookup(0, out, "", needed=True)
    assert "thawline[cpu]" in told.value.remedy


def test_an_engine_that_dies_is_a_failure_with_its_last_line():
    with pytest.raises(ThawlineError, match="ended with -4: Illegal instruction"):
        machine.read_lookup(-4, "", "a warning\nIllegal instruction\n", needed=False)


def test_an_engine_that_never_ends_is_ended(sqlite_config):
    with pytest.raises(ThawlineError, match=r"within 0\.01 s"):
        machine.engine(sqlite_config, seconds=0.01)


def test_no_gpu_is_a_failure_only_where_one_is_asked_for(sqlite_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Skipped, match="sees no GPU"):
        machine.gpu(sqlite_config)
    monkeypatch.setenv("THAWLINE_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="a GPU is asked for"):
        machine.gpu(sqlite_config)


# Storage


def test_a_folder_that_was_not_there_is_not_there_afterwards(tmp_path):
    found = storage.folder(str(tmp_path / "a" / "b"), "workdir")
    assert found.startswith(f"{tmp_path}/a/b takes, gives back and deletes a file")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_told(tmp_path):
    with pytest.raises(ConfigError, match="GB free, less than 1e") as told:
        storage.folder(str(tmp_path), "workdir", least_free_gb=1e9)
    assert "set workdir to a folder on another disk" in told.value.remedy


def test_a_log_is_counted_and_one_that_is_not_there_named(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.csv").write_bytes(b"x" * 500_000)
    assert storage.inputs(str(tmp_path), "events.path") == "2 files, 1.0 MB"
    with pytest.raises(DataError, match=r"events\.path"):
        storage.inputs(str(tmp_path / "none"), "events.path")


@pytest.fixture(scope="module")
def s3():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        moto.start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto.get_host_and_port()[1]}")
        boto3.client("s3").create_bucket(Bucket="team")
        yield boto3.resource("s3").Bucket("team")
        moto.stop()


def test_a_bucket_is_written_to_read_and_left_as_it_was(s3):
    assert storage.url("s3://team/out").startswith("s3://team/out takes, gives back and deletes")
    assert [each.key for each in s3.objects.all() if not each.key.endswith("/")] == []
    s3.put_object(Key="log/1.parquet", Body=b"x" * 1_000_000)
    found = storage.inputs("s3://team/log", "events.path")
    assert found == "1 files, 1.0 MB; the smallest was read"
    with pytest.raises(DataError, match="names no data file"):
        storage.inputs("s3://team/none", "events.path")


def test_a_bucket_that_refuses_is_told_with_the_place(s3, monkeypatch):
    def refuse(*_):
        raise DataError("s3://team/out: ACCESS_DENIED", "check the credentials")

    monkeypatch.setattr(Remote, "put", refuse)
    found = take(Look("--write s3://team/out", lambda: storage.url("s3://team/out")))
    assert (found.status, found.remedy) == ("fail", "check the credentials")


def test_everything_that_a_config_names_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("THAWLINE_WORK", "s3://team/work")
    config = make_config(tmp_path)
    checkpoint = config.finetune.checkpoint.model_copy(update={"folder": "s3://team/checkpoints"})
    config = config.model_copy(
        update={"finetune": config.finetune.model_copy(update={"checkpoint": checkpoint})}
    )
    names = [look.name for look in looks(config, written=["s3://team/out", "/out"])]
    assert names == [
        *("python", "packages", "torch", "engine", "gpu", "workdir", "finetune.checkpoint.folder"),
        *("THAWLINE_WORK", "--write s3://team/out", "--write /out", "events.path"),
        *("mlflow", "kubeflow", "cluster", "clock"),
    ]


# MLflow


@pytest.mark.parametrize(
    ("place", "method", "step"),
    [
        (MlflowClient, "create_run", "write"),
        (packing.Run, "log_metrics", "write"),
        (MlflowClient, "log_text", "log"),
        (MlflowClient, "log_model_artifacts", "log"),
        (MlflowClient, "create_registered_model", "register"),
        (MlflowClient, "set_registered_model_alias", "register"),
        (MlflowClient, "get_model_version_by_alias", "load"),
        (MlflowClient, "delete_registered_model", "delete"),
    ],
)
def test_a_server_that_refuses_a_step_has_it_named(sqlite_config, monkeypatch, place, method, step):
    def refuse(*_, **__):
        raise MlflowException(
            "API request failed with error code 403 != 200. Response body: 'Permission denied'",
            PERMISSION_DENIED,
        )

    with monkeypatch.context() as patch:
        patch.setattr(place, method, refuse)
        with pytest.raises(TrackingError, match=f"the step `{step}` failed: .*denied") as told:
            servers.mlflow(sqlite_config)
    assert "MLFLOW_TRACKING_USERNAME" in told.value.remedy
    for model in connect(sqlite_config).search_registered_models():
        assert step == "delete"
        connect(sqlite_config).delete_registered_model(model.name)
    assert_nothing_is_left(sqlite_config)


def test_a_store_that_gives_back_another_model_is_noticed(sqlite_config, monkeypatch):
    class Other:
        def predict(self, given):
            return given

    monkeypatch.setattr(round_trip.mlflow.pyfunc, "load_model", lambda _: Other())
    with pytest.raises(TrackingError, match=r"`load` failed: .* to \[1\.5, -2\.0\]"):
        servers.mlflow(sqlite_config)


def test_a_wrong_password_is_told_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "batteries")
    seen = []

    def refuse(path, headers):
        seen.append(headers["Authorization"])
        return 401, {}, "You are not authenticated: batteries"

    with answering(refuse) as uri:
        config = make_config(tmp_path, uri=uri.replace("://", "://me:wr0ng@"))
        found = take(Look("mlflow", lambda: servers.mlflow(config)))
    assert seen[0].startswith("Basic ")
    assert found.status == "fail"
    assert "the step `reach` failed" in found.detail
    assert "MLFLOW_TRACKING_PASSWORD" in found.remedy
    for secret in ("wr0ng", "batteries"):
        assert secret not in found.detail + found.remedy


# Kubeflow Pipelines and the clock


def test_kubeflow_is_asked_for_its_health_with_the_accounts_token(tmp_path):
    seen = []

    def well(path, headers):
        seen.append((path, headers["Authorization"], headers["Cookie"], headers["kubeflow-userid"]))
        return 200, {}, json.dumps({"tag_name": "2.17.0", "multi_user": True})

    (tmp_path / "token").write_text("from-file\n")
    with answering(well) as uri:
        assert servers.kubeflow({"KFP_ENDPOINT": f"{uri}/"}) == (
            f"{uri} is well: 2.17.0, several users"
        )
        servers.kubeflow(
            {
                "KFP_ENDPOINT": uri,
                "KFP_TOKEN_FILE": str(tmp_path / "token"),
                "KFP_COOKIES": "session=1",
                "KFP_HEADERS": "kubeflow-userid: me@x.org",
            }
        )
    path = "/apis/v2beta1/healthz"
    assert seen == [(path, None, None, None), (path, "Bearer from-file", "session=1", "me@x.org")]


@pytest.mark.parametrize(
    ("reply", "what", "remedy"),
    [
        ((302, {"Location": "/dex/auth"}, ""), r"who asks \(302\)", "KFP_TOKEN"),
        ((401, {}, "no"), r"who asks \(401\)", "KFP_TOKEN"),
        ((404, {}, "<html>"), "answers 404 and no health", "correct KFP_ENDPOINT"),
        ((200, {}, "<html>"), "answers 200 and no health", "correct KFP_ENDPOINT"),
    ],
)
def test_an_endpoint_that_is_not_well_is_told(reply, what, remedy):
    with answering(lambda *_: reply) as uri, pytest.raises(ClusterError, match=what) as told:
        servers.kubeflow({"KFP_ENDPOINT": uri})
    assert remedy in told.value.remedy


def test_an_endpoint_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(servers, "SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match="does not answer: timed out") as told:
            servers.kubeflow({"KFP_ENDPOINT": endpoint})
    assert "port-forward" in told.value.remedy


def test_an_endpoint_that_is_none_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no web address"):
        servers.kubeflow({"KFP_ENDPOINT": "ml-pipeline:8888"})
    gone = {"KFP_ENDPOINT": "http://localhost:1", "KFP_TOKEN_FILE": str(tmp_path / "gone")}
    with pytest.raises(ConfigError, match=r"token's file .* No such file"):
        servers.kubeflow(gone)
    with pytest.raises(Skipped, match="KFP_ENDPOINT is not set"):
        servers.kubeflow({})


@pytest.mark.parametrize(
    ("theirs", "what"), [(-3600, r"3,60\d s ahead of"), (90, r"(8\d|90) s behind"), (-20, None)]
)
def test_a_clock_more_than_a_minute_off_fails(tmp_path, theirs, what):
    def at(path, _):
        assert path == "/version"
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=theirs), usegmt=True)
        return 401, {"Date": date}, ""

    with answering(at) as uri:
        config = make_config(tmp_path, uri=uri.replace("://", "://me:secret@"))
        if what is None:
            assert servers.clock(config, {}).endswith("of that of MLflow")
            return
        with pytest.raises(ConfigError, match=f"{what} that of MLflow") as told:
            servers.clock(config, {})
    assert "NTP" in told.value.remedy


def test_a_clock_is_compared_with_kubeflows_where_mlflow_is_a_file(sqlite_config):
    now = format_datetime(datetime.now(UTC), usegmt=True)
    with answering(lambda *_: (200, {"Date": now}, "{}")) as uri:
        found = servers.clock(sqlite_config, {"KFP_ENDPOINT": uri})
    assert found.endswith("of that of Kubeflow Pipelines")
    with answering(lambda *_: (200, {}, "{}")) as uri, pytest.raises(Skipped, match="said no time"):
        servers.clock(sqlite_config, {"KFP_ENDPOINT": uri})
    with pytest.raises(Skipped, match="neither MLflow nor Kubeflow"):
        servers.clock(sqlite_config, {})


# What a profile names in a cluster


HELD = {
    "/version": {"major": "1", "minor": "34"},
    "secrets/mlflow": {"type": "Opaque", "data": {"username": "bWU=", "password": "aHVudGVyMg=="}},
    "secrets/registry": {"type": "kubernetes.io/dockerconfigjson", "data": {}},
    "configmaps/endpoints": {"data": {"mlflow-tracking-uri": "http://mlflow:5000"}},
    "persistentvolumeclaims/work": {
        "spec": {"accessModes": ["ReadWriteMany"]},
        "status": {"phase": "Bound"},
    },
    "persistentvolumeclaims/lost": {"spec": {}, "status": {"phase": "Lost"}},
}
"""Of the namespace team."""
REFUSED = ("secrets/others",)


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    """Makes the cluster at an address that of the current context."""

    def use(uri):
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": uri}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [
                {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
            ],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(tree))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))

    return use


def kubernetes(path, _):
    name = path.removeprefix("/api/v1/namespaces/team/")
    headers = {"Content-Type": "application/json"}
    if name in HELD:
        return 200, headers, json.dumps(HELD[name])
    status = 403 if name in REFUSED else 404
    return status, headers, json.dumps({"message": f"{name}: {status}"})


def test_each_name_of_a_profile_is_looked_for_and_no_value_shown(kubeconfig):
    named = Needs(
        secrets={"mlflow": ["username", "password"], "gone": ["a", "b"], "others": ["a"]},
        config_maps={"endpoints": ["mlflow-tracking-uri", "s3-region"]},
        image_pull_secrets=["registry", "mlflow"],
        claims=["work", "lost"],
    )
    with answering(kubernetes) as uri:
        kubeconfig(uri)
        found = {each.check: each for each in examine(cluster.looks(named, ""))}
    assert {name: each.status for name, each in found.items()} == {
        "cluster": "pass",
        "secret mlflow": "pass",
        "secret gone": "fail",
        "secret others": "skipped",
        "config map endpoints": "fail",
        "image pull secret registry": "pass",
        "image pull secret mlflow": "fail",
        "claim work": "pass",
        "claim lost": "fail",
    }
    assert found["cluster"].detail == f"{uri}, namespace team"
    assert found["secret mlflow"].detail == "there, with username, password"
    assert found["secret gone"].detail == "the namespace team has no secret gone"
    assert found["secret gone"].remedy == (
        "kubectl -n team create secret generic gone --from-literal=a=... --from-literal=b=..."
    )
    assert found["config map endpoints"].detail == "the config map endpoints has no key s3-region"
    assert found["claim work"].detail == "Bound, ReadWriteMany"
    everything = " ".join(each.detail + each.remedy for each in found.values())
    assert "hunter2" not in everything
    assert "aHVudGVyMg" not in everything


def test_another_namespace_is_looked_at_where_one_is_named(kubeconfig):
    seen = []

    def record(path, headers):
        seen.append(path)
        return kubernetes(path, headers)

    with answering(record) as uri:
        kubeconfig(uri)
        found = examine(cluster.looks(Needs(claims=["work"]), "runs"))
    assert seen == ["/version/", "/api/v1/namespaces/runs/persistentvolumeclaims/work"]
    assert found[1].detail == "the namespace runs has no persistent volume claim work"


def test_a_cluster_that_is_not_there_is_skipped_and_asked_for_once(kubeconfig, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        kubeconfig(f"http://127.0.0.1:{closed.getsockname()[1]}")
        found = examine(cluster.looks(needs("cpu"), ""))
    assert {each.status for each in found} == {"skipped"}
    assert "does not answer" in found[0].detail
    assert {each.detail for each in found[1:]} == {"there is no cluster to ask, see above"}
    (tmp_path / "kubeconfig").unlink()
    assert "no cluster is known here" in take(cluster.looks(Needs(), "")[0]).detail


def test_the_command_takes_the_names_from_the_profile(sqlite_config, quick, monkeypatch, tmp_path):
    nowhere = str(tmp_path / "no-kubeconfig")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    place = ("--json", "--set", f"workdir={sqlite_config.workdir}")
    told = json.loads(doctor(*place, "--profile", "cpu").stdout)
    names = [each["check"] for each in told["checks"] if each["status"] == "skipped"]
    assert [name for name in names if "thawline" in name] == [
        *("secret thawline-mlflow", "secret thawline-object-store"),
        *("config map thawline-endpoints", "claim thawline-work"),
    ]
    monkeypatch.setattr("thawline.cli.doctor.entry_points", lambda group: ())
    with pytest.raises(ConfigError, match="nothing that is installed knows profiles"):
        doctor(*place, "--profile", "cpu")


@pytest.mark.parametrize("profile", BUILT_IN)
def test_the_names_are_those_of_the_profile(profile):
    named = needs(profile)
    if profile == "local":
        assert named == Needs(secrets={}, config_maps={}, image_pull_secrets=[], claims=[])
        return
    assert named.secrets == {
        "thawline-mlflow": ["username", "password"],
        "thawline-object-store": ["access-key", "secret-key"],
    }
    assert list(named.config_maps) == ["thawline-endpoints"]
    assert named.claims == ["thawline-work"]
