"""What the trials of a study start from: datasets and tables made once each, at the same time."""

import json
import threading
from pathlib import Path

import pytest
import yaml
from test_study_runs import RECIPES, SMALL, Fake, runs_of

from thawline.config import Study, parse_config
from thawline.data.manifest import Dataset
from thawline.errors import ConfigError, DataError
from thawline.stages import study_inputs
from thawline.stages.study import run

pytest_plugins = ["mlflow_fixtures"]

ARMS = {
    "long": {},
    "long, frozen": {"set": {"finetune.recipe": "frozen"}},
    "short": {"set": {"windows.finetune_days": 2}},
}


class Tasks(Fake):
    """Keeps the tasks of what it runs."""

    def __init__(self):
        super().__init__()
        self.tasks = {}

    def __call__(self, job, stop):
        self.tasks[job.task.arm, job.task.seed] = job.task
        return super().__call__(job, stop)


@pytest.fixture
def studied(sqlite_config, tiny_config):
    """Runs a study with a fake runner; `dataset` is built unless it is given."""

    def start(study, runner, *overrides, **options):
        tree = tiny_config.model_dump(mode="json", exclude={"events"})
        tree |= SMALL | {"workdir": sqlite_config.workdir}
        alone = {"share_prefix": False}
        config = parse_config(yaml.safe_dump(tree), overrides)
        config = config.model_copy(update={"study": Study.model_validate(alone | study)})
        return run(config, Path(sqlite_config.workdir) / "store", runner=runner, **options)

    return start


@pytest.mark.parametrize(
    ("metric", "overrides", "said"),
    [
        (
            {"action": "like"},
            [],
            r"study.action: .* has no action 'like'[\s\S]*choose of save, click",
        ),
        ({"holdout": "in_window"}, ["windows.holdout_users=0"], r"study.holdout: .* in in_window"),
    ],
)
def test_a_metric_that_no_dataset_has_is_refused_before_anything_trains(
    studied, metric, overrides, said
):
    fake = Fake()
    with pytest.raises(ConfigError, match=said):
        studied({"grid": RECIPES} | metric, fake, *overrides)
    assert not fake.ran


def test_each_distinct_dataset_is_built_once_and_its_arms_get_it(studied, sqlite_config):
    tasks = Tasks()
    outcome = studied({"arms": ARMS, "seeds": [0, 1]}, tasks)
    store = Path(sqlite_config.workdir) / "store"
    folders = {arm: Path(tasks.tasks[arm, 0].dataset) for arm in ARMS}
    assert folders["long"] == folders["long, frozen"] != folders["short"]
    assert {folder.parent for folder in folders.values()} == {store / "datasets"}
    assert len(list((store / "datasets").iterdir())) == len(list((store / "tables").iterdir())) == 2
    data = {arm: Dataset.open(folder).manifest for arm, folder in folders.items()}
    days = {arm: (own.finetune.end - own.finetune.start).days for arm, own in data.items()}
    assert days["long"] - days["short"] == 1
    tables = {arm: tasks.tasks[arm, 0].table for arm in ARMS}
    assert tables["long"] == tables["long, frozen"] != tables["short"]
    assert [each.info.run_name for each in runs_of(sqlite_config.workdir)].count("windows") == 2
    assert len(outcome.facts["trials"]) == 6


def test_studies_share_a_store_and_have_their_reports_elsewhere(studied, sqlite_config):
    store = Path(sqlite_config.workdir) / "store"
    first, second = Fake(), Fake()
    one = studied({"arms": ARMS, "seeds": [0]}, first, report_to=store / "one")
    more = {"experiment": "two"}
    two = studied({"grid": RECIPES, "seeds": [0]}, second, report_to=store / "two", facts=more)
    # The config itself trains by freeze-until-last, so that co-train alone is new.
    assert [arm for arm, *_ in second.ran] == ["co-train"]
    assert not (store / "study.json").exists()
    assert json.loads((store / "two" / "study.json").read_text()) == two.facts
    assert (one.facts.get("experiment"), two.facts["experiment"]) == (None, "two")
    page = (store / "two" / "study.html").read_text(encoding="utf-8")
    for trial in two.facts["trials"]:
        link = f"../trials/{trial['trial']}/report.html"
        assert f'href="{link}"' in page
        assert (store / "two" / link).parent.is_dir()


def test_arms_are_told_from_their_own_configs(studied):
    arms = {"a": {}, "b": {"set": {"tables.item.optimizer": "sgd", "finetune.staleness": 0}}}
    outcome = studied({"arms": arms, "grid": RECIPES, "seeds": [0]}, Fake())
    last = outcome.facts["arms"][-1]
    assert last["name"] == "b, frozen"
    assert last["values"] == {"arm": "b", "finetune.recipe": "frozen"}
    assert last["resolved"] == {
        "recipe": "frozen",
        "table_learning_rate": 0.02,
        "optimizer": "sgd",
        "adapter": "off",
        "epochs": 2,
        "staleness": 0,
    }
    assert last["exposure"]["item"]["replayed"] == 0.0
    assert set(outcome.facts["data_versions"]) == {arm["name"] for arm in outcome.facts["arms"]}


def test_a_study_without_pages_has_links_to_none(studied):
    class Pages(Tasks):
        def __call__(self, job, stop):
            made = super().__call__(job, stop) | {"page": job.task.pages}
            (job.folder / "trial.json").write_text(json.dumps(made))
            return made

    with_pages, without = Pages(), Pages()
    studied({"grid": {"finetune.recipe": ["frozen"]}, "seeds": [0]}, with_pages)
    outcome = studied({"grid": RECIPES, "seeds": [0], "pages": False}, without)
    assert with_pages.tasks["frozen", 0].pages
    assert not without.tasks["co-train", 0].pages
    page = (outcome.folder / "study.html").read_text(encoding="utf-8")
    pages = {trial["trial"]: trial["page"] for trial in outcome.facts["trials"]}
    assert sorted(pages.values()) == [False, True]
    for trial, made in pages.items():
        assert (f'href="trials/{trial}/report.html"' in page) == made


def test_arms_of_one_config_run_once_and_both_have_its_figures(studied):
    fake = Fake()
    same = {"a": {}, "b": {"set": {"finetune.epochs": 2}}}
    outcome = studied({"arms": same, "seeds": [0, 1]}, fake)
    assert [arm for arm, *_ in fake.ran] == ["a", "a"]
    assert [row["seeds"] for row in outcome.main()] == [2, 2]
    assert outcome.main()[1]["words"] == "no difference with 2 seeds"


def test_a_dataset_that_cannot_be_built_fails_the_trials_of_its_arms_alone(studied):
    arms = ARMS | {"endless": {"set": {"windows.finetune_days": 500}}}
    fake = Fake()
    outcome = studied({"arms": arms, "seeds": [0]}, fake)
    assert [arm for arm, *_ in fake.ran] == list(ARMS)
    (failed,) = outcome.failed
    assert failed["arm"] == "endless"
    assert failed["error"]
    with pytest.raises(DataError, match=failed["error"].split()[0]):
        studied({"arms": {"endless": arms["endless"]}, "seeds": [0]}, Fake())


def test_arms_that_vary_the_data_take_no_dataset_that_was_given(studied, tiny_dataset):
    with pytest.raises(
        ConfigError, match=r"the arm short varies the data \(windows.finetune_days\); a dataset was"
    ):
        studied({"arms": ARMS, "seeds": [0]}, Fake(), dataset=tiny_dataset.root)


def test_distinct_tables_are_pretrained_at_the_same_time(studied, tiny_dataset, monkeypatch):
    meet, made = threading.Barrier(2, timeout=20), []

    def one(job, stop, threads, module, warm):
        assert warm is not None
        meet.wait()
        made.append((job.config.seed, job.task.dataset))
        if job.config.seed == 1:
            return job.task.result("failed", error="no luck", remedy="try again")
        Path(job.task.table).mkdir(parents=True)
        (Path(job.task.table) / "table.json").write_text("{}")
        job.folder.mkdir()
        return job.task.result("finished")

    monkeypatch.setattr(study_inputs, "run_process", one)
    study = {"grid": RECIPES, "seeds": [0, 1], "pretrain": "each-seed", "jobs": 2}
    tasks = Tasks()
    outcome = studied(study, tasks, dataset=tiny_dataset.root)
    assert sorted(made) == [(0, str(tiny_dataset.root)), (1, str(tiny_dataset.root))]
    assert {seed for _, seed in tasks.tasks} == {0}
    assert [(each["seed"], each["error"]) for each in outcome.failed] == [(1, "no luck")] * 2


@pytest.mark.slow
def test_processes_build_datasets_and_pretrain(studied, sqlite_config):
    outcome = studied({"arms": ARMS, "seeds": [0], "jobs": 2}, Fake())
    store = Path(sqlite_config.workdir) / "store"
    assert not outcome.failed
    assert len(list((store / "datasets").glob("*/manifest.json"))) == 2
    assert len(list((store / "tables").glob("*/item.safetensors"))) == 2
    assert not list(store.glob("*/*.job"))
