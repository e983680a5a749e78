"""The example in which co-training loses: that it lays out as a study and that its parts run.

Not that the effect is there, which takes minutes; docs/findings.md has what was measured.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from thawline.config import load_config
from thawline.stages.study import run
from thawline.stages.study_report import check
from thawline.training.recipes import make_schedule

pytest_plugins = ["mlflow_fixtures"]
EXAMPLE = Path(__file__).parent.parent / "examples" / "one_epoch.yaml"
TINY = (
    *("simulate.impressions=6_000", "simulate.users=60", "simulate.items=200"),
    *("model={dim: 8, layers: 1, ffn: 16, mlp: [16]}", "pretrain.epochs=1"),
    *("tables.user.rows=100", "tables.user.dim=4", "study.seeds=[0]", "study.jobs=1"),
)


@pytest.mark.slow
def test_the_study_sets_co_training_with_dense_adam_against_freezing_until_the_last_epoch():
    config = load_config(EXAMPLE)
    trials = check(config).trials()

    assert [(trial.arm.name, trial.seed) for trial in trials[:2]] == [
        ("co-train", 0),
        ("freeze-until-last", 0),
    ]
    assert len(trials) == 6
    for trial in trials:
        assert trial.config.tables.item == config.tables.item
        assert trial.config.tables.others == config.tables.others
        schedule = make_schedule(trial.config, [])
        late = trial.arm.name == "freeze-until-last"
        for table in ("item", "user"):
            shares = [schedule.of(table).share(epoch) for epoch in range(3)]
            assert shares == ([0, 0, 1] if late else [1, 1, 1])
    assert config.tables.item.optimizer == "dense-adam"
    assert config.tables.others["user"].optimizer == "dense-adam"
    # At the network's learning rate, rows would be no faster than what reads them.
    assert config.tables.item.learning_rate >= 10 * config.finetune.learning_rate


@pytest.mark.slow
def test_the_study_runs_on_a_tiny_feed_and_gives_each_epoch_by_tier(tmp_path):
    config = load_config(EXAMPLE, [*TINY, f"workdir={tmp_path}"])

    outcome = run(config, tmp_path / "study")

    assert outcome.failed == []
    rows = pq.read_table(tmp_path / "study" / "trials.parquet").to_pylist()
    auc = [row for row in rows if row["figure"] == "auc" and not row["final"]]
    found = {
        (row["study.arms"], row["epoch"])
        for row in auc
        if (row["holdout"], row["action"], row["slice"]) == ("next", "click", "head")
    }
    assert found == {
        (arm, epoch) for arm in ("co-train", "freeze-until-last") for epoch in (1, 2, 3)
    }
