"""Runs on Kubeflow from the command, against its API on loopback."""

import socket
from datetime import UTC, datetime

import pytest
import yaml
from fake_kfp import FakeKfp, serving

from pipelines import compile, run_logs, run_status
from pipelines.connection import Connection, connection
from pipelines.kfp_client import Kfp
from pipelines.package import compiled
from thawline import cli
from thawline.errors import ClusterError, ConfigError

TOKEN = "ey-secret-token-1"  # noqa: S105
COOKIES = "authservice_session=secret-cookie-2"
HEADER = "secret-header-3"
RUN = {
    "run_id": "r1",
    "display_name": "weekly",
    "state": "FAILED",
    "created_at": "2026-11-30T03:00:00Z",
    "finished_at": "2026-11-30T04:30:00Z",
    "error": {"message": "a task failed"},
}


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Compiling takes a third of a second, and no test changes a profile."""
    real, known = compile.compile_text, {}

    def remembered(profile):
        key = profile.model_dump_json()
        if key not in known:
            known[key] = real(profile)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "compile_text", remembered)
        yield


@pytest.fixture
def kfp():
    return FakeKfp()


@pytest.fixture
def endpoint(kfp, monkeypatch):
    for name in ("KFP_NAMESPACE", "KFP_TOKEN", "KFP_COOKIES", "KFP_HEADERS", "KFP_UI_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with serving(kfp) as address:
        monkeypatch.setenv("KFP_ENDPOINT", address)
        yield address


@pytest.fixture
def client(endpoint):
    return Kfp(Connection(endpoint))


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Runs the command as a shell would: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["thawline", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("simulate: {}\nseed: 7\n")
    return path


def uploads(kfp):
    return kfp.bodies("/pipelines/upload_version")


def test_a_run_gets_the_config_the_inputs_and_the_account(kfp, endpoint, invoke, config):
    code, out, _ = invoke(
        *("submit", "--config", config, "--profile", "gpu", "--name", "mine"),
        *("--input", "step3_finetune_epochs=3", "--input", "step0_start_from_champion=true"),
    )
    assert code == 0
    (body,) = kfp.bodies("/runs")
    assert body == {
        "display_name": "mine",
        "pipeline_version_reference": {
            "pipeline_id": next(iter(kfp.pipelines)),
            "pipeline_version_id": "v0",
        },
        "experiment_id": next(iter(kfp.experiments)),
        "runtime_config": {
            "parameters": {
                "config": "simulate: {}\nseed: 7\n",
                "step3_finetune_epochs": 3,
                "step0_start_from_champion": True,
            }
        },
        "service_account": "thawline-runner",
    }
    package = compiled("gpu")
    assert package.text in uploads(kfp)[0].replace("\r\n", "\n")
    (version,) = kfp.versions[body["pipeline_version_reference"]["pipeline_id"]]
    assert version["display_name"] == package.version
    assert package.version.startswith("gpu-")
    (run_id,) = kfp.runs
    assert f"{endpoint}/#/runs/details/{run_id}" in out


def test_an_unchanged_pipeline_is_uploaded_once(kfp, endpoint, invoke):
    for _ in range(2):
        assert invoke("submit")[0] == 0
    assert (len(kfp.runs), len(uploads(kfp)), len(kfp.pipelines), len(kfp.experiments)) == (
        *(2, 1, 1, 1),
    )
    kfp.versions[next(iter(kfp.pipelines))].insert(0, {"display_name": "cpu-other"})
    assert invoke("submit", "--profile", "gpu")[0] == 0
    assert len(uploads(kfp)) == 2


def test_without_the_cache_another_version_is_uploaded_that_caches_nothing(kfp, endpoint, invoke):
    assert invoke("submit", "--no-cache", "--service-account", "")[0] == 0
    assert "service_account" not in kfp.bodies("/runs")[0]
    assert "enableCache" in compiled("cpu").text
    uncached = compiled("cpu", cache=False)
    assert "enableCache" not in uncached.text
    with_, without = (
        list(yaml.safe_load_all(each)) for each in (compiled("cpu").text, uncached.text)
    )
    assert with_[1:] == without[1:]
    (version,) = kfp.versions[next(iter(kfp.pipelines))]
    assert version["display_name"] == uncached.version


def test_a_dry_run_says_everything_and_writes_nothing(kfp, endpoint, invoke, config):
    code, out, _ = invoke("submit", "--dry-run", "-c", config, "-i", "seed=4")
    assert (code, kfp.writes()) == (0, [])
    version = compiled("cpu").version
    for words in (
        "would create the pipeline thawline-retrain",
        f"would upload the version {version}",
        "would create the experiment thawline",
        "as thawline-runner",
        "config = 21 characters",
        "seed = 4",
    ):
        assert words in out
    assert invoke("submit")[0] == 0
    done = len(kfp.writes())
    _, out, _ = invoke("submit", "--dry-run")
    assert f"the version {version} is there already" in out
    assert "would create" not in out
    assert len(kfp.writes()) == done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "step3_finetune_epoch=3"], "did you mean step3_finetune_epochs?"),
        (["-i", "nothing=3"], "its inputs are config, seed, step0_start_from_champion"),
        (["-i", "seed=1.5"], "seed: '1.5' is not a whole number"),
        (["-i", "step4_gate_min_auc=nan"], "step4_gate_min_auc: 'nan' is not a number"),
        (["-i", "step0_start_from_champion=maybe"], "is not true or false"),
        (["-i", "seed"], "has no '='"),
        (["-i", "seed=1", "-i", "seed=2"], "comes twice"),
        (["-c", "absent.yaml"], "cannot read absent.yaml"),
        (["--pipeline", "absent.yaml"], "cannot read absent.yaml"),
        (["--pipeline", __file__], "is no compiled pipeline"),
        (["--profile", "absent"], "absent"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_any_call(
    arguments, message, kfp, endpoint, invoke
):
    code, _, error = invoke("submit", *arguments)
    assert code == 2
    assert message in " ".join(error.split())
    assert kfp.calls == []


def test_a_workflow_that_kubernetes_would_not_hold_is_refused(kfp, endpoint, invoke):
    assert invoke("submit", "-i", "step5_register_model_name=" + "x" * 100_000)[0] == 0
    with pytest.raises(Exception, match=r"1\.55 MiB[\s\S]*1\.5 MiB[\s\S]*smaller"):
        compiled("cpu").inputs({"config": "x" * 1_570_000}, "here")


def test_a_compiled_file_of_ones_own_is_submitted_with_its_required_inputs(
    kfp, endpoint, invoke, tmp_path
):
    path = tmp_path / "My study.yaml"
    declared = {
        "rounds": {"parameterType": "NUMBER_INTEGER"},
        "names": {"parameterType": "LIST", "isOptional": True},
        "rate": {"parameterType": "NUMBER_DOUBLE", "isOptional": True},
    }
    root = {"inputDefinitions": {"parameters": declared}, "dag": {"tasks": {}}}
    path.write_text(yaml.safe_dump({"pipelineInfo": {"name": "study"}, "root": root}))
    code, _, error = invoke("submit", "--pipeline", path)
    assert (code, kfp.calls) == (2, [])
    assert "'rounds' has no default" in error
    given = ("-i", "rounds=2", "-i", "names=[a, b]", "-i", "rate=1e-3")
    assert invoke("submit", "--pipeline", path, *given)[0] == 0
    (body,) = kfp.bodies("/runs")
    assert body["runtime_config"] == {
        "parameters": {"rounds": 2, "names": ["a", "b"], "rate": 0.001}
    }
    (version,) = kfp.versions[next(iter(kfp.pipelines))]
    assert version["display_name"].startswith("my-study-")


def test_with_users_everything_is_in_the_namespace_that_was_given(endpoint, invoke, kfp):
    kfp.multi_user = True
    code, _, error = invoke("submit")
    assert (code, kfp.writes()) == (2, [])
    assert "KFP_NAMESPACE or --namespace" in " ".join(error.split())
    assert invoke("submit", "--namespace", "team")[0] == 0
    assert kfp.bodies("/pipelines")[0]["namespace"] == "team"
    assert kfp.bodies("/experiments")[0]["namespace"] == "team"


def test_without_users_no_namespace_is_sent_since_the_api_refuses_it(endpoint, invoke, kfp):
    assert invoke("submit", "--namespace", "team")[0] == 0
    assert "namespace" not in kfp.bodies("/experiments")[0]
    assert not any("namespace" in query for query in kfp.queries)


def test_a_token_cookies_and_headers_are_sent_and_never_shown(
    kfp, endpoint, invoke, monkeypatch, tmp_path
):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("KFP_COOKIES", COOKIES)
    monkeypatch.setenv("KFP_HEADERS", f"X-Key: {HEADER}\nkubeflow-userid: a@b.example")
    code, out, error = invoke("submit", "--dry-run", "--token-file", file)
    assert code == 0
    sent = {name.lower(): value for name, value in kfp.headers[0].items()}
    assert sent["authorization"] == f"Bearer {TOKEN}"
    assert (sent["cookie"], sent["x-key"]) == (COOKIES, HEADER)
    assert sent["kubeflow-userid"] == "a@b.example"
    # An endpoint that echoes what it was sent.
    kfp.answer_with = (403, {"message": f"no rights: Bearer {TOKEN} {COOKIES} {HEADER}"})
    code, out_2, error_2 = invoke("submit", "--token-file", file)
    assert code == 2
    assert "no rights: Bearer *** *** ***" in " ".join(error_2.split())
    with serving(kfp) as address:
        shown = repr(connection(address, "team", file)) + out + error + out_2 + error_2
    assert not [each for each in (TOKEN, COOKIES, HEADER) if each in shown]


def test_a_token_that_kubernetes_replaces_is_read_again(client, endpoint, tmp_path, kfp):
    file = tmp_path / "token"
    file.write_text("first-token")
    kfp_client = Kfp(Connection(endpoint, token_file=file))
    for token in ("first-token", "second-token"):
        file.write_text(token)
        kfp_client.recurring_runs()
        assert kfp.headers[-1]["authorization"] == f"Bearer {token}"


def test_in_a_pod_the_address_and_the_token_are_kubeflows(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    monkeypatch.setattr("pipelines.connection.POD_TOKEN", token)
    found = connection(None, None, None, environment={})
    assert found.endpoint == "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
    assert found.token_file == token
    assert connection(None, None, None, {"KFP_TOKEN": "own-token"}).token_file is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no address of Kubeflow"),
        ({"endpoint": "kubeflow:80"}, "is no web address"),
        ({"KFP_TOKEN": f"{TOKEN}\nX: y"}, "KFP_TOKEN holds a line break"),
        ({"KFP_HEADERS": HEADER}, "line 1 of KFP_HEADERS is no header"),
        ({"KFP_TIMEOUT": "soon"}, "KFP_TIMEOUT is 'soon'"),
    ],
)
def test_a_connection_that_cannot_be_is_explained_without_secrets(variables, message):
    endpoint = variables.pop("endpoint", "http://x" if variables else None)
    with pytest.raises(ConfigError, match=message) as caught:
        connection(endpoint, None, None, variables)
    assert TOKEN not in str(caught.value)
    assert HEADER not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "a\nb"])
def test_a_token_file_without_a_token_is_named_before_any_call(content, tmp_path):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="token-file"):
        Kfp(Connection("http://127.0.0.1:9", token_file=file))


@pytest.mark.parametrize(
    ("answer", "message", "remedy"),
    [
        ((401, {"message": "who?"}), "answers 401: who?", "KFP_TOKEN"),
        ((302, ""), "answers 302", "KFP_COOKIES"),
        ((403, {"error": "team is not yours"}), "403: team is not yours", "--namespace"),
        ((404, "<html>"), "answers 404: Not Found", "endpoint"),
        ((413, "too much"), "answers 413", "make the config smaller"),
        ((400, {"message": "File size exceeds 32 MB"}), "File size", "make the config smaller"),
        ((400, {"message": "bad name"}), "400: bad name", "correct what the server names"),
        ((503, ""), "answers 503", "ml-pipeline"),
        ((200, "<html>login</html>"), "with a page", "/apis/v2beta1"),
    ],
)
def test_a_refusal_is_explained(answer, message, remedy, kfp, client):
    kfp.answer_with = answer
    with pytest.raises(ClusterError) as caught:
        client.pipeline("thawline-retrain")
    assert message in caught.value.what
    assert remedy in caught.value.remedy


def test_an_endpoint_that_does_not_answer_is_given_up_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = datetime.now(UTC)
        with pytest.raises(ClusterError, match="does not answer") as caught:
            Kfp(Connection(address, seconds=1)).run("r")
    assert caught.value.passing
    assert (datetime.now(UTC) - start).total_seconds() < 15
    with pytest.raises(ClusterError, match="does not answer"):
        Kfp(Connection(address)).run("r")


def test_certificates_that_cannot_be_read_are_named():
    with pytest.raises(ConfigError, match=r"absent\.pem[\s\S]*KFP_CA_FILE"):
        Kfp(Connection("https://127.0.0.1:9", ca_file="absent.pem"))


def task(name, state, start=None, end=None, **more):
    return {
        "display_name": name,
        "state": state,
        "start_time": start or "1970-01-01T00:00:00Z",
        "end_time": end or "1970-01-01T00:00:00Z",
        **more,
    }


@pytest.fixture
def failed(kfp):
    """A run as Kubeflow tells of it: with Argo's own nodes, and an end in 1970 for none yet."""
    kfp.runs["r1"] = RUN | {
        "run_details": {
            "task_details": [
                task("root", "FAILED", "2026-11-30T03:00:00Z", "2026-11-30T04:30:00Z"),
                task("finetune-driver", "SUCCEEDED", "2026-11-30T03:29:00Z"),
                task("later", "NEW_WORD"),
                task(
                    *("finetune", "FAILED", "2026-11-30T03:30:00Z", "2026-11-30T04:30:05Z"),
                    child_tasks=[{"pod_name": "wf-7"}, {"pod_name": "gone"}],
                ),
                task(
                    *("executor", "FAILED", "2026-11-30T03:30:00Z", "2026-11-30T04:30:05Z"),
                    pod_name="wf-7",
                    executor_detail={"failed_main_jobs": ["wf-8", "wf-9"]},
                    error={"message": "exit code 137"},
                ),
                task("executor(0)", "FAILED"),
                task("windows", "SUCCEEDED", "2026-11-30T03:00:10Z", "2026-11-30T03:00:15Z"),
            ]
        }
    }
    return kfp.runs["r1"]


def test_the_status_shows_each_task_its_retries_and_its_error(failed, invoke, endpoint):
    code, out, _ = invoke("status", "r1")
    assert code == 1
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:4] == [
        "run: weekly (r1)",
        "state: FAILED",
        "created: 2026-11-30 03:00:00 UTC, 1:30:00",
        "error: a task failed",
    ]
    assert lines[lines.index("task state retries took") + 1 :] == [
        "windows SUCCEEDED 0:00:05",
        "finetune FAILED 2 1:00:05",
        "later NEW_WORD",
        "finetune: exit code 137",
    ]
    assert f"{endpoint}/#/runs/details/r1" in out
    assert "tags.`thawline.pipeline_run_id` = 'r1'" in out


def test_the_run_that_kubeflow_made_in_mlflow_is_linked():
    entries = {"run_url": {"value": "https://mlflow.example/#/1"}, "run_id": {"value": "abc"}}
    run = {"run_id": "r", "plugins_output": {"mlflow": {"entries": entries}}}
    assert run_status.mlflow_links(run) == ["https://mlflow.example/#/1"]


@pytest.mark.parametrize(
    ("state", "code"),
    [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1), ("RUNNING", 3), (None, 3), ("PAUSING", 3)],
)
def test_the_exit_code_tells_a_script_how_a_run_stands(state, code, kfp, endpoint, invoke):
    kfp.runs = {"r0": {"run_id": "r0"}, "r1": {"run_id": "r1", "state": state}}
    found, out, _ = invoke("status", "--last")
    assert found == code
    assert f"state: {state or 'PENDING'}" in out
    assert "(r1)" in out


def test_without_a_run_the_newest_are_listed(kfp, endpoint, invoke):
    kfp.runs = {"r0": RUN | {"run_id": "r0"}, "r1": {"run_id": "r1", "state": "ODD"}}
    code, out, _ = invoke("status")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [["r1", "ODD"], ["r0", "FAILED"]]
    kfp.runs = {}
    assert "no run yet" in invoke("status", "--last")[2]
    assert "give one" in invoke("status", "--last", "r1")[2]
    assert "answers 404: Run r9 not found" in " ".join(invoke("status", "r9")[2].split())


def test_a_run_is_followed_to_its_end_over_an_endpoint_that_fails(kfp, client, capsys):
    one = {"run_id": "r1", "state": "RUNNING"}
    story = [
        {**one, "run_details": {"task_details": [task("windows", "RUNNING")]}},
        {**one, "run_details": {"task_details": [task("windows", "SUCCEEDED")]}},
        {**one, "state": "SUCCEEDED"},
    ]
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        kfp.answer_with = (503, "") if len(slept) == 1 else (200, story[min(len(slept) - 1, 2)])

    kfp.answer_with = (200, story[0])
    assert run_status.follow(client, "r1", pause=10, sleep=sleep)["state"] == "SUCCEEDED"
    assert capsys.readouterr().out.splitlines() == [
        "windows: RUNNING",
        "windows: SUCCEEDED",
        "run: SUCCEEDED",
    ]
    kfp.answer_with, slept[:] = (503, ""), []
    with pytest.raises(ClusterError, match="503"):
        run_status.patiently(lambda: client.run("r1"), 10, slept.append)
    assert sum(slept) == run_status.PATIENCE


def test_submit_waits_and_exits_as_the_run_ends(kfp, endpoint, invoke):
    kfp.state = "FAILED"
    code, out, _ = invoke("submit", "--wait")
    assert (code, out.splitlines()[-1]) == (1, "run: FAILED")


@pytest.fixture
def kubeconfig(endpoint, tmp_path, monkeypatch):
    """Lets the kubernetes client find the same server."""
    path = tmp_path / "kubeconfig"
    named = [("clusters", "cluster", {"server": endpoint}), ("users", "user", {})]
    context = ("contexts", "context", {"cluster": "here", "user": "here"})
    tree = {key: [{"name": "here", one: value}] for key, one, value in (*named, context)}
    path.write_text(yaml.safe_dump(tree | {"current-context": "here"}))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.setattr(run_logs, "PAUSE", 0.0)


def stamped(*lines, start=0):
    return "".join(
        f"2026-01-01T00:00:00.{number:09d}Z {line}\n" for number, line in enumerate(lines, start)
    )


def test_the_logs_of_each_try_come_in_order(kfp, kubeconfig, invoke):
    kfp.runs["r1"] = RUN
    kfp.add_pod("r1", "windows-driver", text="the driver's")
    kfp.add_pod("r1", "stages.windows.executor", text=stamped("cut 5 files"))
    kfp.add_pod("r2", "stages.windows.executor", text=stamped("another run's"))
    kfp.add_pod("r1", "stages.finetune.executor(0)", phase="Failed", text=stamped("killed [9]"))
    kfp.add_pod("r1", "stages.finetune.executor(1)", text=stamped("epoch 1", "epoch 2"))
    kfp.add_pod("r1", "stages.evaluate.executor(0)", phase="Pending")
    code, out, error = invoke("logs", "r1")
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        "--- windows (wf-1)",
        "cut 5 files",
        "--- finetune (wf-3)",
        "killed [9]",
        "--- finetune, try 2 (wf-4)",
        "epoch 1",
        "epoch 2",
    ]
    assert kfp.calls[-1][1].startswith("/api/v1/namespaces/kubeflow/pods/")
    _, out, _ = invoke("logs", "r1", "--task", "windows")
    assert out.splitlines() == ["--- windows (wf-1)", "cut 5 files"]
    _, _, error = invoke("logs", "r1", "--task", "evaluate")
    assert "tasks with a pod: windows, finetune, evaluate" in " ".join(error.split())
    _, _, error = invoke("logs", "r7")
    assert "holds no pod of the run r7" in " ".join(error.split())


def test_a_log_that_is_followed_goes_on_where_its_stream_was_cut(
    kfp, kubeconfig, invoke, monkeypatch
):
    kfp.runs["r1"] = RUN | {"state": "RUNNING"}
    both = stamped("epoch 1", "epoch 2")
    pod = kfp.add_pod("r1", "finetune.executor", phase="Running", text=[stamped("epoch 1"), both])
    over = run_logs._over

    def ends(*arguments):
        was = over(*arguments)
        kfp.pods[0]["status"]["phase"] = "Succeeded"
        kfp.runs["r1"] = RUN
        return was

    monkeypatch.setattr(run_logs, "_over", ends)
    code, out, _ = invoke("logs", "r1", "--follow")
    assert code == 0
    assert out.splitlines() == [f"--- finetune ({pod})", "epoch 1", "epoch 2"]


def test_without_a_cluster_kubectls_command_is_said(endpoint, invoke, monkeypatch, tmp_path):
    nowhere = str(tmp_path / "none")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    code, _, error = invoke("logs", "r1", "--namespace", "team")
    assert code == 2
    assert "kubectl -n team logs -l pipeline/runid=r1 -c main" in " ".join(error.split())


def test_a_cluster_that_refuses_is_explained(kfp, kubeconfig, invoke, client):
    core = run_logs._core("r1", "team")
    kfp.answer_with = (403, {"message": "pods is forbidden"})
    with pytest.raises(ClusterError, match=r"pods is forbidden[\s\S]*pods/log"):
        run_logs._pods(core, "r1", "team")
