"""Fine-tuning that begins with epochs which another run has trained, to the same bits as alone."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from conftest import TINY_FEED, built

from thawline.config import Config
from thawline.errors import DataError
from thawline.model.bundle import save_table
from thawline.stages import finetune
from thawline.stages.shared_epochs import shared_of
from thawline.training.loop import Trainer

STEPS = 5
"""Of an epoch."""
EPOCHS = 3
TABLES = {"user": {"column": "user_id", "rows": 50, "dim": 4}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """The tiny feed, with the users' ids."""
    config = Config.model_validate({**TINY_FEED, "tables": TABLES})
    return built(config, tmp_path_factory.mktemp("data") / "feed")


@pytest.fixture(scope="module")
def table(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(dataset.catalog.num_rows, 8, generator=generator)
    save_table(folder / "item.safetensors", rows)
    return folder


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """With the runs' database."""
    return tmp_path_factory.mktemp("work")


def configured(workdir, recipe, item=None, *, keep=2, **options):
    tree = {
        **TINY_FEED,
        "workdir": str(workdir),
        "model": {"dim": 8, "ffn": 16, "mlp": [16], "layers": 1, "dropout": 0.1},
        "tables": {"item": item or {}, **TABLES},
        "finetune": {
            "recipe": recipe,
            "epochs": EPOCHS,
            "batch_size": 64,
            "clip_norm": 1.0,
            "checkpoint": {"every_steps": 2, "keep": keep},
            **options,
        },
        "evaluation": {"epoch_requests": 50},
    }
    return Config.model_validate(tree)


@pytest.fixture
def tune(dataset, table, workdir, tmp_path):
    """Fine-tunes into a folder of `tmp_path`; gives what `require_same` takes."""

    def tune(name, recipe, item=None, *, start=None, until=None, **options):
        config = configured(workdir, recipe, item, **options)
        out = tmp_path / name
        epochs = finetune.run(config, dataset.root, table, out, start=start, until=until)
        return out, epochs

    return tune


@pytest.fixture(scope="module")
def alone(dataset, table, workdir, tmp_path_factory):
    """What a run gives that shares nothing; each is made once."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def run(recipe, item=None):
        key = f"{recipe} {item}"
        if key not in made:
            out = folder / str(len(made))
            config = configured(workdir, recipe, item)
            made[key] = out, finetune.run(config, dataset.root, table, out)
        return made[key]

    return run


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that are trained; at step `steps.kill` the run is killed."""

    class Steps:
        trained, kill = 0, None

    count = Steps()
    step = Trainer._train_on

    def counted(self, *arguments, **options):
        count.trained += 1
        return step(self, *arguments, **options)

    @contextmanager
    def bar(description, total):
        def show(done):
            if (description, done) == ("finetune", count.kill):
                raise KeyboardInterrupt

        yield show

    monkeypatch.setattr(Trainer, "_train_on", counted)
    monkeypatch.setattr(finetune, "progress_bar", bar)
    return count


def kill_at(steps, number, run):
    steps.kill = number
    with pytest.raises(KeyboardInterrupt):
        run()
    steps.kill = None


def weights(model):
    """Every file of the model but for times."""
    files = sorted(path for path in model.rglob("*.*") if path.name != "epochs.json")
    assert sum(path.suffix == ".safetensors" for path in files) >= 3
    return {str(path.relative_to(model)): path.read_bytes() for path in files}


def figures(epochs):
    left_out = {"seconds", "waiting", "phases", "shared"}
    return [{name: own for name, own in each.items() if name not in left_out} for each in epochs]


def require_same(made, expected):
    (model, epochs), (other, other_epochs) = made, expected
    assert weights(model) == weights(other)
    assert figures(epochs) == figures(other_epochs)
    assert json.loads((model / "epochs.json").read_text()) == epochs
    assert not model.with_name(f"{model.name}.checkpoints").exists()


ADAM = {"optimizer": "dense-adam", "learning_rate": 0.01}
ADAGRAD = {"optimizer": "row-wise-adagrad", "learning_rate": 0.1, "pull": 0.1, "drift_cap": 0.5}
RECIPES = {"frozen": 3, "freeze-until-last": 2, "window(1.5,1)": 1, "window(1.75,0.75)": 1}
"""With the epochs that they share with what trains longest."""


@pytest.mark.parametrize("item", [ADAM, ADAGRAD], ids=lambda item: item["optimizer"])
def test_runs_that_share_epochs_end_with_the_bits_of_runs_that_do_not(
    tune, alone, steps, item, tmp_path
):
    """What is shared was trained with another recipe, optimizer and staleness."""
    tune("one", "frozen", until=1)
    tune("two", "window(2.5,0.5)", ADAM, start=tmp_path / "one", until=2, staleness=0)
    tune("three", "frozen", ADAGRAD, start=tmp_path / "two", until=3)
    assert steps.trained == 3 * STEPS
    for recipe, epochs in RECIPES.items():
        expected = alone(recipe, item)
        steps.trained = 0
        made = tune(recipe, recipe, item, start=tmp_path / ("one", "two", "three")[epochs - 1])
        require_same(made, expected)
        assert steps.trained == (EPOCHS - epochs) * STEPS
        assert (shared_of(made[1]), shared_of(expected[1])) == (epochs, 0)


def test_a_table_in_bfloat16_rounds_as_it_would_alone(tune, tmp_path):
    item = {"dtype": "bfloat16", "optimizer": "lazy-adam"}
    tune("one", "frozen", item, until=1)
    schedule = {"item": {"windows": [[1.5, 3]]}, "user": {"recipe": "frozen"}}
    expected = tune("alone", "co-train", item, schedule=schedule)
    made = tune("made", "co-train", item, schedule=schedule, start=tmp_path / "one")
    require_same(made, expected)


def test_nothing_that_is_read_when_rows_move_changes_what_is_shared(tune, tmp_path):
    """All that `study.prefixes` leaves out of a signature, at once."""
    fused = {"micro_batches": 2, "tables": "fused"}
    tune("one", "frozen", until=1, accumulation=fused, epochs=1)
    item = {
        "optimizer": "adagrad",
        "learning_rate": 0.3,
        "reset_state_at_thaw": False,
        "weight_decay": 0.1,
        "pull": 0.2,
        "drift_cap": 0.3,
        "frequency_scaling": 0.5,
    }
    options = {
        "accumulation": fused | {"factor": "mean"},
        "staleness": 2,
        "cold_rows": "mean-drift",
        "prefetch_batches": 1,
        "schedule": {"item": {"windows": [[1.25, 2.5]], "curve": "cosine", "warm_up": 0.5}},
    }
    expected = tune("alone", "window(2,1)", item, **options)
    made = tune("made", "window(2,1)", item, start=tmp_path / "one", **options)
    require_same(made, expected)
    assert "repaired" in made[1][-1]


@pytest.mark.parametrize("killed", [3, STEPS, 2 * STEPS])
def test_shared_epochs_that_were_killed_go_on_from_their_checkpoint(
    tune, alone, steps, tmp_path, killed
):
    kill_at(steps, killed, lambda: tune("two", "frozen", until=2))
    assert not (tmp_path / "two").exists()
    tune("two", "frozen", until=2)
    # A checkpoint is made after every other step and at the end of an epoch, after `show`.
    goes_on = max(step for step in (0, 2, 4, STEPS, 6, 8) if step < killed)
    assert steps.trained == killed + 2 * STEPS - goes_on
    made = tune("made", "freeze-until-last", start=tmp_path / "two")
    require_same(made, alone("freeze-until-last"))


@pytest.mark.parametrize("killed", [2 * STEPS + 1, 2 * STEPS + 3])
def test_a_run_that_was_killed_after_the_shared_epochs_goes_on(
    tune, alone, steps, tmp_path, killed
):
    tune("two", "frozen", until=2)
    own = {"start": tmp_path / "two"}
    kill_at(steps, killed, lambda: tune("made", "freeze-until-last", ADAM, **own))
    steps.trained = 0
    made = tune("made", "freeze-until-last", ADAM, **own)
    goes_on = max(step for step in (10, 12, 14) if step < killed)
    assert steps.trained == 3 * STEPS - goes_on
    assert shared_of(made[1]) == 2
    require_same(made, alone("freeze-until-last", ADAM))


def test_a_run_goes_on_from_whatever_is_farther(tune, alone, steps, tmp_path):
    tune("two", "frozen", until=2)
    kill_at(steps, 7, lambda: tune("made", "freeze-until-last"))
    steps.trained = 0
    made = tune("made", "freeze-until-last", start=tmp_path / "two")
    assert steps.trained == STEPS
    assert shared_of(made[1]) == 2
    require_same(made, alone("freeze-until-last"))


@pytest.mark.parametrize(("best", "keep"), [(1, 1), (2, 1), (3, 2)])
def test_the_best_epoch_is_exported_be_it_shared_or_not(tune, tmp_path, monkeypatch, best, keep):
    def score(first):
        aucs = iter([0.9 if epoch == best else 0.6 for epoch in range(first, EPOCHS + 1)])
        monkeypatch.setattr(
            finetune,
            "epoch_metrics",
            lambda *arguments: {"next": {"pooled": {"save": {"auc": next(aucs)}}}},
        )

    score(1)
    expected = tune("alone", "freeze-until-last", export="best", keep=keep)
    score(1)
    tune("one", "frozen", until=1, export="best", keep=keep)
    score(2)
    tune("two", "frozen", start=tmp_path / "one", until=2, export="best", keep=keep)
    score(3)
    made = tune("made", "freeze-until-last", start=tmp_path / "two", export="best", keep=keep)
    require_same(made, expected)
    assert json.loads((made[0] / "model.json").read_text())["exported_epoch"] == best


def test_what_cannot_be_begun_from_is_named(tune, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no shared epochs"):
        tune("made", "frozen", start=tmp_path / "empty")
    tune("one", "frozen", until=1)
    with pytest.raises(DataError, match="a saved run has 5 steps an epoch"):
        tune("made", "frozen", start=tmp_path / "one", batch_size=32)
    (damaged,) = (tmp_path / "one").glob("*/state-0.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        tune("made", "frozen", start=tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    assert len(tune("made", "frozen")[1]) == EPOCHS
