"""Experiments that run end to end on the tiny feed, each trial in this process."""

import pyarrow.parquet as pq
import pytest
import yaml
from conftest import TINY_FEED
from experiment_runs import in_process

from thawline.config import parse_config
from thawline.stages.experiment import failures_of, run
from thawline.study.experiments import EXPERIMENTS, accumulation, staleness
from thawline.study.trials import read_study

pytestmark = pytest.mark.slow

SMALL = {
    "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
    "pretrain": {"epochs": 1},
    "finetune": {"batch_size": 64},
    "evaluation": {"epoch_requests": 20},
    # At one rate alone, so that there are fewer arms.
    "study": {"seeds": [0], "grid": {"tables.item.learning_rate": [0.02]}},
}


@pytest.fixture
def ran_of(tmp_path):
    """Runs an experiment and gives its outcome."""

    def start(name, **sections):
        tree = TINY_FEED | SMALL | {"workdir": str(tmp_path)} | sections
        outcome = run(parse_config(yaml.safe_dump(tree)), name, runner=in_process)
        assert outcome.folder == tmp_path / "experiments" / name
        return outcome

    return start


@pytest.fixture
def ran(ran_of):
    """Runs an experiment: its outcome, and the sections of its page as the files tell it."""

    def start(name, **sections):
        outcome = ran_of(name, **sections)
        facts, table = read_study(outcome.folder)
        return outcome, EXPERIMENTS[name].page(facts, table, outcome.rows)

    return start


def test_self_influence(ran):
    outcome, (section,) = ran("self-influence")
    assert not outcome.failed
    assert len(outcome.facts["trials"]) == 4
    replayed = {
        arm["name"]: arm["schedule"]["components"]["item"]["replayed"]
        for arm in outcome.facts["arms"]
    }
    assert replayed == {
        "train-first, replay": 1.0,
        "train-first, fresh": 0.0,
        "frozen, replay": 0.0,
        "frozen, fresh": 0.0,
    }
    assert "undecided with 1 seed" in section.words[0]


def test_the_leak_of_a_simulated_feed_that_is_read_as_positives(ran):
    outcome, (gaps, logits) = ran("leak")
    assert not outcome.failed
    table = pq.read_table(outcome.folder / "trials.parquet").to_pylist()
    found = {
        (row["arm"], row["slice"])
        for row in table
        if row["final"] and row["figure"] == "positive_logit" and row["value"] is not None
    }
    assert {arm for arm, _ in found} == {arm["name"] for arm in outcome.facts["arms"]}
    assert "mean logit of positives" in logits.html
    assert "with the leak" in gaps.words[0]


def test_content(ran):
    outcome, (section,) = ran("content", study={"seeds": [0]})
    assert not outcome.failed
    epochs = {arm["name"]: arm["epochs"] for arm in outcome.facts["arms"]}
    assert sorted(epochs.values()) == [1, 3, 3, 3, 3]
    assert len(set(outcome.facts["data_versions"].values())) == 1
    assert "3 epochs, co-train, against one epoch" in section.words[0]


def test_a_rate_that_diverges_is_a_finding_of_staleness(ran, monkeypatch):
    monkeypatch.setattr(staleness, "STALE", (0, 4))
    monkeypatch.setattr(staleness, "MULTIPLIERS", {0: (0.01, 1e6), 4: (0.01, 1e6)})
    monkeypatch.setattr(staleness, "ADAPTIVE", {"lazy Adam": "lazy-adam"})
    feed = TINY_FEED["simulate"] | {"zipf": 3.0}
    outcome, (rates, _) = ran("staleness", study={"seeds": [0]}, simulate=feed)
    # Lookups that miss four updates end the short epoch before a loss is infinite.
    assert [trial["arm"] for trial in outcome.failed] == ["SGD x 1e+06, 0 late"]
    assert not failures_of(EXPERIMENTS["staleness"], outcome)
    page = (outcome.folder / "study.html").read_text(encoding="utf-8")
    worries = page.partition("What to worry about")[2].partition("</dl>")[0]
    assert "With 1 seed" in worries
    assert "SGD" not in worries
    assert rates.words[:2] == [
        f"{late} updates late: stable up to x 0.01, diverged at x 1e+06." for late in (0, 4)
    ]


def test_accumulation(ran, monkeypatch):
    monkeypatch.setattr(accumulation, "OPTIMIZERS", {"SGD": "sgd"})
    outcome, (section,) = ran("accumulation", study={"seeds": [0]})
    assert not outcome.failed
    assert section.words[0].startswith("SGD, log loss against exact: fused ")


def test_small_tables_are_measured_without_a_dataset(ran_of, tmp_path):
    outcome = ran_of("small-tables")
    assert not outcome.failed
    assert "lookups a step" in outcome.facts["words"][0]
    page = (tmp_path / "experiments" / "small-tables" / "study.html").read_text(encoding="utf-8")
    assert "What others report" in page
    assert "one-hot / scatter" in page
    assert not (tmp_path / "experiments" / "datasets").exists()
    front = (tmp_path / "experiments" / "index.html").read_text(encoding="utf-8")
    assert 'href="small-tables/study.html"' in front
