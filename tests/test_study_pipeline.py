"""The study pipeline: what is compiled, what its tasks do, and two trials of it run locally."""

import json

import pyarrow.parquet as pq
import pytest
import yaml
from google.protobuf import json_format
from mlflow import MlflowClient

from pipelines.bind import SHARED_MEMORY
from pipelines.commands import COMPILED
from pipelines.ir import Compiled, dangling
from pipelines.local import execute
from pipelines.study import build
from thawline.config import parse_config
from thawline.errors import ConfigError, DataError, TrackingError
from thawline.stages import study_tasks, study_trial
from thawline.stages.study_files import gather, read_result
from thawline.tracking import pipeline

pytest_plugins = ["mlflow_fixtures"]

PACKAGE = COMPILED / "study.yaml"
GRID = "finetune.recipe=co-train,frozen; pretrain.epochs=0,1"


@pytest.fixture(scope="module")
def compiled():
    return Compiled.parse(PACKAGE.read_text(encoding="utf-8"))


@pytest.fixture
def workdir(sqlite_config, monkeypatch):
    monkeypatch.setenv("THAWLINE_RUN_ID", "run-1")
    return sqlite_config.workdir


def text(workdir, **more):
    return yaml.safe_dump({"workdir": workdir, "simulate": {}} | more)


def loops(compiled):
    """Tasks by the loop that they are in, outermost first."""
    found = {}
    for name, component in compiled.spec.components.items():
        if component.WhichOneof("implementation") == "dag":
            found[name] = set(component.dag.tasks)
    return found


def test_trials_are_a_loop_within_a_loop_over_pretrainings_inside_the_exit_handler(compiled):
    assert dangling(compiled) == []
    found = loops(compiled)
    assert found["comp-exit-handler-1"] == {"design", "windows", "trials"}
    assert found["comp-trials"] == {"for-loop-1", "study"}
    assert found["comp-for-loop-1"] == {"pretrain", "arms", "for-loop-2", "gather"}
    assert found["comp-for-loop-2"] == {"trial"}
    assert set(compiled.spec.root.dag.tasks) == {"exit-handler-1", "finish"}


def test_what_is_dear_comes_from_the_cache_and_depends_on_versions(compiled):
    cached = {}
    for component in compiled.spec.components.values():
        for name, task in component.dag.tasks.items():
            if task.caching_options.enable_cache:
                cached[name] = set(task.inputs.parameters)
    versions = {"data_version", "code_version"}
    groups = {"exit-handler-1", "trials", "for-loop-1", "for-loop-2"}
    assert cached.keys() - groups == {"windows", "pretrain", "trial"}
    assert versions < cached["trial"]
    assert versions < cached["pretrain"]


def test_the_inputs_sorted_by_name_read_as_a_story_and_each_is_documented(compiled):
    inputs = compiled.spec.root.input_definitions.parameters
    written = list(build().component_spec.inputs)
    assert written == sorted(written) == sorted(inputs)
    assert all(each.description and each.HasField("default_value") for each in inputs.values())


def test_a_loops_input_that_nothing_iterates_over_is_found(compiled):
    tree = json_format.MessageToDict(compiled.spec)
    item = tree["components"]["comp-for-loop-1"]["dag"]["tasks"]["for-loop-2"]["parameterIterator"]
    broken = PACKAGE.read_text(encoding="utf-8").replace(
        f"itemInput: {item['itemInput']}", "itemInput: another"
    )
    problems = dangling(Compiled.parse(broken))
    assert any(item["itemInput"] in problem for problem in problems)


def test_a_trial_on_a_gpu_gets_what_a_gpu_task_needs_and_the_volume_of_its_checkpoints():
    gpu = Compiled.parse((COMPILED / "study.gpu.yaml").read_text(encoding="utf-8"))
    wanted = {
        name.removeprefix("exec-")
        for name, executor in gpu.deployment.executors.items()
        if executor.container.resources.HasField("accelerator")
    }
    assert wanted == {"pretrain", "trial"}
    settings = gpu.kubernetes["exec-trial"]
    assert [each.mount_path for each in settings.empty_dir_mounts] == [SHARED_MEMORY]
    assert [each.mount_path for each in settings.pvc_mount] == ["/work"]
    assert settings.tolerations
    assert settings.node_selector.labels
    told = gpu.deployment.executors["exec-trial"].container.env
    assert {each.name: each.value for each in told} == {
        "THAWLINE_DEVICE": "cuda",
        "THAWLINE_WORK": "/work",
    }
    assert not gpu.kubernetes["exec-study"].pvc_mount


def test_trials_are_listed_by_the_pretraining_that_they_start_from(workdir):
    started = study_tasks.lay_out(
        text(workdir), {"finetune.epochs": 2, "study.baseline": ""}, grid=GRID, seeds="0, 1"
    )
    # One of 0 epochs and one of 1, which seeds share.
    assert [parse_config(each).pretrain.epochs for each in started.tables] == [0, 1]
    assert [parse_config(each).seed for each in started.tables] == [0, 0]
    assert "\n" not in "".join(started.tables)
    listed = [json.loads(each) for each in study_tasks.arms_of(started.config, started.tables[1])]
    assert listed == [
        {"arm": f"{recipe}, epochs 1", "seed": seed}
        for seed in (0, 1)
        for recipe in ("co-train", "frozen")
    ]
    each = study_tasks.lay_out(
        text(workdir), {"study.pretrain": "each-seed"}, grid=GRID, seeds="0, 1"
    )
    assert [parse_config(one).seed for one in each.tables] == [0, 0, 1, 1]
    config = parse_config(started.config)
    assert (config.finetune.epochs, config.study.seeds) == (2, [0, 1])
    assert (
        MlflowClient(f"sqlite:///{workdir}/mlflow.db")
        .get_run(pipeline.find_parent(config))
        .info.run_name
        == "study"
    )


def test_arms_of_one_config_are_one_trial_whose_figures_both_get(workdir, tmp_path):
    arms = {"a": {}, "b": {"set": {"model.adapter": "bias"}}, "c": {"set": {"model.dim": 64}}}
    study = {"arms": arms, "contrasts": {"x": {"a": 1, "b": -1}}}
    started = study_tasks.lay_out(text(workdir, study=study), {}, seeds="3")
    listed = [json.loads(each) for each in study_tasks.arms_of(started.config, started.tables[0])]
    assert listed == [{"arm": "a", "seed": 3}, {"arm": "b", "seed": 3}]
    for arm, auc in (("a", 0.7), ("b", 0.6)):
        folder = tmp_path / "ended" / arm
        folder.mkdir(parents=True)
        tree = {"next": {"requests": 5, "pooled": {"click": {"auc": auc}}, "tiers": {}}}
        found = {
            "trial": arm,
            "arm": arm,
            "values": {"arm": arm},
            "seed": 3,
            "round": 3,
            "status": "finished",
            "seconds": 1.0,
            "exported_epoch": 3,
            "actions": ["click"],
            "data_version": "v",
            "schedule": None,
            "epochs": [tree],
            "metrics": tree,
        }
        (folder / "trial.json").write_text(json.dumps(found))
    outcome = study_tasks.collect(started.config, [tmp_path / "ended"], tmp_path / "study")
    assert [(row["arm"], row["mean"]) for row in outcome.main()] == [
        ("a", 0.7),
        ("b", 0.6),
        ("c", 0.7),
        ("x", pytest.approx(0.1)),
    ]
    names = pq.read_table(tmp_path / "study" / "trials.parquet")["study.arms"].to_pylist()
    assert set(names) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("study", "grid", "seeds", "message"),
    [
        ({"halving": {"epochs": [1]}}, "", "", "study.halving: a pipeline's trials"),
        ({}, "finetune.recip=a", "", "finetune.recip: unknown key"),
        ({}, "", "one", "'one' is no whole number"),
        (
            {"arms": {"a": {}, "b": {"set": {"windows.finetune_days": 2}}}},
            "",
            "",
            r"the arm b varies the data \(windows.finetune_days\); a pipeline builds one",
        ),
    ],
)
def test_a_study_that_cannot_be_is_refused_and_opens_no_run(workdir, study, grid, seeds, message):
    with pytest.raises(ConfigError, match=message):
        study_tasks.lay_out(text(workdir, study=study), {}, grid=grid, seeds=seeds)
    with pytest.raises(TrackingError, match="no run of the experiment"):
        pipeline.find_parent(parse_config(text(workdir)))


def test_a_trial_that_its_config_lets_fail_is_a_result_and_a_lost_server_is_none(
    workdir, tmp_path, monkeypatch
):
    started = study_tasks.lay_out(text(workdir), {}, grid="finetune.recipe=frozen", seeds="4")
    (which,) = study_tasks.arms_of(started.config, started.tables[0])

    def fail_with(error):
        def run(config, task, folder):
            assert (config.seed, config.finetune.recipe, task.round) == (4, "frozen", 3)
            raise error

        monkeypatch.setattr(study_trial, "run", run)
        return study_tasks.trial(started.config, which, "data", "table", tmp_path / "out", "v1")

    found = fail_with(DataError("no requests", "widen the window"))
    assert (found["status"], found["error"]) == ("failed", "no requests")
    assert read_result(tmp_path / "out") == found
    with pytest.raises(TrackingError):
        fail_with(TrackingError("MLflow does not answer", "start it"))
    assert gather([tmp_path / "out"], tmp_path / "all") == 1
    with pytest.raises(DataError, match=r"no trial came to an end; .*no requests"):
        study_tasks.collect(started.config, [tmp_path / "all"], tmp_path / "study")


def test_a_study_counts_as_finished_though_a_trial_failed(workdir, monkeypatch):
    config = parse_config(text(workdir))
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    for study, parent in (("FINISHED", "FINISHED"), ("FAILED", "FAILED")):
        monkeypatch.setenv("THAWLINE_RUN_ID", f"study-{study}")
        run_id = pipeline.open_parent(config, "study")
        experiment = client.get_run(run_id).info.experiment_id
        for stage, status in (("windows", "FINISHED"), ("trial", "FAILED"), ("study", study)):
            tags = {"mlflow.parentRunId": run_id, "thawline.stage": stage}
            child = client.create_run(experiment, tags=tags)
            client.set_terminated(child.info.run_id, status)
        pipeline.close_parent(config, "RUNNING")
        assert client.get_run(run_id).info.status == parent


@pytest.mark.slow
def test_two_trials_run_from_the_compiled_file_to_the_report(workdir, tiny_config, tmp_path):
    tree = tiny_config.model_dump(mode="json", exclude={"events"})
    tree |= {
        "workdir": workdir,
        "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
        "pretrain": {"epochs": 0},
        "finetune": {"epochs": 1, "batch_size": 128},
        "evaluation": {"epoch_requests": 0, "bootstrap": 0, "retrieval_requests": 0},
    }
    arguments = {
        "config": json.dumps(tree),
        "step3_study_grid": "finetune.recipe=co-train,frozen",
        "step3_study_seeds": "0",
    }
    execute(PACKAGE, tmp_path / "root", arguments)
    (folder,) = (tmp_path / "root").glob("*/study/study")
    table = pq.read_table(folder / "trials.parquet")
    assert set(table["arm"].to_pylist()) == {"co-train", "frozen"}
    page = next((tmp_path / "root").glob("*/study/report")).read_text(encoding="utf-8")
    assert "2 trials finished: 2 arms, 1 seed." in page
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    parent = client.get_run(pipeline.find_parent(parse_config(text(workdir))))
    assert (parent.info.run_name, parent.info.status) == ("study", "FINISHED")
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    assert sorted(child.info.run_name for child in children) == [
        "co-train, seed 0",
        "frozen, seed 0",
        "pretrain",
        "study",
        "windows",
    ]
    assert {child.info.status for child in children} == {"FINISHED"}
