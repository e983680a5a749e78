"""The components: what they promise to Kubeflow and what their bodies do with a stage's answer."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from kfp import dsl
from mlflow import MlflowClient
from safetensors.torch import load_file

from components import COMPONENTS, evaluate, finish, start
from components.readme import readme, readme_path
from thawline.config import Items, parse_config
from thawline.errors import ConfigError, DataError, TrackingError
from thawline.model.bundle import Bundle
from thawline.stages import pretrain as pretrain_stage
from thawline.stages import start as start_stage
from thawline.stages.evaluate import Verdict
from thawline.stages.finish import run as close_runs
from thawline.tracking import pipeline, runs
from thawline.tracking.fetch import FetchedModel

pytest_plugins = ["mlflow_fixtures"]

ROOT = Path(__file__).parent.parent
PARAMETER_TYPES = {"String", "Integer", "Float", "Boolean", "List", "PipelineTaskFinalStatus"}
each_component = pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: c.name)


@pytest.fixture
def workdir(sqlite_config, monkeypatch):
    """A place with an MLflow database, in a pipeline run."""
    monkeypatch.setenv("THAWLINE_RUN_ID", "run-1")
    return Path(sqlite_config.workdir)


@pytest.fixture
def parent(workdir):
    """The open parent run of the pipeline run."""
    return pipeline.open_parent(parse_config(config_text(workdir)), "retrain")


def config_text(workdir):
    return f"workdir: {workdir}\nsimulate: {{}}"


def status(state):
    return dsl.PipelineTaskFinalStatus(state, "run-1", "exit-handler-1", None, None)


def run_status(workdir, run_id):
    return MlflowClient(f"sqlite:///{workdir}/mlflow.db").get_run(run_id).info.status


@each_component
def test_a_module_imports_nothing_but_the_standard_library_kfp_and_the_factory(component):
    path = Path(inspect.getsourcefile(component.python_func))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    allowed = {"kfp", "components.factory", *sys.stdlib_module_names}
    assert imported - allowed == set()


@each_component
def test_parameters_are_of_simple_types(component):
    inputs = (component.component_spec.inputs or {}).values()
    outputs = (component.component_spec.outputs or {}).values()
    types = {each.type for each in (*inputs, *outputs) if "@" not in each.type}
    assert types <= PARAMETER_TYPES


@each_component
def test_every_input_and_output_is_described(component):
    spec = component.component_spec
    items = {**(spec.inputs or {}), **(spec.outputs or {})}
    assert [name for name, item in items.items() if not item.description] == []


@each_component
def test_the_readme_says_what_the_docstring_says(component):
    assert readme_path(component).read_text(encoding="utf-8") == readme(component)


@each_component
def test_the_shipped_source_compiles_and_defines_the_function_alone(component):
    container = component.component_spec.implementation.container
    source = container.command[-1]
    top = ast.parse(source).body
    functions = [node.name for node in top if isinstance(node, ast.FunctionDef)]
    assert functions == [component.name]
    assert "components" not in source


def test_start_puts_the_inputs_that_were_set_into_the_config(workdir):
    started = start_stage.run(
        config_text(workdir) + "\nseed: 7",
        {
            "seed": -1,
            "windows.finetune_days": 3,
            "pretrain.epochs": 0,
            "finetune.recipe": "window(0, 1)",
            "gate.min_auc": -1.0,
            "tracking.model_name": "",
        },
    )
    config = parse_config(started.config)
    assert (config.seed, config.windows.finetune_days, config.pretrain.epochs) == (7, 3, 0)
    assert config.finetune.recipe == "window(0, 1)"
    assert config.gate == parse_config(config_text(workdir)).gate
    assert config.tracking.model_name == "thawline-ranker"


class Version(SimpleNamespace):
    """A registered version."""


def registry(monkeypatch, aliases):
    """A registry with one model; aliases to version numbers."""

    def find_version(config, uri):
        name, _, alias = uri.removeprefix("models:/").partition("@")
        if not alias:
            name, _, number = name.partition("/")
            return Version(name=name, version=number)
        return Version(name=name, version=aliases[alias]) if alias in aliases else None

    monkeypatch.setattr(start_stage, "find_version", find_version)


def test_a_warm_start_takes_catalog_and_rows_of_the_champion_by_its_version(workdir, monkeypatch):
    registry(monkeypatch, {"champion": "7"})
    text = config_text(workdir) + "\ntracking: {model_name: feed}"
    warm = start_stage.run(text, {}, start_from_champion=True)
    for written in (warm.config, warm.windows_config, warm.pretrain_config):
        assert parse_config(written).windows.previous == "models:/feed/7"
    for written in (warm.config, warm.pretrain_config):
        assert parse_config(written).pretrain.start_from == "models:/feed/7"
    cold = parse_config(start_stage.run(text, {}).config)
    assert (cold.windows.previous, cold.pretrain.start_from) == (None, None)


def test_the_first_warm_start_of_all_is_a_cold_one(workdir, monkeypatch):
    registry(monkeypatch, {})
    started = start.python_func(config_text(workdir), start_from_champion=True)
    config = parse_config(started[0])
    assert (config.windows.previous, config.pretrain.start_from) == (None, None)


def test_an_alias_in_the_config_becomes_a_version_which_tells_cached_results_apart(
    workdir, monkeypatch
):
    text = config_text(workdir) + "\npretrain: {start_from: models:/feed@challenger}"
    made = []
    for number in ("3", "4"):
        registry(monkeypatch, {"challenger": number})
        made.append(start_stage.run(text, {}))
    assert [parse_config(each.config).pretrain.start_from for each in made] == [
        "models:/feed/3",
        "models:/feed/4",
    ]
    assert made[0].pretrain_config != made[1].pretrain_config
    assert made[0].windows_config == made[1].windows_config


def test_pretraining_starts_from_the_rows_of_a_registered_model(tmp_path, monkeypatch):
    def fetch(config, uri, folder):
        assert uri == "models:/feed/7"
        return FetchedModel(folder / "model", "feed", "7", {})

    monkeypatch.setattr(pretrain_stage, "fetch_model", fetch)
    config = parse_config("simulate: {}\npretrain: {start_from: models:/feed/7}")
    with pretrain_stage.start_folder(config) as folder:
        assert folder.name == "model"
        assert folder.parent.exists()
    assert not folder.parent.exists()
    monkeypatch.setattr(pretrain_stage, "fetch_model", lambda *_: None)
    with pretrain_stage.start_folder(config) as folder:
        assert folder is None


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ("gate.min_auc=0.9", ("windows", "pretrain", "finetune")),
        ("tracking.model_name=other", ("windows", "pretrain", "finetune")),
        ("gate.holdout=in_window", ("windows", "pretrain")),
        ("finetune.recipe=frozen", ("windows", "pretrain")),
        ("evaluation.epoch_requests=7", ("windows", "pretrain")),
        ("pretrain.epochs=9", ("windows", "finetune")),
        ("model.dim=16", ("windows",)),
        ("windows.finetune_days=3", ()),
        ("seed=4", ()),
        ("tracking.experiment=other", ()),
    ],
)
def test_a_stage_comes_from_the_cache_where_nothing_that_it_reads_has_changed(changes, same):
    before, after = parse_config("simulate: {}"), parse_config("simulate: {}", [changes])
    kept = [
        stage
        for stage in ("windows", "pretrain", "finetune")
        if start_stage.for_stage(before, stage) == start_stage.for_stage(after, stage)
    ]
    assert tuple(kept) == same


def test_start_opens_one_parent_run_that_the_other_stages_find(workdir):
    started = start.python_func(config_text(workdir))
    again = start.python_func(config_text(workdir))
    config = parse_config(config_text(workdir))
    assert started[1] == again[1] == pipeline.find_parent(config)
    assert run_status(workdir, started[1]) == "RUNNING"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("simulate: {}\nfinetun: {}", ConfigError, "did you mean finetune"),
        ("simulate: {}\nfinetune: {recipe: melt}", ConfigError, "melt"),
        ("simulate: {}\ntracking: {model_name: a b}", TrackingError, "tracking.model_name"),
        ("events: {preset: feed, path: nowhere.parquet}", DataError, "nowhere.parquet"),
    ],
)
def test_start_refuses_what_would_fail_later_and_opens_no_run(workdir, text, error, message):
    with pytest.raises(error, match=message):
        start.python_func(f"workdir: {workdir}\n{text}")
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    assert client.search_runs(["0", "1"]) == []


def test_a_stage_outside_a_pipeline_run_is_told_what_to_set(workdir, monkeypatch):
    monkeypatch.delenv("THAWLINE_RUN_ID")
    with pytest.raises(TrackingError, match="THAWLINE_RUN_ID"):
        start.python_func(config_text(workdir))


def test_the_source_version_changes_with_the_log_and_with_nothing_else(workdir):
    log = workdir / "log.parquet"
    log.write_bytes(b"one")
    config = parse_config(f"events: {{preset: feed, path: {log}}}")
    before = start_stage.source_version(config)
    assert start_stage.source_version(config) == before
    log.write_bytes(b"other")
    assert start_stage.source_version(config) != before
    simulated = parse_config("simulate: {}")
    assert start_stage.source_version(simulated) == "simulated"
    items = workdir / "items.csv"
    items.write_text("pin\n1\n")
    with_items = config.model_copy(update={"items": Items(path=str(items), item_id="pin")})
    first = start_stage.source_version(with_items)
    items.write_text("pin\n1\n2\n")
    assert start_stage.source_version(with_items) != first


def test_the_code_version_names_the_sources_that_run():
    version, _, digest = start_stage.code_version().partition("+")
    assert version == "0.1.0"
    assert len(digest) == 12
    assert start_stage.code_version() == f"{version}+{digest}"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("SUCCEEDED", "FINISHED"),
        ("COMPLETE", "FINISHED"),
        ("CACHED", "FINISHED"),
        ("FAILED", "FAILED"),
        ("CANCELLED", "KILLED"),
        ("CANCELED", "KILLED"),
        ("UNHEARD_OF", "FAILED"),
        ("", "FAILED"),
    ],
)
def test_finish_ends_the_parent_run_whatever_kubeflow_calls_the_end(
    workdir, parent, state, expected
):
    finish.python_func(config_text(workdir), status(state))
    assert run_status(workdir, parent) == expected


def test_a_stage_killed_without_a_word_makes_an_unclear_end_a_failure(workdir, parent):
    config = parse_config(config_text(workdir))
    with runs.stage_run(config, "evaluate", parent):
        pass
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    killed = client.create_run(
        client.get_run(parent).info.experiment_id,
        tags={"mlflow.parentRunId": parent, "thawline.stage": "register"},
    )
    finish.python_func(config_text(workdir), status("RUNNING"))
    assert run_status(workdir, parent) == "FAILED"
    assert run_status(workdir, killed.info.run_id) == "FAILED"


def test_an_unclear_end_after_every_stage_went_well_is_a_good_one(workdir, parent):
    config = parse_config(config_text(workdir))
    with (
        pytest.raises(ValueError, match="first attempt"),
        runs.stage_run(config, "evaluate", parent),
    ):
        raise ValueError("first attempt")
    with runs.stage_run(config, "evaluate", parent):
        pass
    finish.python_func(config_text(workdir), status("RUNNING"))
    assert run_status(workdir, parent) == "FINISHED"


def test_a_retried_pipeline_opens_its_parent_run_again(workdir, parent):
    finish.python_func(config_text(workdir), status("FAILED"))
    assert start.python_func(config_text(workdir))[1] == parent
    assert run_status(workdir, parent) == "RUNNING"


def test_finish_has_nothing_to_close_where_the_pipeline_never_started(workdir):
    finish.python_func(config_text(workdir), status("FAILED"))

    assert close_runs(config_text(workdir), "FAILED") == ""


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """The evaluate component on a metrics tree of `next`: its answer and its artifacts."""

    def evaluate_tree(tree):
        def scored(config, dataset, model, out, *, parent_run_id):
            Path(out).mkdir()
            (Path(out) / "report.html").write_text("<p>report", encoding="utf-8")
            return Verdict(passed=False, reasons=["too low", "too few"], metrics={"next": tree})

        monkeypatch.setattr("thawline.stages.evaluate.run", scored)
        monkeypatch.setattr("thawline.tracking.pipeline.find_parent", lambda config: "parent")
        artifacts = {
            "evaluation": dsl.Artifact(uri=str(tmp_path / "evaluation")),
            "metrics": dsl.Metrics(uri=str(tmp_path / "metrics")),
            "classification": dsl.ClassificationMetrics(uri=str(tmp_path / "classification")),
            "report": dsl.HTML(uri=str(tmp_path / "report")),
        }
        folder = SimpleNamespace(path=str(tmp_path))
        return evaluate.python_func("simulate: {}", folder, folder, **artifacts), artifacts

    return evaluate_tree


def test_undefined_figures_never_reach_the_artifacts_of_the_ui(evaluated, tmp_path):
    figures = {"auc": 0.75, "log_loss": float("inf"), "hit@3": None, "positives": 3}
    curves = {"save": {"roc": None, "oracle_roc": None, "reliability": []}}
    tree = {"requests": 9, "pooled": {"save": figures}, "tiers": {}, "oracle": None, "trivial": {}}
    passed, artifacts = evaluated(tree | {"curves": curves})
    assert passed is False
    assert artifacts["metrics"].metadata == {
        "next/pooled/save/auc": 0.75,
        "next/pooled/save/positives": 3.0,
    }
    assert artifacts["classification"].metadata == {}
    assert artifacts["evaluation"].metadata == {"passed": False, "reasons": "too low; too few"}
    assert (tmp_path / "report").read_text(encoding="utf-8") == "<p>report"


def test_the_ui_gets_the_roc_and_the_counts_where_as_many_are_called_positive_as_are(evaluated):
    # 10 positives among 50: 4 of them and 4 others are above 0.6, 8 and 12 above 0.2.
    roc = {"fpr": [0, 0.1, 0.3, 1], "tpr": [0, 0.4, 0.8, 1], "threshold": [1, 0.6, 0.2, 0.1]}
    figures = {"auc": 0.75, "positives": 10, "candidates": 50}
    tree = {"requests": 9, "pooled": {"save": figures}, "tiers": {}, "oracle": None, "trivial": {}}
    _, artifacts = evaluated(tree | {"curves": {"save": {"roc": roc}}})
    found = artifacts["classification"].metadata
    assert [list(point.values()) for point in found["confidenceMetrics"]] == [
        [1, 0, 0],
        [0.6, 0.4, 0.1],
        [0.2, 0.8, 0.3],
        [0.1, 1, 1],
    ]
    matrix = found["confusionMatrix"]
    assert [spec["displayName"] for spec in matrix["annotationSpecs"]] == ["no save", "save"]
    assert [row["row"] for row in matrix["rows"]] == [[36, 4], [6, 4]]


@pytest.mark.slow
def test_a_component_runs_by_its_own_command_in_an_empty_folder_without_a_home(workdir):
    place = workdir / "empty"
    place.mkdir()
    container = start.component_spec.implementation.container
    inputs = {"parameterValues": {"config": config_text(workdir)}}
    outputs = {
        "outputFile": str(workdir / "out.json"),
        "parameters": {
            name: {"outputFile": str(workdir / name)} for name in start.component_spec.outputs
        },
    }
    executor_input = json.dumps({"inputs": inputs, "outputs": outputs})
    arguments = [part.replace("{{$}}", executor_input) for part in container.args]
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "THAWLINE_RUN_ID": "run-1",
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [*container.command, *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((workdir / "out.json").read_text(encoding="utf-8"))["parameterValues"]
    assert parse_config(written["config"]).workdir == str(workdir)
    assert list(place.iterdir()) == []


DRIVER = """
import json, os, sys
from types import SimpleNamespace

from kfp import dsl

import thawline
from thawline.stages import start

work = sys.argv[1]
sources = json.load(open(work + "/sources.json"))
place = lambda kind, name: getattr(dsl, kind)(uri=f"{work}/out/{name}", metadata={})

def body(name):
    space = {}
    exec(sources[name], space)
    return space[name]

os.mkdir(work + "/out")
text = open(work + "/config.yaml").read()
started = body("start")(text)
resolved, _, source, code, *cached = started
dataset = place("Dataset", "dataset")
table, model = place("Model", "table"), place("Model", "model")
version = body("windows")(cached[0], source, code, dataset)
body("pretrain")(cached[1], version, code, dataset, table)
body("finetune")(cached[2], version, code, dataset, table, model)
outputs = {}
for name, kind in json.loads(sys.argv[2]).items():
    outputs[name] = place(kind, name)
passed = body("evaluate")(resolved, dataset, model, **outputs)
registration = place("Artifact", "registration")
body("register")(resolved, model, outputs["evaluation"], registration)
warm = body("start")(text, start_from_champion=True, pretrain_epochs=0)
grown, rows = place("Dataset", "grown"), place("Model", "rows")
version = body("windows")(warm[4], source, code, grown)
body("pretrain")(warm[5], version, code, grown, rows)
status = dsl.PipelineTaskFinalStatus("SUCCEEDED", "run-1", "exit-handler-1", None, None)
body("finish")(text, status)
facts = {"passed": passed, "uid": os.getuid(), "from": thawline.__file__, "warm": warm[0]}
print("FACTS " + json.dumps(facts | registration.metadata))
"""
"""Calls the bodies of the components as Kubeflow ships them, one after the other."""

NOBODY = 65534


@pytest.fixture
def anybodys():
    """A folder that every user may use, as pytest's own may not be."""
    with tempfile.TemporaryDirectory(prefix="thawline-wheel-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def install_wheel(folder):
    """An environment with the wheel of this checkout, and the other packages of this one."""
    source = folder / "source"
    for name in ("thawline", "components", "pipelines"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
    run_python(sys.executable, "-c", build, str(folder), cwd=source)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    base = copy_python(folder / "python")
    run_python(
        str(base), "-m", "venv", "--without-pip", str(folder / "venv"), env=libraries(folder)
    )
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    # Taken as a plain folder, so that this checkout is not on the path as well.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = ("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index")
    run_python(
        *(sys.executable, *pip, "--quiet", "--no-compile", str(wheel)),
        cwd=folder,
        env=libraries(folder),
    )
    return python


def copy_python(folder):
    """This Python's interpreter and library, which may lie where another user may not look."""
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(prefix / "bin" / version, folder / "bin")
    left = shutil.ignore_patterns("__pycache__", "test", "site-packages", "config-*", "pkgconfig")
    shutil.copytree(prefix / "lib" / version, folder / "lib" / version, ignore=left)
    for library in (prefix / "lib").glob("libpython*"):
        shutil.copy(library, folder / "lib")
    return folder / "bin" / version


def libraries(folder):
    return {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(folder / "python" / "lib")}


def run_python(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_bodies_run_from_the_wheel_alone_without_a_home_as_a_user_who_owns_nothing(
    anybodys, workdir, tiny_config
):
    python = install_wheel(anybodys)
    work, empty = anybodys / "work", anybodys / "empty"
    work.mkdir()
    empty.mkdir()
    shutil.copyfile(workdir / "mlflow.db", work / "mlflow.db")
    tree = tiny_config.model_dump(mode="json", exclude={"events"}) | {
        "workdir": str(work),
        "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
        "pretrain": {"epochs": 1, "negatives": 32},
        "finetune": {"epochs": 1, "batch_size": 64},
        "evaluation": {"epoch_requests": 0},
        "gate": {"min_auc": 0.0, "rules": []},
    }
    (work / "config.yaml").write_text(yaml.safe_dump(tree))
    sources = {c.name: c.component_spec.implementation.container.command[-1] for c in COMPONENTS}
    (work / "sources.json").write_text(json.dumps(sources))
    made = {
        name: each.type.split("@")[0].removeprefix("system.")
        for name, each in evaluate.component_spec.outputs.items()
        if "@" in each.type
    }
    user = {}
    if os.getuid() == 0:
        for path in (work, *work.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    output = run_python(
        *(str(python), "-P", "-c", DRIVER, str(work), json.dumps(made)),
        cwd=empty,
        env={**libraries(anybodys), "THAWLINE_RUN_ID": "run-1", "OMP_NUM_THREADS": "1"},
        **user,
    )
    facts = json.loads(output.rpartition("FACTS ")[2])
    assert facts["uid"] != 0
    assert facts["from"].startswith(str(anybodys / "venv"))
    assert (facts["passed"], facts["version"]) == (True, "1")
    assert list(empty.iterdir()) == []
    assert {each.info.status for each in runs_of(work)} == {"FINISHED"}
    # The second half of the driver: a warm start, without another epoch of pretraining.
    warm = parse_config(facts["warm"])
    assert warm.windows.previous == warm.pretrain.start_from == "models:/thawline-ranker/1"
    (rows,) = load_file(work / "out" / "rows" / "item.safetensors").values()
    champion = Bundle.load(work / "out" / "model").weights["item"]
    torch.testing.assert_close(rows, champion, rtol=0, atol=0)


def runs_of(workdir):
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("thawline")
    return client.search_runs([experiment.experiment_id])
