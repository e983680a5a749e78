"""Epochs that trials of a study share: which those are, trained once, and to the same bits."""

import json
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml
from conftest import TINY_FEED

from thawline.config import Config, parse_config
from thawline.errors import DataError
from thawline.stages import finetune, study_prefix, study_trial
from thawline.stages import study as stage
from thawline.stages.study_files import Task, read_result, write_task
from thawline.stages.study_prefix import with_prefixes
from thawline.stages.study_processes import Job, run_jobs
from thawline.study.prefixes import share, signatures
from thawline.training.loop import Trainer

pytest_plugins = ["mlflow_fixtures"]

OTHERS = {"user": {"column": "user_id", "rows": 50, "dim": 4}}
SMALL = {
    "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1, "dropout": 0.1},
    "pretrain": {"epochs": 0},
    "finetune": {"epochs": 3, "batch_size": 128, "recipe": "frozen"},
    "evaluation": {"epoch_requests": 20, "bootstrap": 0, "retrieval_requests": 0},
}


def chain(*overrides, context=("device",), table_key="t", data_version="v", **sections):
    config = parse_config(yaml.safe_dump({"simulate": {}, **SMALL, **sections}), overrides)
    return signatures(config, list(context), table_key=table_key, data_version=data_version)


@pytest.mark.parametrize(
    ("recipe", "epochs"),
    [
        ("frozen", 3),
        ("freeze-until-last", 2),
        ("window(1.5, 1)", 1),
        ("window(1, 1)", 1),
        ("window(0.75, 1)", 0),
        ("co-train", 0),
        ("train-first", 0),
        ("stratified", 0),
    ],
)
def test_as_many_epochs_can_be_shared_as_the_tables_are_frozen_in(recipe, epochs):
    own = chain(f"finetune.recipe={recipe}")
    assert own == chain()[:epochs]
    assert len(set(own)) == epochs


def test_one_table_that_trains_leaves_nothing_to_share():
    tables = {"tables": OTHERS}
    later = "finetune.schedule={user: {windows: [[2.25, 3]]}}"
    assert chain(later, **tables) == chain(**tables)[:2]
    assert chain("finetune.schedule={user: {recipe: co-train}}", **tables) == []
    assert chain("finetune.cross_fit=true", "finetune.staleness=0") == []
    assert chain("tables.engine=sharded") == []


@pytest.mark.parametrize(
    "same",
    [
        "tables.item.optimizer=dense-adam",
        "tables.item.learning_rate=0.5",
        "tables.item.reset_state_at_thaw=false",
        "tables.item.weight_decay=0.1",
        "tables.item.pull=0.1",
        "tables.item.drift_cap=0.1",
        "tables.item.frequency_scaling=0.5",
        "finetune.staleness=0",
        "finetune.cold_rows=ridge",
        "finetune.checkpoint.every_steps=7",
        "finetune.prefetch_batches=1",
        "finetune.accumulation.factor=mean",
        "finetune.schedule={item: {recipe: freeze-until-last, curve: cosine}}",
        "finetune.epochs=7",
        "gate.undecided=pass",
        "runtime.threads=3",
    ],
)
def test_what_is_not_read_while_tables_are_frozen_does_not_part_trials(same):
    assert chain(same)[:2] == chain()[:2]
    assert len(chain(same)) >= 2


@pytest.mark.parametrize(
    "other",
    [
        "seed=1",
        "model.dropout=0.2",
        "model.gradient_paths=[history]",
        "tables.item.dtype=bfloat16",
        "tables.user.rows=51",
        "tables.user.init=0.1",
        "negatives.in_batch=3",
        "finetune.batch_size=64",
        "finetune.learning_rate=0.1",
        "finetune.export=best",
        "finetune.examples=fresh",
        "finetune.clip_norm=1.0",
        "finetune.accumulation.micro_batches=2",
        "finetune.schedule={dense: {learning_rate: 0.1}}",
        "finetune.schedule={dense: {windows: [[0, 0.5]]}}",
        "finetune.schedule={dense: {warm_up: 0.5}}",
        # Its own group of the optimizer, so that the state is numbered otherwise.
        "finetune.schedule={history_action: {windows: [[0, 2]]}}",
        "windows.tiers.head=70",
        "evaluation.epoch_requests=30",
    ],
)
def test_what_decides_the_network_parts_trials_from_the_first_epoch_on(other):
    assert not set(chain(other, tables=OTHERS)) & set(chain(tables=OTHERS))


def test_a_curve_counts_whole_and_a_window_as_far_as_the_epochs_go():
    constant = "finetune.schedule={dense: {windows: [[0, 1], [1.5, %s]]}}"
    short, long = chain(constant % 2), chain(constant % 3)
    assert [one == other for one, other in zip(short, long, strict=True)] == [True, True, False]
    curved = "finetune.schedule={dense: {curve: cosine}}"
    assert not set(chain(curved)) & set(chain(curved, "finetune.epochs=4"))
    parts = "finetune.examples=replay"
    assert not set(chain(parts)) & set(chain(parts, "finetune.epochs=4"))


def test_data_and_pretrained_rows_part_trials():
    assert not set(chain()) & set(chain(table_key="u"))
    assert not set(chain()) & set(chain(data_version="w"))
    assert not set(chain()) & set(chain(context=("device", "hour")))


def test_what_two_trials_begin_with_is_trained_once_and_no_shorter_part_of_it():
    found = share({"co": [], "f": ["1", "2", "3"], "l": ["1", "2"], "w": ["1"], "v": ["1"]})
    told = [(own.key, own.epochs, own.trials, own.after) for own in found.prefixes]
    assert told == [("1", 1, ("f", "l", "w", "v"), None), ("2", 2, ("f", "l"), "1")]
    assert found.starts == {
        "co": (),
        "f": ("2", "1"),
        "l": ("2", "1"),
        "w": ("1",),
        "v": ("1",),
    }
    assert [found.after(trial) for trial in found.starts] == [None, "2", "2", "1", "1"]
    together = share({"f": ["1", "2", "3"], "l": ["1", "2"], "alone": ["4"]})
    assert [own.key for own in together.prefixes] == ["2"]
    assert together.starts == {"f": ("2",), "l": ("2",), "alone": ()}


def test_where_longer_parts_differ_what_they_have_in_common_is_trained_first():
    found = share({"a": ["1", "2"], "b": ["1", "2"], "c": ["1", "x"], "d": ["1", "x"]})
    assert [(own.key, own.starts) for own in found.prefixes] == [
        ("1", ()),
        ("2", ("1",)),
        ("x", ("1",)),
    ]


def test_what_was_trained_before_is_used_by_a_single_trial_too():
    chains = {"f": ["1", "2", "3"], "l": ["1", "2"], "w": ["1"]}
    found = share(chains, known=["2"])
    # Nobody but `w` would use the first epoch.
    assert found.prefixes == ()
    assert found.starts == {"f": ("2",), "l": ("2",), "w": ()}
    found = share(chains | {"v": ["1"]}, known=["2"])
    assert [own.key for own in found.prefixes] == ["1"]
    assert [found.after(trial) for trial in "flwv"] == [None, None, "1", "1"]
    found = share(chains, known=["1", "other"])
    assert [(own.key, own.starts, own.after) for own in found.prefixes] == [("2", ("1",), None)]
    assert found.after("f") == "2"
    assert found.after("w") is None


def test_a_job_waits_for_the_one_that_it_names_however_that_ends():
    ran, lock = [], threading.Lock()

    def runner(job, stop):
        with lock:
            ran.append(job.task.trial)
        if job.task.trial == "p":
            raise RuntimeError("no")
        return {"status": "finished"}

    def job(name, after=None):
        return Job(Task(name, "", {}, 0, 1, "", ""), None, Path(), after)

    jobs = [job("t", "q"), job("q", "p"), job("p"), job("u"), job("v", "nobody")]
    got = {job.task.trial: result["status"] for job, result in run_jobs(jobs, runner, 1, print)}
    assert ran == ["p", "q", "t", "u", "v"]
    assert got == dict.fromkeys("qtuv", "finished") | {"p": "failed"}


@pytest.fixture
def jobs(tiny_dataset, tmp_path):
    """Makes the jobs of trials of some recipes."""

    def make(*recipes, **options):
        return [
            Job(
                Task(recipe, recipe, {}, 0, 3, str(tiny_dataset.root), str(tmp_path / "t"), "run"),
                parse_config(
                    yaml.safe_dump({"simulate": {}, **SMALL}), [f"finetune.recipe={recipe}"]
                ),
                tmp_path / "trials" / recipe,
            )
            for recipe in recipes
        ]

    return make


RECIPES = ["co-train", "window(1.5,1)", "frozen", "freeze-until-last"]


def test_shared_epochs_stand_before_the_first_who_begins_with_them(jobs, tmp_path):
    folder = tmp_path / "prefixes"
    made = with_prefixes(jobs(*RECIPES), folder)
    names = [job.task.arm for job in made]
    assert names == [
        "co-train",
        "epoch 1 of 3 trials",
        "window(1.5,1)",
        "epochs 1 to 2 of 2 trials",
        "frozen",
        "freeze-until-last",
    ]
    one, two = made[1], made[3]
    keys = [None, None, one.task.trial, one.task.trial, two.task.trial, two.task.trial]
    assert [job.after for job in made] == keys
    assert (one.task.until, two.task.until) == (1, 2)
    assert one.folder == folder / one.task.trial
    states = [str(job.folder / "state") for job in (two, one)]
    assert made[4].task.starts == tuple(states)
    assert two.task.starts == tuple(states[1:])
    assert made[4].task.start() is None
    (one.folder / "state").mkdir(parents=True)
    assert made[4].task.start() == states[1]
    # What is there is not made again.
    again = with_prefixes(jobs(*RECIPES), folder)
    assert [job.task.until for job in again] == [None, None, 2, None, None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], True), (["--share-prefix"], True), (["--no-share-prefix"], False)],
)
def test_the_command_shares_unless_it_is_told_not_to(options, expected, monkeypatch, tmp_path):
    from thawline import cli

    told = []

    def stop(config, *arguments, **named):
        told.append(config.study.share_prefix)
        raise DataError("stopped", "no more")

    monkeypatch.setattr(stage, "run", stop)
    monkeypatch.setattr("sys.argv", ["thawline", "study", "-s", f"workdir={tmp_path}", *options])
    with pytest.raises(SystemExit):
        cli.main()
    assert told == [expected]


def test_a_trial_that_has_begun_goes_on_alone(jobs, tmp_path):
    own = jobs("frozen", "freeze-until-last")
    (own[0].folder / "model.checkpoints" / "key" / "epoch-002.50000000").mkdir(parents=True)
    assert with_prefixes(own, tmp_path / "prefixes") == own


def study(workdir, name, dataset, *, runner=None, **options):
    """Runs a study of `RECIPES` in this process."""
    tree = {**TINY_FEED, **SMALL, "workdir": str(workdir), "study": {}}
    tree["study"] = {"grid": {"finetune.recipe": RECIPES}, "seeds": [3], "keep_models": True}
    tree["study"] |= options
    return stage.run(
        Config.model_validate(tree), workdir / name, dataset=dataset.root, runner=runner or here
    )


@pytest.fixture
def studied(sqlite_config, tiny_dataset):
    return partial(study, Path(sqlite_config.workdir), dataset=tiny_dataset)


@pytest.fixture(scope="module")
def alone(mlflow_database, tiny_dataset, tmp_path_factory):
    """What a study finds that shares nothing."""
    workdir = tmp_path_factory.mktemp("alone")
    shutil.copyfile(mlflow_database, workdir / "mlflow.db")
    return study(workdir, "alone", tiny_dataset, share_prefix=False)


def here(job, stop):
    """What a process does, in this one."""
    write_task(job.folder, job.task, job.config)
    study_trial.main(job.folder)
    return read_result(job.folder)


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that are trained; the run is killed when that is one of `steps.kill`."""

    class Steps:
        trained, kill = 0, ()

    count = Steps()
    step = Trainer._train_on

    def counted(self, *arguments, **options):
        count.trained += 1
        return step(self, *arguments, **options)

    @contextmanager
    def bar(description, total):
        def show(done):
            if description == "finetune" and count.trained in count.kill:
                raise KeyboardInterrupt

        yield show

    monkeypatch.setattr(Trainer, "_train_on", counted)
    monkeypatch.setattr(finetune, "progress_bar", bar)
    return count


def by_arm(outcome):
    """Of each trial its model's files without times, its epochs without times, its figures."""
    found = {}
    for trial in outcome.facts["trials"]:
        folder = outcome.folder / "trials" / trial["trial"]
        files = {
            str(path.relative_to(folder / "model")): path.read_bytes()
            for path in sorted((folder / "model").rglob("*.*"))
        }
        epochs = json.loads(files.pop("epochs.json"))
        assert sum(name.endswith(".safetensors") for name in files) >= 2
        for epoch in epochs:
            for name in ("seconds", "waiting", "phases", "shared"):
                epoch.pop(name, None)
        metrics = json.loads((folder / "trial.json").read_text())["metrics"]
        found[trial["arm"]] = files, epochs, metrics
    assert len(found) == len(RECIPES)
    return found


def shared_epochs(outcome):
    return {trial["arm"]: trial["shared_epochs"] for trial in outcome.facts["trials"]}


PER_EPOCH = 3
"""Steps."""


TAKEN_OVER = {"co-train": 0, "window(1.5,1)": 1, "frozen": 2, "freeze-until-last": 2}
"""Epochs, by arm."""


def test_a_study_that_shares_epochs_finds_what_one_finds_that_does_not(studied, alone, steps):
    assert not (alone.folder / "prefixes").exists()
    assert set(shared_epochs(alone).values()) == {0}
    made = studied("shared")
    # Once the first epoch and the second; by themselves 3, 2, 1 and 1.
    assert steps.trained == (2 + 3 + 2 + 1 + 1) * PER_EPOCH
    assert by_arm(made) == by_arm(alone)
    assert shared_epochs(made) == TAKEN_OVER
    page = (made.folder / "study.html").read_text(encoding="utf-8")
    assert "5 of 12 epochs were taken over" in page
    assert "2 epochs shared" in page
    prefixes = sorted((made.folder / "prefixes").iterdir())
    assert [read_result(folder)["epochs"] for folder in prefixes] == [1, 1]


@pytest.mark.slow
def test_a_study_that_is_killed_in_shared_and_own_epochs_finds_the_same(studied, alone, steps):
    # In co-train, in each of the shared epochs, and in the last own one of all.
    steps.kill = (8, 11, 14, 27)
    for _ in steps.kill:
        with pytest.raises(KeyboardInterrupt):
            studied("killed")
    made = studied("killed")
    assert by_arm(made) == by_arm(alone)
    assert shared_epochs(made) == TAKEN_OVER


def test_shared_epochs_that_fail_are_trained_by_each(studied, steps, monkeypatch, capfd):
    work = study_prefix.run

    def fail(config, task, folder):
        if task.until == 2:
            raise RuntimeError("no luck")
        return work(config, task, folder)

    monkeypatch.setattr(study_prefix, "run", fail)
    made = studied("made")
    assert shared_epochs(made) == dict.fromkeys(RECIPES, 1) | {"co-train": 0}
    assert steps.trained == (1 + 3 + 2 + 2 + 2) * PER_EPOCH
    assert made.failed == []
    said = capfd.readouterr().err
    assert "epochs 1 to 2 of 2 trials, seed 3: trained by each: RuntimeError: no luck" in said


def test_another_study_uses_what_was_shared_before(studied, steps):
    def only_shared(job, stop):
        if job.task.until is None:
            return job.task.result("failed", error="left out", remedy="")
        return here(job, stop)

    with pytest.raises(DataError, match="left out"):
        studied("made", runner=only_shared)
    assert steps.trained == 2 * PER_EPOCH
    made = studied("made")
    assert steps.trained == (2 + 3 + 2 + 1 + 1) * PER_EPOCH
    assert sum(shared_epochs(made).values()) == 5
