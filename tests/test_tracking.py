import http.server
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from mlflow_helpers import free_port, make_config

from thawline.errors import TrackingError
from thawline.tracking import pipeline, runs
from thawline.tracking.server import check_names, connect, masked

pytest_plugins = ["mlflow_fixtures"]
pytestmark = pytest.mark.usefixtures("no_mlflow_environment")


def status_of(config, run_id):
    return connect(config).get_run(run_id).info.status


def all_runs(config):
    client = connect(config)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments))


# Where


def test_the_configs_uri_wins_over_the_environments_and_sqlite_is_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing_set = make_config("out")
    assert runs.tracking_uri(nothing_set) == f"sqlite:///{tmp_path}/out/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment:5000")
    assert runs.tracking_uri(nothing_set) == "http://environment:5000"
    assert runs.tracking_uri(make_config("out", uri="http://config:1")) == "http://config:1"


def test_artifacts_lie_beside_the_database_and_the_working_directory_stays_clean(
    sqlite_config, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "report.html").write_text("report")
    with runs.stage_run(sqlite_config, "evaluate") as run:
        run.log_artifact(tmp_path / "report.html", "reports")
    stored = tmp_path / "work" / "mlartifacts" / run.run_id / "artifacts" / "reports"
    assert (stored / "report.html").read_text() == "report"
    assert list(elsewhere.iterdir()) == []


# check


def test_check_passes_on_a_fresh_folder_and_makes_no_run(sqlite_config):
    runs.check(sqlite_config)
    assert all_runs(sqlite_config) == []


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("my model", "my-model"),
        ("team/ranker", "team-ranker"),
        ("ranker:v2", "ranker-v2"),
        ("", "thawline-ranker"),
        ("   ", "thawline-ranker"),
        (".", "thawline-ranker"),
        ("ranker@champion", "ranker-champion"),
        ("it's", "it-s"),
    ],
)
def test_a_model_name_that_no_uri_can_hold_is_refused_with_one_that_works(
    tmp_path, name, suggestion
):
    with pytest.raises(TrackingError, match=r"tracking\.model_name") as caught:
        runs.check(make_config(tmp_path, model_name=name))
    assert caught.value.remedy == f"set tracking.model_name={suggestion}"
    check_names(make_config(tmp_path, model_name=suggestion))


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v1", "V12", "", "my alias", "a/b"])
def test_an_alias_that_mlflow_refuses_or_reserves_is_refused_first(tmp_path, alias):
    with pytest.raises(TrackingError, match=r"tracking\.alias .* cannot be an alias"):
        runs.check(make_config(tmp_path, alias=alias))


@pytest.mark.parametrize("experiment", ["", "  ", " daily", "x" * 501])
def test_an_experiment_name_that_cannot_be_used_is_refused(tmp_path, experiment):
    with pytest.raises(TrackingError, match=r"tracking\.experiment") as caught:
        runs.check(make_config(tmp_path, experiment=experiment))
    suggestion = caught.value.remedy.partition("=")[2]
    check_names(make_config(tmp_path, experiment=suggestion))


def test_a_deleted_experiment_is_refused_with_the_way_to_restore_it(sqlite_config):
    client = connect(sqlite_config)
    deleted = client.create_experiment("thawline")
    client.delete_experiment(deleted)
    with pytest.raises(TrackingError, match=f"'thawline' is deleted.*\n.*restore -x {deleted}"):
        runs.check(sqlite_config)


def test_a_closed_port_is_told_in_seconds_and_without_the_password(tmp_path):
    config = make_config(tmp_path, uri=f"http://me:secret@127.0.0.1:{free_port()}")
    started = time.monotonic()
    with pytest.raises(TrackingError, match="start the server") as caught:
        runs.check(config)
    assert time.monotonic() - started < 15
    assert "http://***@127.0.0.1" in str(caught.value)
    shown = caught.value.__cause__ or caught.value.__suppress_context__
    assert shown is True
    assert "secret" not in str(caught.value)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


@pytest.mark.slow
def test_a_server_that_never_answers_is_told_in_under_15_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = make_config(tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(TrackingError, match="timed out"):
            runs.check(config)
        assert 3 < time.monotonic() - started < 15


def test_a_closed_database_port_is_told_without_mlflows_retries(tmp_path):
    config = make_config(tmp_path, uri=f"postgresql://me:secret@127.0.0.1:{free_port()}/mlflow")
    started = time.monotonic()
    with pytest.raises(TrackingError, match=r"nothing answers at 127\.0\.0\.1") as caught:
        runs.check(config)
    assert time.monotonic() - started < 5
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "remedy"),
    [
        (401, "You are not authenticated.", "MLFLOW_TRACKING_USERNAME"),
        (403, "Permission denied", "MLFLOW_TRACKING_USERNAME"),
        (403, "Invalid Host header - possible DNS rebinding attack detected", "--allowed-hosts"),
    ],
)
def test_a_refusal_names_the_remedy(tmp_path, status, body, remedy):
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = make_config(tmp_path, uri=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(TrackingError) as caught:
            runs.check(config)
        server.shutdown()
    assert remedy in caught.value.remedy


def test_a_file_that_is_no_database_is_told_at_once(tmp_path):
    (tmp_path / "mlflow.db").write_text("just a text file, long enough to have a header")
    with pytest.raises(TrackingError, match=r"mlflow\.db is no SQLite database"):
        runs.check(make_config(tmp_path))


def test_a_workdir_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"cannot be used: .*\n.*set workdir or tracking\.uri"):
        runs.check(make_config(tmp_path / "file" / "runs"))


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "ftp://somewhere"])
def test_a_kind_of_store_that_mlflow_has_not_is_told(tmp_path, uri):
    with pytest.raises(TrackingError, match=r"set tracking\.uri to sqlite"):
        runs.check(make_config(tmp_path, uri=uri))


def test_passwords_are_masked_wherever_a_uri_stands():
    text = "at postgresql://me:p@ss:w@db:5432/x and 'https://token@host/path' but not http://host/a"
    assert masked(text) == (
        "at postgresql://***@db:5432/x and 'https://***@host/path' but not http://host/a"
    )


# Parent and children


def test_stages_are_children_of_the_pipelines_run_and_leave_it_running(sqlite_config, monkeypatch):
    monkeypatch.setenv("THAWLINE_GIT_COMMIT", "abc123")
    parent = runs.start_parent(sqlite_config, "retrain", {"trigger": "schedule"})
    for stage in ("pretrain", "finetune"):
        with runs.stage_run(sqlite_config, stage, parent) as run:
            assert run.pipeline_run_id == parent
            assert status_of(sqlite_config, run.run_id) == "RUNNING"
        child = connect(sqlite_config).get_run(run.run_id)
        assert child.info.status == "FINISHED"
        assert child.info.run_name == stage
        assert child.data.tags["mlflow.parentRunId"] == parent
        assert child.data.tags["thawline.stage"] == stage
        assert child.data.tags["thawline.git_commit"] == "abc123"
        assert child.data.tags["thawline.torch_version"].startswith("2.")
    assert status_of(sqlite_config, parent) == "RUNNING"
    assert connect(sqlite_config).get_run(parent).data.tags["trigger"] == "schedule"
    runs.finish_parent(sqlite_config, parent, "FINISHED")
    assert status_of(sqlite_config, parent) == "FINISHED"
    assert len(all_runs(sqlite_config)) == 3


def test_the_parent_keeps_the_config_without_its_password(sqlite_config, tmp_path):
    secret = sqlite_config.model_copy(
        update={
            "tracking": sqlite_config.tracking.model_copy(
                update={"uri": f"sqlite:///{tmp_path}/work/mlflow.db?note=://me:secret@host"}
            )
        }
    )
    parent = runs.start_parent(secret, "retrain")
    text = (tmp_path / "work" / "mlartifacts" / parent / "artifacts" / "config.yaml").read_text()
    assert "history_length: 50" in text
    assert "***@host" in text
    assert "secret" not in text


def test_without_a_parent_a_stage_has_a_run_of_its_own(sqlite_config):
    with runs.stage_run(sqlite_config, "windows") as run:
        pass
    assert run.pipeline_run_id == run.run_id
    assert "mlflow.parentRunId" not in connect(sqlite_config).get_run(run.run_id).data.tags


def test_a_parent_that_does_not_exist_is_named(sqlite_config):
    with (
        pytest.raises(TrackingError, match="opening the parent run 0123456789"),
        runs.stage_run(sqlite_config, "windows", "0123456789"),
    ):
        pass


def test_without_git_there_is_no_commit_tag(sqlite_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with runs.stage_run(sqlite_config, "windows") as run:
        pass
    assert "thawline.git_commit" not in connect(sqlite_config).get_run(run.run_id).data.tags


def test_in_a_repository_the_commit_is_head(sqlite_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "start"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    with runs.stage_run(sqlite_config, "windows") as run:
        pass
    tags = connect(sqlite_config).get_run(run.run_id).data.tags
    assert tags["thawline.git_commit"] == head.stdout.strip()


# Statuses


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("diverged"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(3), "FAILED"),
        (SystemExit(0), "FINISHED"),
    ],
)
def test_what_ends_a_stage_sets_its_status_and_is_raised_on(sqlite_config, error, status):
    with pytest.raises(type(error)), runs.stage_run(sqlite_config, "finetune") as run:
        raise error
    assert status_of(sqlite_config, run.run_id) == status


STAGE_IN_A_PROCESS = """
    import sys, time
    from thawline.config import parse_config
    from thawline.tracking import runs
    config = parse_config("", [f"workdir={sys.argv[1]}", "events.path=x"])
    with runs.stage_run(config, "finetune", sys.argv[2]) as run:
        print(run.run_id, flush=True)
        time.sleep(60)
"""


def start_stage(tmp_path, parent):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STAGE_IN_A_PROCESS), tmp_path / "work", parent],
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_sigterm_leaves_killed_and_sigkill_is_closed_by_finish_parent(sqlite_config, tmp_path):
    parent = runs.start_parent(sqlite_config, "retrain")
    process, terminated = start_stage(tmp_path, parent)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert status_of(sqlite_config, terminated) == "KILLED"

    process, killed = start_stage(tmp_path, parent)
    process.kill()
    process.wait(30)
    assert status_of(sqlite_config, killed) == "RUNNING"
    with runs.stage_run(sqlite_config, "evaluate", parent) as finished:
        pass
    runs.finish_parent(sqlite_config, parent, "FAILED")
    assert status_of(sqlite_config, killed) == "FAILED"
    assert status_of(sqlite_config, terminated) == "KILLED"
    assert status_of(sqlite_config, finished.run_id) == "FINISHED"


@pytest.mark.parametrize(
    ("word", "parent_status", "child_status"),
    [
        ("SUCCEEDED", "FINISHED", "KILLED"),
        ("finished", "FINISHED", "KILLED"),
        ("CANCELLED", "KILLED", "KILLED"),
        ("FAILED", "FAILED", "FAILED"),
        ("PAUSED_BY_ALIENS", "FAILED", "FAILED"),
        ("", "FAILED", "FAILED"),
    ],
)
def test_every_word_for_the_end_maps_to_a_terminal_status(
    sqlite_config, word, parent_status, child_status
):
    parent = runs.start_parent(sqlite_config, "retrain")
    client = connect(sqlite_config)
    experiment = client.get_run(parent).info.experiment_id
    left_open = client.create_run(experiment, tags={"mlflow.parentRunId": parent})
    other = client.create_run(experiment)
    for _ in range(2):
        runs.finish_parent(sqlite_config, parent, word)
    assert status_of(sqlite_config, parent) == parent_status
    assert status_of(sqlite_config, left_open.info.run_id) == child_status
    assert status_of(sqlite_config, other.info.run_id) == "RUNNING"


def test_finishing_a_pipeline_that_never_started_does_nothing(sqlite_config):
    runs.finish_parent(sqlite_config, "", "FAILED")
    assert all_runs(sqlite_config) == []


def test_the_handler_of_sigterm_is_put_back(sqlite_config):
    def handler(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with runs.stage_run(sqlite_config, "windows"):
            assert signal.getsignal(signal.SIGTERM) is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stage_runs_in_another_thread(sqlite_config):
    opened = []

    def stage():
        with runs.stage_run(sqlite_config, "windows") as run:
            opened.append(run.run_id)

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert status_of(sqlite_config, opened[0]) == "FINISHED"


def test_a_server_that_is_down_at_the_end_does_not_hide_the_stages_own_error(
    sqlite_config, monkeypatch, capsys
):
    def refuse(*_):
        raise ConnectionError("Connection refused")

    def stage():
        with runs.stage_run(sqlite_config, "finetune") as run:
            monkeypatch.setattr(run.client, "set_terminated", refuse)
            raise ValueError("diverged")

    with pytest.raises(ValueError, match="diverged"):
        stage()
    assert "Connection refused" in capsys.readouterr().err


# Attempts and cached stages


def tags_of(config, run_id):
    return connect(config).get_run(run_id).data.tags


def test_a_retried_stage_has_a_run_an_attempt_and_a_vanished_attempt_is_closed(sqlite_config):
    parent = runs.start_parent(sqlite_config, "retrain")
    with (
        pytest.raises(ValueError, match="diverged"),
        runs.stage_run(sqlite_config, "finetune", parent) as failed,
    ):
        raise ValueError("diverged")
    left_by_sigkill = runs.stage_run(sqlite_config, "finetune", parent)
    killed = left_by_sigkill.__enter__()
    with runs.stage_run(sqlite_config, "finetune", parent) as last:
        assert status_of(sqlite_config, killed.run_id) == "KILLED"
    left_by_sigkill.__exit__(None, None, None)
    attempts = [failed.run_id, killed.run_id, last.run_id]
    assert [tags_of(sqlite_config, each)["thawline.attempt"] for each in attempts] == list("123")
    assert status_of(sqlite_config, failed.run_id) == "FAILED"
    assert status_of(sqlite_config, last.run_id) == "FINISHED"


def test_the_same_stage_of_another_trial_is_no_attempt_and_stays_open(sqlite_config):
    parent = runs.start_parent(sqlite_config, "study")
    other = sqlite_config.model_copy(update={"seed": 1})
    with (
        runs.stage_run(sqlite_config, "finetune", parent) as first,
        runs.stage_run(other, "finetune", parent) as second,
    ):
        assert status_of(sqlite_config, first.run_id) == "RUNNING"
    for run in (first, second):
        assert tags_of(sqlite_config, run.run_id)["thawline.attempt"] == "1"


@pytest.mark.parametrize(
    ("ran", "cached"),
    [
        (["windows", "pretrain", "finetune", "evaluate", "register"], None),
        (["finetune", "evaluate"], "windows, pretrain"),
        (["windows", "evaluate"], "pretrain, finetune"),
        (["windows"], None),
        ([], None),
    ],
)
def test_what_came_from_the_cache_stands_on_the_parent(sqlite_config, monkeypatch, ran, cached):
    monkeypatch.setenv("THAWLINE_RUN_ID", "run-1")
    parent = pipeline.open_parent(sqlite_config, "retrain")
    for stage in ran:
        with runs.stage_run(sqlite_config, stage, pipeline.find_parent(sqlite_config)):
            pass
    assert pipeline.close_parent(sqlite_config, "SUCCEEDED") == parent
    assert status_of(sqlite_config, parent) == "FINISHED"
    assert tags_of(sqlite_config, parent).get("thawline.cached") == cached
    assert len(all_runs(sqlite_config)) == 1 + len(ran)


# Params, metrics, tags


def test_params_may_be_logged_again_with_the_same_value_only(sqlite_config):
    with runs.stage_run(sqlite_config, "finetune") as run:
        run.log_params({"epochs": 3, "mlp": [256, 128], "optimizer": {"lr": 1e-3, "clip": None}})
        run.log_params({"epochs": 3, "seed": 0})
        with pytest.raises(TrackingError, match=r"the param epochs of .* is '3' already.*'4'"):
            run.log_params({"epochs": 4, "late": 1})
    assert connect(sqlite_config).get_run(run.run_id).data.params == {
        "epochs": "3",
        "mlp": "[256, 128]",
        "optimizer.lr": "0.001",
        "optimizer.clip": "None",
        "seed": "0",
    }


def test_many_and_long_params_are_logged(sqlite_config):
    with runs.stage_run(sqlite_config, "windows") as run:
        for _ in range(2):
            run.log_params({f"p{i}": i for i in range(230)} | {"long": "x" * 10_000})
    params = connect(sqlite_config).get_run(run.run_id).data.params
    assert len(params) == 231
    assert len(params["long"]) == 6000


def test_the_data_version_is_a_tag_to_search_by(sqlite_config):
    with runs.stage_run(sqlite_config, "finetune") as run:
        run.log_params({"data_version": "d41d8c"})
    found = connect(sqlite_config).search_runs(
        [connect(sqlite_config).get_run(run.run_id).info.experiment_id],
        "tags.`thawline.data_version` = 'd41d8c'",
    )
    assert [each.info.run_id for each in found] == [run.run_id]


def test_metrics_keep_their_steps_and_undefined_ones_are_left_out(sqlite_config):
    with runs.stage_run(sqlite_config, "finetune") as run:
        run.log_metrics({"auc": 0.5, "hit@3": 0.25, "cold": None}, step=1)
        run.log_metrics({"auc": 0.75, "next": {"save": {"auc": 0.9}}}, step=2)
    client = connect(sqlite_config)
    history = client.get_metric_history(run.run_id, "auc")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.75)]
    metrics = client.get_run(run.run_id).data.metrics
    assert metrics == {"auc": 0.75, "hit_at_3": 0.25, "next/save/auc": 0.9}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_refused_and_nothing_is_stored(sqlite_config, value):
    with runs.stage_run(sqlite_config, "finetune") as run:
        with pytest.raises(TrackingError, match=f"the metric next/auc at step 3 is {value}"):
            run.log_metrics({"loss": 1.0, "next": {"auc": value}}, step=3)
        assert connect(sqlite_config).get_run(run.run_id).data.metrics == {}


def test_an_artifact_that_does_not_exist_is_named(sqlite_config, tmp_path):
    with (
        runs.stage_run(sqlite_config, "evaluate") as run,
        pytest.raises(TrackingError, match=r"gone\.html does not exist"),
    ):
        run.log_artifact(tmp_path / "gone.html")


# Runs that Kubeflow made


def test_with_one_injected_run_stages_nest_under_it_and_it_is_left_open(sqlite_config, monkeypatch):
    client = connect(sqlite_config)
    injected = client.create_run(client.create_experiment("kubeflow")).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", injected)
    parent = runs.start_parent(sqlite_config, "retrain", {"trigger": "ui"})
    assert parent == injected
    with runs.stage_run(sqlite_config, "pretrain", parent) as run:
        assert run.run_id != injected
    child = client.get_run(run.run_id)
    assert child.data.tags["mlflow.parentRunId"] == injected
    assert child.info.experiment_id == client.get_run(injected).info.experiment_id
    runs.finish_parent(sqlite_config, parent, "SUCCEEDED")
    assert status_of(sqlite_config, injected) == "RUNNING"
    assert client.get_run(injected).data.tags["trigger"] == "ui"
    assert len(all_runs(sqlite_config)) == 2


def test_with_a_run_injected_for_each_task_stages_log_there_and_create_none(
    sqlite_config, monkeypatch
):
    client = connect(sqlite_config)
    experiment = client.create_experiment("kubeflow")
    pipeline = client.create_run(experiment).info.run_id

    def inject():
        task = client.create_run(experiment, tags={"mlflow.parentRunId": pipeline}).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", task)
        return task

    inject()
    parent = runs.start_parent(sqlite_config, "retrain")
    assert parent == pipeline
    task = inject()
    with runs.stage_run(sqlite_config, "pretrain", parent) as run:
        run.log_params({"epochs": 4})
    assert (run.run_id, run.pipeline_run_id) == (task, pipeline)
    assert client.get_run(task).data.params == {"epochs": "4"}
    assert client.get_run(task).data.tags["thawline.stage"] == "pretrain"
    with runs.stage_run(sqlite_config, "register") as run:
        assert (run.run_id, run.pipeline_run_id) == (task, pipeline)
    runs.finish_parent(sqlite_config, parent, "FAILED")
    assert {each.info.status for each in all_runs(sqlite_config)} == {"RUNNING"}
    assert len(all_runs(sqlite_config)) == 3


def test_a_pipeline_of_injected_runs_makes_none_of_its_own_from_start_to_finish(
    sqlite_config, tmp_path, monkeypatch
):
    client = connect(sqlite_config)
    experiment = client.create_experiment("kubeflow")
    whole = client.create_run(experiment).info.run_id
    monkeypatch.setenv("THAWLINE_RUN_ID", "run-1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/work/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    elsewhere = make_config(tmp_path / "not-here")

    def inject():
        task = client.create_run(experiment, tags={"mlflow.parentRunId": whole}).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", task)
        return task

    tasks = [inject()]
    assert pipeline.open_parent(elsewhere, "retrain") == whole
    tasks.append(inject())
    with (
        pytest.raises(ValueError, match="diverged"),
        runs.stage_run(elsewhere, "finetune", pipeline.find_parent(elsewhere)) as run,
    ):
        raise ValueError("diverged")
    assert run.run_id == tasks[-1]
    tasks.append(inject())
    assert pipeline.close_parent(elsewhere, "FAILED") == whole
    assert {each.info.run_id for each in all_runs(sqlite_config)} == {whole, *tasks}
    assert {each.info.status for each in all_runs(sqlite_config)} == {"RUNNING"}
    assert "thawline.cached" not in tags_of(sqlite_config, whole)


def test_an_injected_run_that_the_server_does_not_know_is_named(sqlite_config, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789")
    with pytest.raises(TrackingError, match="MLFLOW_RUN_ID names a run that cannot be used"):
        runs.start_parent(sqlite_config, "retrain")
