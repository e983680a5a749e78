"""Fine-tuning by a TrainJob: the manifest, and the task that submits it and waits for it."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import boto3
import pytest
import torch
import yaml
from conftest import TINY_FEED
from fake_kubernetes import FakeKubernetes, condition, ended, known, serving
from kubernetes import client
from moto.server import ThreadedMotoServer

from thawline.config import Config
from thawline.errors import ClusterError, ConfigError, DataError, TrainingError
from thawline.model.bundle import Bundle, save_table
from thawline.stages.trainjob import node, rank, shared, stage
from thawline.stages.trainjob.cluster import Cluster
from thawline.stages.trainjob.job import Patience, expired, run_job
from thawline.stages.trainjob.manifest import manifest
from thawline.stages.trainjob.settings import TrainJobSettings
from thawline.tracking.runs import Terminated

pytest_plugins = ["mlflow_fixtures"]

SETTINGS = TrainJobSettings.model_validate(
    {
        "nodes": 2,
        "image": "registry.example/thawline:0.1.0-gpu",
        "cpu": "32",
        "memory": "128Gi",
        "memory_limit": "256Gi",
        "accelerator": {"count": 8},
        "node_selector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        "shared_memory": "32Gi",
        "timeout_seconds": 7200,
        "image_pull_secrets": ["registry"],
        "env": {"NCCL_DEBUG": "WARN"},
        "config_maps": {"endpoints": {"mlflow": "MLFLOW_TRACKING_URI"}},
        "secrets": {"mlflow": {"password": "MLFLOW_TRACKING_PASSWORD"}},
        "work": {"folder": "/work", "claim": "thawline-work"},
    }
)
FAST = Patience(poll=0.01, outage=0.2, deletion=0.1)
JOB = "thawline-1"


@pytest.fixture
def body():
    return manifest(JOB, SETTINGS, '{"config": "simulate: {}"}')


@pytest.fixture
def kubernetes():
    fake = FakeKubernetes()
    with serving(fake) as uri:
        fake.uri = uri
        yield fake


@pytest.fixture
def cluster(kubernetes):
    api = client.ApiClient(client.Configuration(host=kubernetes.uri))
    return Cluster(api, "team")


def ending(fake, kind, **facts):
    """Jobs end as soon as they are there, with a pod that wrote two lines."""

    def end(body):
        name = body["metadata"]["name"]
        fake.write(fake.add_pod(name), "epoch 1 of 2", "epoch 2 of 2")
        fake.end(name, kind, **facts)

    fake.on_create = end


# The manifest.


def test_kubeflows_own_model_keeps_every_key_of_the_manifest(body):
    assert known(body) == body
    body["spec"]["trainer"]["numNode"] = 2
    assert known(body) != body


def test_the_manifest_asks_for_what_the_profile_says(body):
    spec = body["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert spec["activeDeadlineSeconds"] == 7200
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "8"},
        "limits": {"memory": "256Gi", "nvidia.com/gpu": "8"},
    }
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
        {"name": "work", "persistentVolumeClaim": {"claimName": "thawline-work"}},
    ]
    mounts = [(each["name"], each["mountPath"]) for each in pod["containers"][0]["volumeMounts"]]
    assert mounts == [("shm", "/dev/shm"), ("work", "/work")]  # noqa: S108


def test_config_maps_and_secrets_are_named_and_their_values_are_not_there(body):
    variables = {each["name"]: each for each in body["spec"]["trainer"]["env"]}
    assert variables["MLFLOW_TRACKING_PASSWORD"]["valueFrom"] == {
        "secretKeyRef": {"name": "mlflow", "key": "password"}
    }
    assert variables["MLFLOW_TRACKING_URI"]["valueFrom"] == {
        "configMapKeyRef": {"name": "endpoints", "key": "mlflow"}
    }
    assert [name for name, each in variables.items() if "value" in each] == [
        "THAWLINE_TRAINJOB",
        "NCCL_DEBUG",
    ]


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        ({}, 8),
        ({"processes_per_node": 4}, 4),
        ({"accelerator": None}, 1),
    ],
)
def test_a_node_has_a_process_a_gpu_unless_told_otherwise(changes, processes):
    assert SETTINGS.model_copy(update=changes).processes == processes


# The job.


def test_a_job_is_submitted_and_its_log_shown_until_it_succeeds(kubernetes, cluster, body):
    ending(kubernetes, "Complete")
    shown = []
    run_job(cluster, body, shown.append, FAST)
    assert shown == [f"{JOB}: submitted to 2 nodes", "epoch 1 of 2", "epoch 2 of 2"]
    assert list(kubernetes.jobs) == [JOB]


def test_each_line_of_the_log_is_shown_once_though_the_connection_breaks(kubernetes, cluster, body):
    def start(body):
        pod = kubernetes.add_pod(JOB)
        kubernetes.write(pod, "one")

        def go_on():
            # The server ends each answer, as a broken connection does.
            wait_for(lambda: "one" in shown)
            kubernetes.write(pod, "two", "three")
            wait_for(lambda: "three" in shown)
            kubernetes.write(pod, "four")
            kubernetes.end(JOB, "Complete")

        threading.Thread(target=go_on, daemon=True).start()

    kubernetes.on_create = start
    shown = []
    run_job(cluster, body, shown.append, FAST)
    assert shown[1:] == ["one", "two", "three", "four"]


def wait_for(happened):
    pause = threading.Event()
    for _ in range(1_000):
        if happened():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")


def test_a_field_that_the_cluster_does_not_know_is_refused(kubernetes, cluster, body):
    body["spec"]["trainer"]["numNode"] = 2
    with pytest.raises(ClusterError, match=r"unknown field[\s\S]*2\.3 or newer"):
        run_job(cluster, body, print, FAST)


def test_a_job_that_failed_gives_the_error_of_its_processes(kubernetes, cluster, body):
    ending(kubernetes, "Failed", reason="JobsFailed", message="jobset failed")
    create = kubernetes.on_create

    def fail(body):
        create(body)
        (pod,) = kubernetes.pods
        kubernetes.write(
            pod,
            "Traceback (most recent call last):",
            "thawline.errors.ConfigError: runtime.device is cuda, but torch sees no GPU",
            "  What to do: install the gpu extra and check the driver",
            "E1130 torch.distributed.elastic: failed (exitcode: 1)",
        )
        kubernetes.add_pod(JOB, state=ended(1), phase="Failed")

    kubernetes.on_create = fail
    with pytest.raises(TrainingError) as caught:
        run_job(cluster, body, print, FAST)
    assert "failed: runtime.device is cuda, but torch sees no GPU" in caught.value.what
    assert caught.value.remedy == "install the gpu extra and check the driver"


def test_a_job_that_failed_without_a_word_gives_exit_codes_and_last_lines(
    kubernetes, cluster, body
):
    def fail(body):
        kubernetes.add_pod(JOB)
        pod = kubernetes.add_pod(JOB, index=1, state=ended(11), phase="Failed")
        kubernetes.write(pod, *(f"line {count}" for count in range(50)))
        kubernetes.end(JOB, "Failed", reason="JobsFailed", message="jobset failed")

    kubernetes.on_create = fail
    with pytest.raises(TrainingError) as caught:
        run_job(cluster, body, print, FAST)
    assert f"JobsFailed: jobset failed); exit codes: {JOB}-node-0-1-x 11" in caught.value.what
    assert "line 49" in caught.value.what
    assert "line 29" not in caught.value.what
    assert f"kubectl -n team logs -l jobset.sigs.k8s.io/jobset-name={JOB}" in caught.value.remedy


def test_a_job_that_took_too_long_names_the_key(kubernetes, cluster, body):
    ending(kubernetes, "Failed", reason="DeadlineExceeded", message="7200 s are over")
    with pytest.raises(TrainingError, match=r"7200 s are over[\s\S]*trainjob.timeout_seconds"):
        run_job(cluster, body, print, FAST)


@pytest.mark.parametrize(
    "end",
    [
        {"state": ended(143)},
        {"state": ended(137)},
        {"reason": "Evicted"},
        {
            "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            ]
        },
    ],
    ids=["SIGTERM", "SIGKILL", "evicted", "preempted"],
)
def test_a_node_that_the_cluster_took_away_ends_the_task_with_143_to_be_tried_again(
    kubernetes, cluster, body, end
):
    def fail(body):
        kubernetes.add_pod(JOB, state=ended(1), phase="Failed")
        kubernetes.add_pod(JOB, index=1, phase="Failed", **end)
        kubernetes.end(JOB, "Failed")

    kubernetes.on_create = fail
    with pytest.raises(Terminated) as caught:
        run_job(cluster, body, print, FAST)
    assert caught.value.code == 143


def test_a_job_that_an_earlier_try_submitted_is_taken_over(kubernetes, cluster, body):
    kubernetes.jobs[JOB] = body
    threading.Timer(0.05, kubernetes.end, (JOB, "Complete")).start()
    shown = []
    run_job(cluster, body, shown.append, FAST)
    assert shown == [f"{JOB}: the TrainJob of an earlier try is taken over"]
    assert ("POST", "") not in kubernetes.calls


def test_a_job_that_failed_in_an_earlier_try_starts_again(kubernetes, cluster, body):
    kubernetes.jobs[JOB] = {**body, "status": {"conditions": [condition("Failed")]}}
    ending(kubernetes, "Complete")
    shown = []
    run_job(cluster, body, shown.append, FAST)
    assert shown[0] == f"{JOB}: the TrainJob of an earlier try failed; it starts again"
    methods = [method for method, _ in kubernetes.calls]
    assert methods.index("DELETE") < methods.index("POST")


def test_a_failed_job_that_does_not_go_away_is_an_error(kubernetes, cluster, body):
    failed = {**body, "status": {"conditions": [condition("Failed")]}}
    kubernetes.jobs[JOB] = failed
    kubernetes.on_delete = lambda name: kubernetes.jobs.update({name: failed})
    with pytest.raises(ClusterError, match="still there"):
        run_job(cluster, body, print, FAST)


def test_sigterm_deletes_the_job_and_ends_the_task_with_143(kubernetes, cluster, body):
    kubernetes.on_create = lambda body: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Terminated) as caught:
        run_job(cluster, body, print, FAST)
    assert caught.value.code == 143
    assert kubernetes.jobs == {}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_api_that_does_not_answer_for_a_while_is_waited_for(kubernetes, cluster, body):
    def start(body):
        kubernetes.refusals += [(503, "leader election"), (500, "etcd")]
        threading.Timer(0.1, kubernetes.end, (JOB, "Complete")).start()

    kubernetes.on_create = start
    run_job(cluster, body, print, FAST)
    assert kubernetes.refusals == []


def test_an_api_that_never_answers_again_is_an_error(kubernetes, cluster, body):
    kubernetes.on_create = lambda body: kubernetes.refusals.extend([(503, "down")] * 10_000)
    with pytest.raises(ClusterError, match="503: down"):
        run_job(cluster, body, print, FAST)


def test_a_server_that_is_not_there_is_an_error_with_a_remedy(body):
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = 0
    with pytest.raises(ClusterError, match="does not answer") as caught:
        run_job(Cluster(client.ApiClient(configuration), "team"), body, print, FAST)
    assert caught.value.passing


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(403, "service account create, get, list and delete trainjobs"), (401, "no valid token")],
)
def test_missing_rights_are_named(kubernetes, cluster, body, status, remedy):
    kubernetes.refusals = [(status, "no")]
    with pytest.raises(ClusterError, match=remedy):
        run_job(cluster, body, print, FAST)


def test_a_cluster_without_kubeflow_trainer_is_told_to_install_it(kubernetes, cluster, body):
    kubernetes.refusals = [(404, "not found"), (404, "the server could not find the resource")]
    with pytest.raises(ClusterError, match="install Kubeflow Trainer"):
        run_job(cluster, body, print, FAST)


def test_a_job_that_somebody_deleted_is_an_error(kubernetes, cluster, body):
    kubernetes.on_create = lambda body: kubernetes.jobs.clear()
    with pytest.raises(ClusterError, match="somebody deleted it"):
        run_job(cluster, body, print, FAST)


@pytest.mark.parametrize(
    ("keep", "hours", "gone"),
    [("86400", 23, False), ("86400", 25, True), ("0", 0.5, False), ("0", 1.5, True)],
)
def test_a_job_is_kept_as_long_as_it_says_and_an_hour_in_any_case(keep, hours, gone):
    now = datetime(2026, 1, 2, tzinfo=UTC)
    ended_at = condition("Complete", at=now - timedelta(hours=hours))
    job = {
        "metadata": {"annotations": {"thawline.io/keep-seconds": keep}},
        "status": {"conditions": [ended_at]},
    }
    assert expired(job, now) is gone
    assert not expired({"metadata": job["metadata"]}, now)


# The stage.


@pytest.fixture
def kubeconfig(kubernetes, tmp_path, monkeypatch):
    """The fake cluster is that of the current context."""
    path = tmp_path / "kubeconfig"
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": kubernetes.uri}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [
            {"name": "c", "context": {"cluster": "fake", "user": "me", "namespace": "team"}}
        ],
        "current-context": "c",
    }
    path.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


def settings_text(work, **changes):
    return SETTINGS.model_copy(
        update={"work": SETTINGS.work.model_copy(update={"folder": str(work)}), **changes}
    ).model_dump_json(exclude_defaults=True)


@pytest.fixture
def table(tiny_dataset, tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    rows = torch.randn(tiny_dataset.catalog.num_rows, 8, generator=torch.Generator().manual_seed(0))
    save_table(folder / "item.safetensors", rows)
    return folder


def tiny(workdir):
    return Config.model_validate(
        {
            **TINY_FEED,
            "workdir": str(workdir),
            "model": {"dim": 8, "ffn": 16, "mlp": [16], "context_dim": 4, "layers": 1},
            "finetune": {"epochs": 1, "batch_size": 64},
            "evaluation": {"epoch_requests": 20},
        }
    )


def write_model(fake):
    """A job that leaves a model at once, as the nodes would."""

    def train(body):
        work = json.loads(body["spec"]["trainer"]["env"][0]["value"])
        assert os.path.exists(f"{work['dataset']}/manifest.json")
        assert os.path.exists(f"{work['table']}/item.safetensors")
        os.makedirs(work["model"])
        with open(f"{work['model']}/epochs.json", "w") as file:
            json.dump([{"epoch": 0}], file)
        fake.end(body["metadata"]["name"], "Complete")

    fake.on_create = train


def test_the_stage_shares_the_inputs_and_brings_the_model_back(
    kubernetes, kubeconfig, tiny_dataset, table, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_RUN_ID", "injected")
    write_model(kubernetes)
    work = tmp_path / "work"
    arguments = (tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", settings_text(work))
    epochs = stage.run_on_nodes(*arguments, parent_run_id="parent", poll_seconds=0.01)
    assert epochs == [{"epoch": 0}]
    assert (tmp_path / "model" / "epochs.json").exists()
    assert list((work / "trainjobs").iterdir()) == []
    (job,) = kubernetes.jobs.values()
    variables = {each["name"]: each.get("value") for each in job["spec"]["trainer"]["env"]}
    assert variables["MLFLOW_RUN_ID"] == "injected"
    assert json.loads(variables["THAWLINE_TRAINJOB"])["parent_run_id"] == "parent"


def test_the_next_try_has_the_same_job_and_another_run_has_another(tiny_dataset, tmp_path):
    config, text = tiny(tmp_path), settings_text(tmp_path)
    names = {stage.job_name(config, tiny_dataset.root, text, run) for run in ("one", "one", "two")}
    assert len(names) == 2
    assert all(len(name) < 40 for name in names)


def test_a_job_that_is_not_to_be_kept_is_deleted_and_so_are_old_ones(
    kubernetes, kubeconfig, tiny_dataset, table, tmp_path
):
    write_model(kubernetes)
    work = tmp_path / "work"
    old = manifest("thawline-old", SETTINGS, "{}")
    at = datetime.now(UTC) - timedelta(days=2)
    kubernetes.jobs["thawline-old"] = {
        **old,
        "status": {"conditions": [condition("Failed", at=at)]},
    }
    (work / "trainjobs" / "thawline-old").mkdir(parents=True)
    text = settings_text(work, keep_seconds=0)
    stage.run_on_nodes(
        tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", text, poll_seconds=0.01
    )
    assert kubernetes.jobs == {}
    assert list((work / "trainjobs").iterdir()) == []


def test_old_jobs_that_cannot_be_listed_stop_nothing(
    kubernetes, kubeconfig, tiny_dataset, table, tmp_path, capsys
):
    write_model(kubernetes)
    kubernetes.refusals = [(403, "may not list")]
    text = settings_text(tmp_path / "work")
    stage.run_on_nodes(
        tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", text, poll_seconds=0.01
    )
    assert (
        "old TrainJobs stay: listing TrainJobs: the cluster answers 403" in capsys.readouterr().out
    )


def test_without_a_cluster_the_error_says_what_to_set(tiny_dataset, table, tmp_path, monkeypatch):
    nowhere = str(tmp_path / "no-kubeconfig")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    with pytest.raises(ClusterError, match=r"no Kubernetes cluster[\s\S]*KUBECONFIG"):
        stage.run_on_nodes(
            tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", settings_text(tmp_path)
        )


def test_settings_of_another_version_are_refused(tiny_dataset, table, tmp_path):
    with pytest.raises(ConfigError, match=r"trainjob[\s\S]*compile the pipeline anew"):
        stage.run_on_nodes(
            tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", '{"nodes": 2}'
        )


def test_without_the_client_of_kubernetes_the_error_names_the_extra(
    tiny_dataset, table, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "thawline.stages.trainjob.cluster", None)
    with pytest.raises(ConfigError, match=r"pip install 'thawline\[kubeflow\]'"):
        stage.run_on_nodes(
            tiny(tmp_path), tiny_dataset.root, table, tmp_path / "model", settings_text(tmp_path)
        )


def test_a_folder_is_shared_once_and_removed(tmp_path):
    source, place = tmp_path / "source", tmp_path / "a" / "b"
    source.mkdir()
    (source / "one").write_text("1")
    shared.put(source, str(place))
    (source / "one").write_text("2")
    shared.put(source, str(place))
    assert (shared.fetch(str(place), tmp_path) / "one").read_text() == "1"
    shared.remove(str(place))
    assert not place.exists()
    shared.remove(str(place))


def test_a_node_brings_what_lies_at_urls_and_publishes_the_model(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(node, "fetch", lambda place, folder: fetched.append(place) or folder / "x")
    work = node.NodeWork("c", "s3://b/dataset", "s3://b/table", "s3://b/model", "parent")
    local = node.localised(work, tmp_path)
    assert fetched == ["s3://b/dataset", "s3://b/table"]
    assert (local.model, local.publish) == (str(tmp_path / "model"), "s3://b/model")


@pytest.mark.parametrize(("number", "published"), [("0", ["s3://b/model"]), ("1", [])])
def test_only_the_first_process_publishes_the_model(number, published, tmp_path, monkeypatch):
    sent, trained = [], []
    monkeypatch.setattr(rank.finetune, "run", lambda *inputs, **parent: trained.append(parent))
    monkeypatch.setattr(rank, "publish_folder", lambda folder, url: sent.append(url))
    work = node.NodeWork(
        "simulate: {}", "dataset", "table", str(tmp_path), "parent", "s3://b/model"
    )
    monkeypatch.setenv("THAWLINE_TRAINJOB", work.to_json())
    monkeypatch.setenv("RANK", number)
    rank.main()
    assert (sent, trained) == (published, [{"parent_run_id": "parent"}])


def test_in_a_pod_the_job_goes_to_the_namespace_of_the_pod(tmp_path, monkeypatch):
    namespace = tmp_path / "namespace"
    namespace.write_text("team\n")
    monkeypatch.setattr("thawline.stages.trainjob.cluster.NAMESPACE", namespace)
    monkeypatch.setattr("kubernetes.config.load_incluster_config", lambda: None)
    assert Cluster.connect().namespace == "team"


def test_a_folder_is_shared_through_an_object_store(tmp_path, monkeypatch):
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto.get_host_and_port()[1]}")
        boto3.client("s3").create_bucket(Bucket="work")
        source = tmp_path / "source"
        source.mkdir()
        (source / "manifest.json").write_text("{}")
        shared.put(source, "s3://work/trainjobs/one/dataset")
        found = shared.fetch("s3://work/trainjobs/one/dataset", tmp_path / "cache")
        assert (found / "manifest.json").read_text() == "{}"
        shared.remove("s3://work/trainjobs/one")
        with pytest.raises(DataError, match="holds nothing"):
            shared.fetch("s3://work/trainjobs/one/dataset", tmp_path / "again")
    finally:
        moto.stop()


class Node:
    """Runs what the job says, as one node of one process."""

    def __init__(self, fake):
        self.fake = fake

    def __call__(self, body):
        self.name = body["metadata"]["name"]
        threading.Thread(target=self.run, args=(body["spec"]["trainer"],), daemon=True).start()

    def run(self, trainer):
        pod = self.fake.add_pod(self.name)
        settings = {each["name"]: each["value"] for each in trainer["env"] if "value" in each}
        environment = {
            **{key: value for key, value in os.environ.items() if key != "HOME"},
            "OMP_NUM_THREADS": "1",
            "PET_NPROC_PER_NODE": "1",
            "PET_NNODES": "1",
            "PET_STANDALONE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, *trainer["command"][1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | settings,
            start_new_session=True,
        )
        for line in self.process.stdout:
            self.fake.write(pod, line.rstrip("\n"))
        self.fake.add_pod(self.name, state=ended(self.process.wait()), phase="Succeeded")
        self.fake.end(self.name, "Failed" if self.process.returncode else "Complete")


@pytest.fixture
def node_that_runs(kubernetes):
    kubernetes.on_create = started = Node(kubernetes)
    yield
    with suppress(ProcessLookupError, AttributeError):
        os.killpg(started.process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_processes_of_a_job_train_the_model_that_the_task_gives_back(
    node_that_runs, kubeconfig, tiny_dataset, table, tmp_path, sqlite_config, capsys
):
    text = settings_text(tmp_path / "work", accelerator=None, env={}, config_maps={}, secrets={})
    epochs = stage.run_on_nodes(
        tiny(sqlite_config.workdir),
        tiny_dataset.root,
        table,
        tmp_path / "model",
        text,
        poll_seconds=0.2,
    )
    assert [epoch["epoch"] for epoch in epochs] == [0]
    model = Bundle.load(tmp_path / "model")
    assert model.weights["item"].shape == (tiny_dataset.catalog.num_rows, 8)
    assert all(torch.isfinite(rows).all() for rows in model.weights.values())
    assert "submitted to 2 nodes" in capsys.readouterr().out
