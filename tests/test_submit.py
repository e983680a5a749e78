"""Runs on Kubeflow from the command, against its API on loopback."""

import socket
import sys
from datetime import UTC, datetime

import pytest
import yaml
from fake_kfp import MODELS, serving, unknown

from pipelines import compile
from pipelines.connection import Connection, connection
from pipelines.kfp_client import Kfp
from pipelines.package import package
from thawline.errors import ClusterError, ConfigError

pytest_plugins = ["kfp_fixtures"]

TOKEN = "ey-secret-token-1"  # noqa: S105
COOKIES = "authservice_session=secret-cookie-2"
HEADER = "secret-header-3"


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Compiling takes a third of a second, and no test changes a profile."""
    real, known = compile.compile_text, {}

    def remembered(profile, *pipeline):
        key = (profile.model_dump_json(), *pipeline)
        if key not in known:
            known[key] = real(profile, *pipeline)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "compile_text", remembered)
        yield


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
    gpu = package("retrain", "gpu")
    assert gpu.text in uploads(kfp)[0].replace("\r\n", "\n")
    (version,) = kfp.versions[body["pipeline_version_reference"]["pipeline_id"]]
    assert version["display_name"] == gpu.version
    assert gpu.version.startswith("gpu-")
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


def test_another_pipeline_is_submitted_by_name(kfp, endpoint, invoke):
    assert invoke("submit", "--pipeline", "study", "--input", "step3_study_seeds=0,1")[0] == 0
    (pipeline,) = kfp.pipelines.values()
    assert pipeline["name"] == "thawline-study"
    (body,) = kfp.bodies("/runs")
    assert body["runtime_config"] == {"parameters": {"step3_study_seeds": "0,1"}}


def test_without_the_cache_another_version_is_uploaded_that_caches_nothing(kfp, endpoint, invoke):
    assert invoke("submit", "--no-cache", "--service-account", "")[0] == 0
    assert "service_account" not in kfp.bodies("/runs")[0]
    assert "enableCache" in package("retrain", "cpu").text
    uncached = package("retrain", "cpu", cache=False)
    assert "enableCache" not in uncached.text
    with_, without = (
        list(yaml.safe_load_all(each)) for each in (package("retrain", "cpu").text, uncached.text)
    )
    assert with_[1:] == without[1:]
    (version,) = kfp.versions[next(iter(kfp.pipelines))]
    assert version["display_name"] == uncached.version


def test_a_dry_run_says_everything_and_writes_nothing(kfp, endpoint, invoke, config):
    code, out, _ = invoke("submit", "--dry-run", "-c", config, "-i", "seed=4")
    assert (code, kfp.writes()) == (0, [])
    version = package("retrain", "cpu").version
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
        (["--pipeline", "absent.yaml"], "name one of retrain, study, or a compiled file"),
        (["--pipeline", __file__, "--image", "x:1"], "compile it with that image"),
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
        package("retrain", "cpu").inputs({"config": "x" * 1_570_000}, "here")


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


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("pipelines.compile", ["submit"]),
        ("pipelines.kfp_client", ["status"]),
        ("kubernetes", ["logs", "r1"]),
    ],
)
def test_without_kubeflows_packages_the_extra_is_named(
    missing, arguments, endpoint, invoke, monkeypatch
):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, error = invoke(*arguments)
    assert code == 2
    assert "pip install 'thawline[kubeflow]'" in error


def test_the_fake_refuses_what_kubeflows_models_do_not_know():
    body = {"display_name": "a", "mod": 1, "trigger": {"cron_schedule": {"crom": ""}, "cron": ""}}
    assert unknown(body, MODELS["recurringruns"]) == [
        "mod",
        "trigger.cron",
        "trigger.cron_schedule.crom",
    ]


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
        ((409, {"error_message": "Already exists"}), "409: Already exists", "do it again"),
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


def test_submit_waits_and_exits_as_the_run_ends(kfp, endpoint, invoke):
    kfp.state = "FAILED"
    code, out, _ = invoke("submit", "--wait")
    assert (code, out.splitlines()[-1]) == (1, "run: FAILED")
