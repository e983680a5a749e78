"""Studies that run: each trial once, resumed, halved, with trials that fail or are killed."""

import io
import json
import os
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID as PARENT
from rich.console import Console

from thawline.cli import study_table
from thawline.cli.study_table import line, table
from thawline.config import Study, parse_config
from thawline.errors import BusyError, DataError
from thawline.folders import locked_folder
from thawline.stages import study_trial
from thawline.stages.study import Standing, run
from thawline.stages.study_files import Task, read_result, write_result, write_task
from thawline.stages.study_processes import Job, run_jobs, run_process, threads_of

pytest_plugins = ["mlflow_fixtures"]

RECIPES = {"finetune.recipe": ["co-train", "frozen"]}
SMALL = {
    "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
    "pretrain": {"epochs": 0},
    "finetune": {"epochs": 2, "batch_size": 128},
    "evaluation": {"epoch_requests": 20, "bootstrap": 0, "retrieval_requests": 0},
}


def task(name="t1", **more):
    own = {"arm": "co-train", "values": {}, "seed": 0, "round": 1, "dataset": "", "table": ""}
    return Task(trial=name, **(own | more))


def result(job, auc):
    figures = {"click": {"auc": auc}}
    tree = {"next": {"requests": 5, "pooled": figures, "tiers": {}}}
    made = job.task.result(
        "finished",
        seconds=1.0,
        exported_epoch=1,
        actions=["click"],
        data_version="v",
        schedule=None,
        epochs=[tree],
        metrics=tree,
    )
    job.folder.mkdir(parents=True, exist_ok=True)
    write_result(job.folder, made)
    return made


class Fake:
    """Counts what it runs; the AUC of a trial is what `auc` says of its config."""

    def __init__(self, auc=lambda config: 0.7):
        self.auc = auc
        self.ran = []

    def __call__(self, job, stop):
        self.ran.append((job.task.arm, job.task.seed, job.task.round))
        return result(job, self.auc(job.config))


@pytest.fixture
def studied(sqlite_config, tiny_config, tiny_dataset):
    """Runs a study with a fake runner on the tiny dataset."""

    def start(study, runner, *overrides, **options):
        tree = tiny_config.model_dump(mode="json", exclude={"events"})
        tree |= SMALL | {"workdir": sqlite_config.workdir}
        config = parse_config(yaml.safe_dump(tree), overrides)
        config = config.model_copy(update={"study": Study.model_validate(study)})
        out = Path(sqlite_config.workdir) / "study"
        return run(config, out, dataset=tiny_dataset.root, runner=runner, **options)

    return start


def runs_of(workdir):
    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("thawline")
    return client.search_runs([experiment.experiment_id])


def test_no_trial_runs_twice_and_a_larger_grid_runs_what_is_new(studied, sqlite_config):
    fake, study = Fake(), {"grid": RECIPES, "seeds": [0, 1]}
    outcome = studied(study, fake)
    assert sorted(fake.ran) == [
        ("co-train", 0, 2),
        ("co-train", 1, 2),
        ("frozen", 0, 2),
        ("frozen", 1, 2),
    ]
    assert [trial["status"] for trial in outcome.facts["trials"]] == ["finished"] * 4
    assert len(list((outcome.folder / "tables").iterdir())) == 1
    pretrained = [
        each for each in runs_of(sqlite_config.workdir) if each.info.run_name == "pretrain"
    ]
    assert len(pretrained) == 1
    again, changes = Fake(), []
    grid = {"finetune.recipe": ["frozen", "co-train", "train-first"]}
    more = studied(
        {"grid": grid, "seeds": [1, 0]}, again, show=lambda one, _: changes.append(one.found)
    )
    assert sorted(again.ran) == [("train-first", 0, 2), ("train-first", 1, 2)]
    assert changes.count(True) == 4
    assert pq.read_table(more.folder / "trials.parquet").num_rows == 6 * 2
    parents = [each for each in runs_of(sqlite_config.workdir) if PARENT not in each.data.tags]
    assert [(each.info.run_name, each.info.status) for each in parents] == [
        ("study", "FINISHED")
    ] * 2


def test_a_study_that_was_stopped_reports_what_is_finished_and_goes_on(studied, sqlite_config):
    class Stopped(Fake):
        def __call__(self, job, stop):
            if len(self.ran) == 2:
                raise KeyboardInterrupt
            return super().__call__(job, stop)

    first, study = Stopped(), {"grid": RECIPES, "seeds": [0, 1]}
    with pytest.raises(KeyboardInterrupt):
        studied(study, first)
    folder = Path(sqlite_config.workdir) / "study"
    facts = json.loads((folder / "study.json").read_text())
    assert len(facts["trials"]) == 2
    assert "2 trials finished" in (folder / "study.html").read_text(encoding="utf-8")
    assert {each.info.status for each in runs_of(sqlite_config.workdir)} == {"KILLED", "FINISHED"}
    second = Fake()
    studied(study, second)
    assert len(first.ran) == len(second.ran) == 2
    assert not set(first.ran) & set(second.ran)


def test_a_trial_that_fails_is_shown_stops_no_other_and_is_tried_again(studied):
    class Failing(Fake):
        def __call__(self, job, stop):
            if (job.task.arm, job.task.seed) == ("frozen", 0):
                self.ran.append("failed")
                raise RuntimeError("out of luck")
            return super().__call__(job, stop)

    first, study = Failing(), {"grid": RECIPES, "seeds": [0, 1]}
    outcome = studied(study, first)
    assert len(first.ran) == 4
    (failed,) = outcome.failed
    assert (failed["arm"], failed["seed"]) == ("frozen", 0)
    assert failed["error"] == "RuntimeError: out of luck"
    assert "frozen, seed 0 failed: RuntimeError: out of luck" in (
        outcome.folder / "study.html"
    ).read_text(encoding="utf-8")
    (row,) = [row for row in outcome.main() if row["arm"] == "frozen"]
    assert (row["seeds"], row["n"]) == (1, 1)
    second = Fake()
    studied(study, second)
    assert second.ran == [("frozen", 0, 2)]


def test_where_every_trial_fails_the_first_error_is_named(studied):
    def fail(job, stop):
        raise RuntimeError("no disk")

    with pytest.raises(DataError, match=r"no trial came to an end; .*no disk"):
        studied({"grid": RECIPES, "seeds": [0]}, fail)


def test_halving_lets_the_best_arms_of_a_short_round_go_on(studied):
    order = ["frozen", "alternate", "train-first", "co-train"]
    fake = Fake(lambda config: 0.5 + 0.1 * order.index(config.finetune.recipe))
    study = {
        "grid": {"finetune.recipe": order},
        "seeds": [0, 1],
        "baseline": "train-first",
        "halving": {"epochs": [1], "eta": 4},
    }
    outcome = studied(study, fake)
    assert sorted(fake.ran[:8]) == sorted((arm, seed, 1) for arm in order for seed in (0, 1))
    # Of 4 the best 1, which is co-train, and what it is compared with.
    assert sorted(fake.ran[8:]) == [
        ("co-train", 0, 2),
        ("co-train", 1, 2),
        ("train-first", 0, 2),
        ("train-first", 1, 2),
    ]
    dropped = {arm["name"]: arm["dropped_after"] for arm in outcome.facts["arms"]}
    assert dropped == {"frozen": 1, "alternate": 1, "train-first": None, "co-train": None}
    assert [row["arm"] for row in outcome.main()] == ["train-first", "co-train"]
    assert outcome.main()[1]["difference"] == pytest.approx(0.1)


def test_jobs_run_so_many_at_a_time_and_are_told_to_stop_when_the_caller_is(tmp_path):
    running, most, stopped, lock = set(), [], [], threading.Lock()
    meet = threading.Barrier(2, timeout=20)

    def runner(job, stop):
        with lock:
            running.add(job.task.trial)
            most.append(len(running))
        if job.task.trial in "ab":
            meet.wait()
        else:
            stop.wait(20)
            stopped.append(job.task.trial)
            return None
        with lock:
            running.discard(job.task.trial)
        return {"status": "finished"}

    jobs = [Job(task(name), None, tmp_path) for name in "abcdef"]
    got = []
    found = run_jobs(jobs, runner, 2, lambda job: None)
    for job, _ in found:
        got.append(job.task.trial)
        if len(got) == 2:
            break
    found.close()
    assert sorted(got) == ["a", "b"]
    assert max(most) == 2
    assert set(stopped) <= {"c", "d"}
    assert threads_of(10_000) == 1


def test_a_study_in_the_same_folder_waits_for_none(studied, sqlite_config):
    folder = Path(sqlite_config.workdir) / "study"
    with locked_folder(folder), pytest.raises(BusyError, match="study"):
        studied({"grid": RECIPES}, Fake())


@pytest.mark.parametrize("name", ["file", "file/below", "closed"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()
    # A test may run as one who may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).name != "closed")
    with (
        pytest.raises(DataError, match=f"{name} cannot be written"),
        locked_folder(tmp_path / name),
    ):
        pass


def test_what_a_study_shows_in_words_and_as_a_table():
    standings = [
        Standing("k1", "co-train", 0, 2, "finished", 0.7, 12.0),
        Standing("k2", "co-train", 1, 2, "finished", 0.8, 10.0),
        Standing("k3", "frozen", 0, 2, "failed", error="nan"),
        Standing("k4", "frozen", 1, 2),
    ]
    assert line(standings[0], standings, "auc") == (
        "study: 3 of 4 done, co-train, seed 0 finished: auc 0.7000, 12 s"
    )
    assert line(standings[2], standings, "auc").endswith("frozen, seed 0 failed: nan")
    found = table(standings, "auc")
    columns = [list(column.cells) for column in found.columns]
    assert columns[0] == ["co-train", "frozen"]
    assert columns[2] == ["[green]0✓[/] [green]1✓[/]", "[red]0✕[/] 1·"]
    assert columns[3:] == [["0.7500", "\N{EN DASH}"], ["22", "\N{EN DASH}"]]


def test_on_a_terminal_the_table_stands_once_trials_run(monkeypatch):
    shown = io.StringIO()
    terminal = partial(Console, file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(study_table, "Console", lambda **_: terminal())
    found = Standing("k1", "co-train", 0, 2, "finished", 0.7, 12.0, found=True)
    waiting = Standing("k2", "frozen", 0, 2)
    with study_table.progress("auc") as show:
        show(found, [found, waiting])
        assert shown.getvalue() == ""
        waiting.status = "running"
        show(waiting, [found, waiting])
        waiting.status, waiting.score = "finished", 0.6543
        show(waiting, [found, waiting])
    assert "0.6543" in shown.getvalue()
    assert "co-train" in shown.getvalue()


@pytest.fixture
def job(sqlite_config, tiny_dataset, tmp_path):
    """A trial whose table folder does not exist."""
    config = parse_config(f"workdir: {sqlite_config.workdir}\nsimulate: {{}}")
    own = task(dataset=str(tiny_dataset.root), table=str(tmp_path / "nowhere"))
    return Job(own, config, tmp_path / "trial")


def test_a_process_that_dies_leaves_its_last_words(job, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("ls"))
    found = run_process(job, threading.Event(), 1)
    assert found["status"] == "failed"
    assert found["error"].startswith("its process ended with code 2:\n")
    assert "thawline.stages.study_trial" in found["error"]
    assert "goes on from its last checkpoint" in found["remedy"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("no requests", "widen the window"), ("no requests", "widen the window")),
        (ValueError("broken"), ("ValueError: broken", "this is a defect")),
    ],
)
def test_any_error_of_a_trial_becomes_its_result(job, monkeypatch, capsys, error, said):
    def fail(config, task, folder):
        assert (config, task, folder) == (job.config, job.task, job.folder)
        raise error

    monkeypatch.setattr(study_trial, "run", fail)
    job.folder.mkdir()
    write_result(job.folder, {"status": "failed"})
    write_task(job.folder, job.task, job.config)
    assert read_result(job.folder) is None
    study_trial.main(job.folder)
    found = read_result(job.folder)
    assert (found["status"], found["error"]) == ("failed", said[0])
    assert said[1] in found["remedy"]
    assert str(error) in capsys.readouterr().err


def test_a_process_is_ended_when_the_study_is_stopped(job):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    assert run_process(job, stop, 1) is None
    assert time.monotonic() - started < 60
    assert read_result(job.folder) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "finetune.recip=a,b"], "finetune.recip: unknown key"),
        (["--seeds", "0,x"], "'x' is no whole number"),
        (["--halving", "1,x"], "--halving '1,x' holds no numbers"),
        (["--eta", "2"], "--eta without --halving"),
        (["--metric", "best"], "study.metric"),
        (["--report-only", "nowhere"], "holds no study"),
    ],
)
def test_the_command_names_the_option_at_fault(options, message, monkeypatch, capfd, tmp_path):
    from thawline import cli

    monkeypatch.setattr("sys.argv", ["thawline", "study", "-s", f"workdir={tmp_path}", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
def test_the_command_trains_in_processes_and_shows_what_failed(
    tmp_path, tiny_config, tiny_dataset, mlflow_database, no_mlflow_environment, monkeypatch, capfd
):
    """Two arms that differ by a learning rate, of which one is beyond all reason."""
    from thawline import cli

    shutil.copyfile(mlflow_database, tmp_path / "mlflow.db")
    tree = tiny_config.model_dump(mode="json", exclude={"events"}) | SMALL
    tree |= {"workdir": str(tmp_path), "study": {"grid": {"finetune.learning_rate": [1e-3, 1e30]}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    command = ["thawline", "study", "-c", str(tmp_path / "config.yaml"), "--seeds", "0"]
    command += ["--jobs", "2", "--dataset", str(tiny_dataset.root)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capfd.readouterr()
    assert stop.value.code == 1, shown.err
    assert "failed: learning_rate 1e+30, seed 0: the loss became nan" in shown.out
    assert "2 of 2 done" in shown.err
    facts = json.loads((tmp_path / "study" / "study.json").read_text())
    states = {trial["arm"]: trial["status"] for trial in facts["trials"]}
    assert states == {"learning_rate 0.001": "finished", "learning_rate 1e+30": "failed"}
    (trained,) = [each for each in facts["arms"] if each["schedule"]]
    assert trained["name"] == "learning_rate 0.001"
    children = {each.info.run_name: each for each in runs_of(tmp_path)}
    own = children["learning_rate 0.001, seed 0"]
    nested = [
        each.info.run_name
        for each in runs_of(tmp_path)
        if each.data.tags.get(PARENT) == own.info.run_id
    ]
    assert sorted(nested) == ["evaluate", "finetune"]
    assert children["learning_rate 1e+30, seed 0"].info.status == "FAILED"
