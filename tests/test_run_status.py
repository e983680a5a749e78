"""How runs on Kubeflow stand and what they wrote, against its API and pods on loopback."""

import pytest
import yaml

from pipelines import run_logs, run_status
from thawline.errors import ClusterError

pytest_plugins = ["kfp_fixtures"]

RUN = {
    "run_id": "r1",
    "display_name": "weekly",
    "state": "FAILED",
    "created_at": "2026-11-30T03:00:00Z",
    "finished_at": "2026-11-30T04:30:00Z",
    "error": {"message": "a task failed"},
}


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


def test_retries_that_kubeflow_gives_to_no_task_are_counted_together(kfp, endpoint, invoke):
    tries = [task(f"executor({number})", "FAILED") for number in (0, 1, 2, 0, 1)]
    kfp.runs["r1"] = RUN | {"run_details": {"task_details": [task("finetune", "FAILED"), *tries]}}
    assert "retries: 3, of tasks that Kubeflow does not name" in invoke("status", "r1")[1]
    del kfp.runs["r1"]["run_details"]["task_details"][2:]
    assert "retries:" not in invoke("status", "r1")[1]


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
