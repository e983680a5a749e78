"""The compiled pipeline, and the local runner that executes it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.pipeline_spec.pipeline_spec_pb2 import ParameterType
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID as PARENT_TAG

import components
from pipelines.commands import COMPILED, compile_pipelines, generated_files
from pipelines.compile import compile_text
from pipelines.ir import Compiled, dangling
from pipelines.local import StageError, execute, run, with_absolute_paths
from pipelines.profiles import Profile
from pipelines.retrain import build
from pipelines.stage_log import StageLog
from thawline.config import Config, parse_config
from thawline.errors import ThawlineError
from thawline.tracking import pipeline as tracked

pytest_plugins = ["mlflow_fixtures"]

RETRAIN = COMPILED / "retrain.yaml"
COMPONENTS = Path(components.__file__).parent
THIN = {"base_image": "thawline:test", "packages_to_install": [], "install_kfp_package": False}

TINY_MODEL = {
    "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
    "pretrain": {"epochs": 1, "negatives": 32},
    "finetune": {"epochs": 2, "batch_size": 64},
    "evaluation": {"epoch_requests": 50},
}


@pytest.fixture(scope="module")
def compiled():
    return Compiled.parse(RETRAIN.read_text(encoding="utf-8"))


def inner_tasks(compiled):
    return compiled.spec.components["comp-exit-handler-1"].dag.tasks


def write(pipeline, path):
    compiler.Compiler().compile(pipeline, str(path))
    return path


# The compiled file.


@pytest.fixture(scope="module")
def generated():
    return generated_files()


def test_every_generated_file_is_up_to_date(generated):
    made = {path for folder in (COMPILED, COMPONENTS) for path in folder.rglob("*")}
    made = {path for path in made if path.name == "README.md" or path.parent == COMPILED}
    assert made == generated.keys()
    stale = [path for path, text in generated.items() if path.read_text("utf-8") != text]
    assert stale == [], "run `thawline compile`"


def test_compiling_in_another_process_gives_the_same_bytes(generated):
    code = (
        "import json, sys; from pipelines.commands import generated_files; "
        "json.dump({str(path): text for path, text in generated_files().items()}, sys.stdout)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=True
    )
    assert json.loads(made.stdout) == {str(path): text for path, text in generated.items()}


def test_the_official_protos_take_the_file_and_every_reference_resolves(compiled):
    assert compiled.spec.pipeline_info.name == "thawline-retrain"
    assert len(compiled.deployment.executors) == 7
    assert dangling(compiled) == []


def test_only_registration_is_behind_the_gate_and_the_gate_is_a_bool(compiled):
    (gate,) = [task for task in inner_tasks(compiled).values() if task.trigger_policy.condition]
    condition = "inputs.parameter_values['pipelinechannel--evaluate-Output'] == true"
    assert gate.trigger_policy.condition == condition
    behind = compiled.spec.components[gate.component_ref.name]
    assert list(behind.dag.tasks) == ["register"]
    passed = compiled.spec.components["comp-evaluate"].output_definitions.parameters["Output"]
    assert passed.parameter_type == ParameterType.BOOLEAN


def test_the_exit_task_waits_for_the_stages_and_needs_none_of_their_outputs(compiled):
    finish = compiled.spec.root.dag.tasks["finish"]
    assert list(finish.dependent_tasks) == ["exit-handler-1"]
    assert json_format.MessageToDict(finish.trigger_policy) == {
        "strategy": "ALL_UPSTREAM_TASKS_COMPLETED"
    }
    kinds = {key: value.WhichOneof("kind") for key, value in finish.inputs.parameters.items()}
    assert kinds == {"config": "component_input_parameter", "status": "task_final_status"}


def test_the_inputs_sorted_by_name_read_as_a_story_and_each_is_documented(compiled):
    inputs = compiled.spec.root.input_definitions.parameters
    written = list(build().component_spec.inputs)
    assert written == sorted(written) == sorted(inputs)
    steps = [name.split("_")[1] for name in written if name.startswith("step")]
    order = ["start", "windows", "pretrain", "finetune", "gate", "register"]
    assert list(dict.fromkeys(steps)) == order
    assert all(each.description and each.HasField("default_value") for each in inputs.values())


def test_cached_stages_depend_on_versions_and_on_nothing_that_differs_in_each_run(compiled):
    tasks = inner_tasks(compiled)
    cached = {name for name, task in tasks.items() if task.caching_options.enable_cache}
    assert cached == {"windows", "pretrain", "finetune"}
    assert set(tasks["windows"].inputs.parameters) == {"config", "source_version", "code_version"}
    versions = {"config", "data_version", "code_version"}
    assert set(tasks["pretrain"].inputs.parameters) == versions
    assert set(tasks["finetune"].inputs.parameters) == {*versions, "trainjob"}
    for name in ("windows", "pretrain", "finetune"):
        given = tasks[name].inputs.parameters["config"].task_output_parameter
        assert given.output_parameter_key == f"{name}_config"
    behind = compiled.spec.components["comp-condition-2"].dag.tasks["register"]
    finish = compiled.spec.root.dag.tasks["finish"]
    assert not behind.caching_options.enable_cache
    assert not finish.caching_options.enable_cache


def test_every_task_learns_the_id_of_the_run_from_its_pod(compiled):
    assert compiled.kubernetes.keys() == compiled.deployment.executors.keys()
    for settings in compiled.kubernetes.values():
        (variable,) = settings.field_path_as_env
        assert (variable.name, variable.field_path) == (
            "THAWLINE_RUN_ID",
            "metadata.labels['pipeline/runid']",
        )


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("producerTask: windows", "producerTask: window", "no task window"),
        ("outputArtifactKey: table", "outputArtifactKey: tables", "pretrain has no output tables"),
        ("componentInputParameter: seed", "componentInputParameter: sed", "has no input sed"),
        ("name: comp-pretrain", "name: comp-train", "no component comp-train"),
        ("executorLabel: exec-start", "executorLabel: exec-begin", "no executor exec-begin"),
        ("['pipelinechannel--evaluate-Output']", "['gate']", "the condition reads gate"),
        ("- exit-handler-1", "- start", "no upstream task exit-handler-1"),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(old, new, found):
    text = RETRAIN.read_text(encoding="utf-8").replace("\n              == true", " == true")
    assert old in text
    problems = dangling(Compiled.parse(text.replace(old, new)))
    assert any(found in problem for problem in problems), problems


def test_compile_writes_the_pipelines_alone_to_another_folder(tmp_path, capsys):
    compile_pipelines(output=tmp_path, image="other:1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "retrain.cpu.yaml",
        "retrain.gpu-multinode.yaml",
        "retrain.gpu.yaml",
        "retrain.yaml",
        "study.cpu.yaml",
        "study.gpu-multinode.yaml",
        "study.gpu.yaml",
        "study.yaml",
    ]
    assert "image: other:1" in (tmp_path / "retrain.yaml").read_text(encoding="utf-8")
    assert str(tmp_path / "retrain.yaml") in capsys.readouterr().out


def test_compile_check_fails_on_a_changed_file_and_leaves_it(tmp_path):
    compile_pipelines("local", output=tmp_path)
    compile_pipelines("local", output=tmp_path, check=True)
    path = tmp_path / "retrain.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    changed = path.read_bytes()
    with pytest.raises(ThawlineError, match=r"out of date: .*retrain.yaml[\s\S]*thawline compile"):
        compile_pipelines("local", output=tmp_path, check=True)
    assert path.read_bytes() == changed


# What kfp 2.17 gets wrong and we go around: a test that fails here says that a newer kfp is better.


@dsl.component(**THIN)
def answer() -> bool:
    return True


@dsl.component(**THIN)
def two_answers() -> NamedTuple("Answers", [("first", bool), ("second", bool)]):
    return (True, True)


@dsl.component(**THIN)
def act():
    print("acted")


@dsl.component(**THIN)
def show(text: str):
    print(f"text is {text}")


@dsl.component(**THIN)
def fail(text: str):
    for line in range(30):
        print(f"line {line}")
    raise ValueError(text)


@dsl.component(**THIN)
def refuse():
    from thawline.errors import DataError

    raise DataError("events.parquet has no column item", "set events.columns.item_id")


@dsl.component(**THIN)
def close(status: dsl.PipelineTaskFinalStatus):
    print(f"closed after {status.state}")


def test_kfp_compiles_a_resource_taken_from_an_input_inside_a_condition_to_a_dangling_reference(
    tmp_path,
):
    @dsl.pipeline
    def defect(memory: str = "1G"):
        with dsl.If(answer().output == True):  # noqa: E712
            act().set_memory_limit(memory)

    path = write(defect, tmp_path / "defect.yaml")
    (problem,) = dangling(Compiled.parse(path.read_text(encoding="utf-8")))
    assert "the enclosing pipeline has no input pipelinechannel--memory" in problem


def test_kfp_writes_a_default_of_several_lines_to_a_file_that_is_no_yaml(tmp_path):
    @dsl.pipeline
    def defect(config: str = "a: 1\nb: 2\n"):
        show(text=config)

    path = write(defect, tmp_path / "defect.yaml")
    with pytest.raises(yaml.YAMLError):
        list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def test_the_local_runner_skips_a_condition_on_a_named_output_without_an_error(tmp_path, capsys):
    @dsl.pipeline
    def defect():
        with dsl.If(two_answers().outputs["first"] == True):  # noqa: E712
            act()

    execute(write(defect, tmp_path / "defect.yaml"), tmp_path / "named", {})
    assert "acted" not in capsys.readouterr().out

    @dsl.pipeline
    def good():
        with dsl.If(answer().output == True):  # noqa: E712
            act()

    execute(write(good, tmp_path / "good.yaml"), tmp_path / "single", {})
    assert "acted" in capsys.readouterr().out


def test_the_local_runner_replaces_python3_in_inputs_so_we_refuse_it(tmp_path, monkeypatch, capsys):
    path = write(show, tmp_path / "show.yaml")
    with pytest.raises(ThawlineError, match="cannot take `python3`"):
        execute(path, tmp_path / "refused", {"text": "in python3.11"})
    assert not (tmp_path / "refused").exists()
    monkeypatch.setattr("pipelines.local._check_runner", lambda *_: None)
    execute(path, tmp_path / "taken", {"text": "in python3.11"})
    assert f"text is in {sys.executable}.11" in capsys.readouterr().out


def test_the_local_runner_cannot_start_an_interpreter_whose_path_holds_a_space(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", "/my folder/python")
    with pytest.raises(ThawlineError, match=r"a shell would split the path[\s\S]*without spaces"):
        execute(write(act, tmp_path / "act.yaml"), tmp_path / "root", {})
    monkeypatch.setattr("pipelines.local._check_runner", lambda *_: None)
    with pytest.raises((RuntimeError, StageError)):
        execute(tmp_path / "act.yaml", tmp_path / "root", {})


# The local runner.


def test_a_failed_stage_is_named_with_its_last_lines_after_the_exit_task_has_run(tmp_path, capsys):
    @dsl.pipeline
    def failing():
        with dsl.ExitHandler(close()):
            first = fail(text="no space left")
            act().after(first)

    path = write(failing, tmp_path / "failing.yaml")
    with pytest.raises(StageError) as caught:
        execute(path, tmp_path / "root", {})
    error = caught.value
    assert error.stage == "fail"
    assert "ValueError: no space left" in error.what
    assert "line 29" in error.what
    assert "line 5" not in error.what
    assert error.remedy == f"see {tmp_path / 'root' / 'pipeline.log'}"
    shown = capsys.readouterr().out
    assert "closed after FAILED" in shown
    assert "acted" not in shown


def test_an_error_of_ours_in_a_stage_arrives_with_its_own_remedy(tmp_path):
    @dsl.pipeline
    def refusing():
        refuse()

    with pytest.raises(StageError) as caught:
        execute(write(refusing, tmp_path / "refusing.yaml"), tmp_path / "root", {})
    error = caught.value
    assert error.what == "the stage refuse failed: events.parquet has no column item"
    assert error.remedy == "set events.columns.item_id"


def test_the_exit_task_hears_of_success(tmp_path, capsys):
    @dsl.pipeline
    def working():
        with dsl.ExitHandler(close()):
            act()

    before = dict(os.environ)
    execute(write(working, tmp_path / "working.yaml"), tmp_path / "root", {})
    assert "closed after SUCCEEDED" in capsys.readouterr().out
    assert dict(os.environ) == before


def test_a_missing_compiled_file_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ThawlineError, match=r"no compiled pipeline[\s\S]*thawline compile"):
        execute(tmp_path / "none.yaml", tmp_path / "root", {})


def test_ctrl_c_closes_the_runs_that_the_exit_task_then_never_closes(
    workdir, monkeypatch, no_mlflow_environment
):
    config = parse_config(f"workdir: {workdir}\nsimulate: {{}}")
    opened = []

    def interrupted(package, root, arguments, cache):
        opened.append(tracked.open_parent(config, "retrain"))
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.local.execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    client, _ = mlflow_runs(workdir)
    assert client.get_run(opened[0]).info.status == "KILLED"
    assert "THAWLINE_RUN_ID" not in os.environ


def test_people_see_the_stages_lines_and_the_file_holds_all(tmp_path, capsys):
    printed = (
        "10:00:00.000 - INFO - Executing task \x1b[96m'windows'\x1b[0m\n"
        "    [KFP Executor 2026-01-01 10:00:00,000 INFO]: Got executor_input:\n"
        '    {\n        "inputs": {\n            "config": "seed: 1"\n        }\n    }\n'
        "    12,000 events\n"
        "    \n"
        "10:00:01.000 - INFO - Task \x1b[96m'windows'\x1b[0m finished with status "
        "\x1b[92mSUCCESS\x1b[0m\n"
        "10:00:01.000 - INFO - Task \x1b[96m'windows'\x1b[0m outputs:\n    Output: 'abc'\n"
    )
    with StageLog(tmp_path / "log", sys.stdout) as log:
        for start in range(0, len(printed), 7):
            log.write(printed[start : start + 7])
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, second) == ("==> windows", "    12,000 events")
    assert third.startswith("    done in ")
    assert log.failed is None
    kept = (tmp_path / "log").read_text(encoding="utf-8")
    assert '"config": "seed: 1"' in kept
    assert "Output: 'abc'" in kept


def test_local_paths_are_made_absolute_and_addresses_are_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "workdir: out\nevents: {path: [logs/*.parquet, s3://bucket/log], truth: true.parquet}"
    config = with_absolute_paths(parse_config(text))
    assert config.workdir == str(tmp_path / "out")
    assert config.events.path == [str(tmp_path / "logs/*.parquet"), "s3://bucket/log"]
    assert config.events.truth == str(tmp_path / "true.parquet")


@pytest.fixture
def workdir(sqlite_config):
    """A place with an MLflow database."""
    return Path(sqlite_config.workdir)


# The whole pipeline.


@pytest.fixture(scope="module")
def place(tmp_path_factory, mlflow_database):
    """An empty working directory and no HOME, as a container has them, and a folder beside it."""
    root = tmp_path_factory.mktemp("pipeline")
    shutil.copyfile(mlflow_database, root / "mlflow.db")
    (root / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name == "HOME" or name.startswith("MLFLOW_")]:
            patch.delenv(name)
        patch.chdir(root / "empty")
        yield root


def tiny(place, tiny_config, **changes):
    """A config that takes the pipeline seconds."""
    base = {**tiny_config.model_dump(exclude={"events"}), **TINY_MODEL, "workdir": str(place)}
    return Config.model_validate({**base, **changes})


@pytest.fixture(scope="module")
def registered(place, tiny_config):
    """A run that passes the gate."""
    return run(tiny(place, tiny_config, gate={"min_auc": 0.0, "rules": []}), cache=place / "cache")


INTERRUPTION = """
import os, pathlib, signal, sys, threading, time

mark = pathlib.Path(os.environ["THAWLINE_WORK"]) / "interrupted"

def interrupt():
    while not list(mark.parent.glob("checkpoints/*/*/checkpoint.json")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

if "finetune" in sys.argv and not mark.exists():
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    threading.Thread(target=interrupt, daemon=True).start()
"""
"""Sends SIGTERM to the first try of fine-tuning, once it has a checkpoint."""


@pytest.fixture(scope="module")
def refused(registered, place, tiny_config):
    """A run of another recipe, whose fine-tuning is stopped once and whose model is too bad."""
    (place / "hooks").mkdir()
    (place / "hooks" / "sitecustomize.py").write_text(INTERRUPTION, encoding="utf-8")
    work = place / "work"
    profile = Profile.model_validate(
        {
            "name": "retried",
            "work": {"folder": str(work), "claim": "work"},
            "stages": {"finetune": {"retries": {"count": 1, "wait_seconds": 0}}},
        }
    )
    package = place / "retried.yaml"
    package.write_text(compile_text(profile), encoding="utf-8")
    finetune = {**TINY_MODEL["finetune"], "recipe": "co-train", "checkpoint": {"every_steps": 1}}
    config = tiny(place, tiny_config, finetune=finetune, gate={"min_auc": 1.0, "rules": []})
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(place / "hooks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("THAWLINE_WORK", str(work))
        return run(config, package, cache=place / "cache")


def mlflow_runs(workdir, parent=None):
    """The client, and the runs: all of them, or a pipeline's."""
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("thawline")
    runs = list(client.search_runs([experiment.experiment_id], order_by=["start_time"]))
    if parent is not None:
        runs = [r for r in runs if parent in (r.info.run_id, r.data.tags.get(PARENT_TAG))]
    return client, runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_compiled_file_runs_from_a_simulated_log_to_a_registered_model(registered, place):
    result = registered
    assert result.passed
    assert (result.dataset / "manifest.json").exists()
    assert (result.table / "item.safetensors").exists()
    assert (result.model / "model.json").exists()
    assert (result.evaluation / "report.html").read_bytes() == (
        result.evaluation.parent / "report"
    ).read_bytes()
    written = json.loads((result.registration / "registration.json").read_text("utf-8"))
    client, runs = mlflow_runs(place, result.parent_run_id)
    version = client.get_model_version_by_alias(written["name"], written["alias"])
    assert str(version.version) == str(written["version"])
    names = {each.data.tags.get("thawline.stage", "parent"): each.info for each in runs}
    assert names.keys() == {"parent", "windows", "pretrain", "finetune", "evaluate", "register"}
    assert names["parent"].run_id == result.parent_run_id
    assert {info.status for info in names.values()} == {"FINISHED"}
    assert list((place / "empty").iterdir()) == []
    metrics = artifacts_of(result.evaluation.parent)["metrics"]["metadata"]
    assert all(isinstance(value, float) for value in metrics.values())
    assert len(metrics) > 4


def artifacts_of(task):
    outputs = json.loads((task / "executor_output.json").read_text("utf-8"))
    return {name: each["artifacts"][0] for name, each in outputs["artifacts"].items()}


@pytest.mark.slow
def test_each_artifact_says_what_is_in_it(registered):
    dataset, table, model, evaluation = (
        artifacts_of(folder.parent)[folder.name]["metadata"]
        for folder in (
            registered.dataset,
            registered.table,
            registered.model,
            registered.evaluation,
        )
    )
    manifest = json.loads((registered.dataset / "manifest.json").read_text("utf-8"))
    assert dataset["requests_train"] == manifest["requests"]["train"] > 0
    assert dataset["items"] == manifest["num_items"]
    rows = manifest["num_items"] + 2
    assert (table["rows"], table["dim"], model["rows_item"]) == (rows, 8, rows)
    for facts, folder in ((dataset, registered.dataset), (model, registered.model)):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert facts["files"] == len(files)
        assert facts["bytes"] == sum(path.stat().st_size for path in files)
    epochs = json.loads((registered.model / "epochs.json").read_text("utf-8"))
    auc = epochs[-1]["metrics"]["next"]["pooled"]["save"]["auc"]
    assert model["next_save_auc"] == pytest.approx(auc)
    assert model["data_version"] == dataset["data_version"] == manifest["data_version"]
    assert evaluation["passed"] is True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_below_the_gate_ends_the_run_well_and_unregistered(registered, refused, place):
    assert not refused.passed
    assert refused.registration is None
    assert "below gate.min_auc 1" in refused.reasons[0]
    client, runs = mlflow_runs(place, refused.parent_run_id)
    assert {each.info.run_id: each.info.status for each in runs}[
        refused.parent_run_id
    ] == "FINISHED"
    (version,) = client.search_model_versions()
    assert version.tags["thawline.parent_run_id"] == registered.parent_run_id


@pytest.mark.slow
def test_stages_that_do_not_read_what_has_changed_come_from_the_cache(registered, refused, place):
    assert (refused.dataset, refused.table) == (registered.dataset, registered.table)
    assert refused.model != registered.model
    _, runs = mlflow_runs(place, refused.parent_run_id)
    stages = [each.data.tags.get("thawline.stage", "parent") for each in runs]
    assert stages == ["parent", "finetune", "finetune", "evaluate"]
    assert runs[0].data.tags["thawline.cached"] == "windows, pretrain"
    _, (first, *_) = mlflow_runs(place, registered.parent_run_id)
    assert "thawline.cached" not in first.data.tags


@pytest.mark.slow
def test_fine_tuning_that_was_stopped_goes_on_in_the_next_try(refused, place):
    _, runs = mlflow_runs(place, refused.parent_run_id)
    tries = [each for each in runs if each.data.tags.get("thawline.stage") == "finetune"]
    assert [each.info.status for each in tries] == ["KILLED", "FINISHED"]
    assert [each.data.tags["thawline.attempt"] for each in tries] == ["1", "2"]
    (log,) = place.glob(f"{refused.model.parents[2].name}/pipeline.log")
    assert "finetune: goes on after step " in log.read_text("utf-8")
    assert list((place / "work" / "checkpoints").glob("*/*/checkpoint.json")) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stage_that_fails_leaves_its_error_and_no_open_run(tmp_path, place, workdir):
    log = tmp_path / "log.parquet"
    log.write_bytes(b"not Parquet")
    text = f"workdir: {workdir}\nevents: {{preset: feed, path: {log}}}"
    with pytest.raises(StageError) as caught:
        run(parse_config(text))
    assert caught.value.stage == "windows"
    assert str(log) in caught.value.what
    _, runs = mlflow_runs(workdir)
    assert {each.info.status for each in runs} == {"FAILED"}
    assert any(each.info.run_name == "retrain" for each in runs)
