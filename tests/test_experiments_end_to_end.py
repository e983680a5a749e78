"""Experiments on recipes, tables and remedies, end to end in one store on the tiny feed."""

from contextlib import contextmanager

import pytest
from experiment_runs import in_process, made_up, small_config

from thawline.stages import experiment as stage
from thawline.stages.experiment import run, run_all
from thawline.study.experiments import EXPERIMENTS, adapters, optimizers, windows
from thawline.study.experiments.consistency import ARMS
from thawline.study.trials import read_study
from thawline.tracking.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def unlogged(monkeypatch):
    """Leaves the metrics of trials out of MLflow, which would take as long as they train."""
    monkeypatch.setattr(Run, "log_metrics", lambda *_, **__: None)


@pytest.fixture(scope="module")
def shared_config(tmp_path_factory):
    """A small config, and so a store, that the tests of a module share."""
    return small_config(tmp_path_factory.mktemp("experiments"))


@pytest.fixture
def ran(shared_config):
    """Runs an experiment: its outcome, the one section of its page and what it ran anew."""

    def start(name):
        new = []

        def runner(job, stop):
            new.append(job.task.arm)
            return in_process(job, stop)

        outcome = run(shared_config, name, runner=runner)
        assert not outcome.failed
        facts, table = read_study(outcome.folder)
        (section,) = EXPERIMENTS[name].page(facts, table, outcome.rows)
        page = (outcome.folder / "study.html").read_text(encoding="utf-8")
        assert section.title in page
        assert EXPERIMENTS[name].reported[0].partition(":")[0] in page
        return outcome, section, new

    return start


def replayed(outcome, table="item"):
    return {
        arm["name"]: arm["schedule"]["components"][table]["replayed"]
        for arm in outcome.facts["arms"]
    }


def test_timing(ran, shared_config):
    outcome, section, new = ran("timing")
    assert replayed(outcome) == {
        "window(0, 1)": 1.0,
        "window(0.25, 1)": 0.75,
        "window(0.5, 1)": 0.5,
        "window(0.75, 1)": 0.25,
        "window(1, 1)": 0.0,
    }
    assert "undecided with 1 seed" in section.words[0]
    assert len(new) <= 5
    assert (outcome.folder.parent / "index.html").exists()


def test_which_table(ran):
    outcome, section, _ = ran("which-table")
    trained = {table: replayed(outcome, table) for table in ("item", "user")}
    assert {name for name, share in trained["item"].items() if not share} == {
        "item frozen",
        "all frozen",
        "one epoch",
    }
    assert {name for name, share in trained["user"].items() if not share} == {
        "user frozen",
        "all frozen",
        "one epoch",
    }
    assert section.words[1].startswith("item frozen, against none frozen: ")


def test_gradient_paths(ran):
    outcome, section, _ = ran("gradient-paths")
    auc = {
        row["arm"]: row["mean"]
        for row in outcome.rows
        if (row["figure"], row["slice"], row["action"]) == ("auc", "pooled", "click")
        and row["holdout"] == "next"
    }
    assert len(set(auc.values())) == 7
    assert len(section.words) == 7


def test_consistency_adapters_and_remedies_share_what_they_have_in_common(ran, monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", ("off", "full"))
    outcome, section, new = ran("consistency")
    # Experiments that ran before may have had some of them.
    assert set(new) <= set(ARMS)
    assert "Re-anchoring against freeze-until-last on cold items" in section.words[0]
    contrasts = {row["arm"] for row in outcome.rows if row["contrast"]}
    assert contrasts == {
        "re-anchor minus freeze-until-last",
        "stratified minus freeze-until-last",
    }
    _, section, new = ran("adapters")
    assert [arm for arm in new if arm != "frozen"] == [
        "co-train, full adapter",
        "frozen, full adapter",
        "freeze-until-last, full adapter",
    ]
    assert len(section.words) == 3
    outcome, section, new = ran("remedies")
    assert new == [
        "cross-fitted rows",
        "cold rows by mean drift",
        "cold rows by ridge",
        "cold rows by neighbours",
        "re-init",
    ]
    facts = outcome.facts
    cold = {
        row["arm"]: row["difference"]
        for row in outcome.rows
        if (row["figure"], row["slice"], row["holdout"]) == ("auc", "cold", "next")
        and row["action"] == facts["action"]
        and row["baseline"]
    }
    assert all(cold[f"cold rows by {how}"] for how in ("mean drift", "ridge", "neighbours"))


def test_optimizers(ran, monkeypatch):
    two = {name: optimizers.OPTIMIZERS[name] for name in ("dense Adam", "SGD")}
    monkeypatch.setattr(optimizers, "OPTIMIZERS", two)
    outcome, section, new = ran("optimizers")
    assert len(new) == 10
    rates = {arm["name"]: arm["resolved"]["table_learning_rate"] for arm in outcome.facts["arms"]}
    assert rates["SGD, co-train"] == 1_000 * rates["dense Adam, co-train"]
    assert "with a tail drift of" in section.words[0]


def test_windows(ran, monkeypatch):
    monkeypatch.setattr(windows, "EPOCHS", (1, 2))
    outcome, section, _ = ran("windows")
    versions = outcome.facts["data_versions"]
    assert len(set(versions.values())) == 2
    assert versions["3 days, 1 epoch"] != versions["1 day, 1 epoch"]
    assert len(versions) == 10
    assert section.words[1].startswith("1 day, 2 epochs: freezing until the last epoch ")


def test_all_of_them_go_on_where_they_were_and_say_what_is_left_out(tmp_path, monkeypatch):
    kept = {name: EXPERIMENTS[name] for name in ("timing", "consistency", "windows")}
    monkeypatch.setattr(stage, "EXPERIMENTS", kept)
    config = small_config(tmp_path)
    config = config.model_copy(
        update={"windows": config.windows.model_copy(update={"finetune_days": 1})}
    )
    told, new = [], []

    def broken(job, stop):
        if job.task.arm in ("window(1, 1)", *ARMS):
            raise RuntimeError("no disk")
        return made_up(job, stop)

    def counting(job, stop):
        new.append(job.task.arm)
        return made_up(job, stop)

    @contextmanager
    def progress(experiment):
        told.append(experiment.name)
        yield lambda changed, standings: None

    first = {ran.experiment.name: ran for ran in run_all(config, runner=broken, progress=progress)}
    assert first["windows"].left_out.startswith("windows.finetune_days is 1")
    assert first["timing"].failures == 1
    assert "no disk" in str(first["consistency"].error)
    assert told == ["timing", "consistency"]
    second = {ran.experiment.name: ran for ran in run_all(config, runner=counting)}
    # In two epochs the last window is what freeze-until-last is.
    assert new == ["window(1, 1)", *(arm for arm in ARMS if arm != "freeze-until-last")]
    assert (second["timing"].failures, second["consistency"].failures) == (0, 0)
    index = (tmp_path / "experiments" / "index.html").read_text(encoding="utf-8")
    assert EXPERIMENTS["consistency"].title in index
    assert EXPERIMENTS["windows"].title not in index
