"""A run that is killed after any step and goes on ends as one that never stopped, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tensors import (
    AUTHOR,
    NUM_ROWS,
    SETTINGS,
    USER,
    ListReader,
    make_batch,
    make_ranker,
    make_weight,
    with_ids,
)

from thawline.data.manifest import TIERS
from thawline.errors import DataError, TrainingError
from thawline.tables import LocalTable, make_optimizer
from thawline.training.checkpoint import Checkpoints
from thawline.training.components import TrainedTable
from thawline.training.cross_fit import CrossFitTrainer
from thawline.training.loop import Accumulated, Trainer
from thawline.training.recipes import make_plan
from thawline.training.schedule import Curve, Plan, Schedule, TrainingWindow
from thawline.training.state import State

EPOCHS, BATCHES = 2, 4
SMALL = SETTINGS.model_copy(update={"layers": 1})


class ShufflingReader(ListReader):
    """Another order each epoch."""

    def epoch(self, index, start=0):
        order = np.random.default_rng(index).permutation(len(self.batches))
        return (self.batches[number] for number in order[start:])


def batches():
    made = [with_ids(make_batch(size=4 + n, seed=n), seed=n) for n in range(BATCHES)]
    return [replace(batch, request_id=batch.request_id + 100 * n) for n, batch in enumerate(made)]


def item_table(optimizer="row-wise-adagrad", dtype=torch.float32, copies=1):
    weight = make_weight().repeat(copies, 1).to(dtype)
    table = LocalTable(
        weight.clone(),
        optimizer=make_optimizer(optimizer, *weight.shape),
        learning_rate=0.05,
        trainable=False,
        padding_row=tuple(range(0, copies * NUM_ROWS, NUM_ROWS)),
    )
    tiers = {name: torch.arange(len(weight)) % 4 == index for index, name in enumerate(TIERS)}
    return TrainedTable(table, tiers, weight, lambda epoch: make_weight(seed=100 + epoch))


def make_trainer(recipe="co-train", *, table=None, plans=None, tables=None, ranker=None, **options):
    schedule = Schedule(EPOCHS, {"item": make_plan(recipe, EPOCHS), **(plans or {})})
    made = {"item": item_table(**(table or {})), **(tables() if tables else {})}
    kind = CrossFitTrainer if "num_rows" in options else Trainer
    return kind(
        make_ranker(**({"settings": SMALL} | (ranker or {}))),
        made,
        ShufflingReader(batches()),
        schedule,
        learning_rate=0.01,
        **options,
    )


def side_tables():
    def made(settings, optimizer):
        shape = settings.rows, settings.dim
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(settings.rows))
        own = LocalTable(weight, optimizer=make_optimizer(optimizer, *shape), trainable=False)
        return TrainedTable(own)

    return {"user": made(USER, "lazy-adam"), "author": made(AUTHOR, "sgd")}


WINDOW = "window(0.5, 1)"
"""Frozen, thawed in mid-epoch and frozen in mid-epoch again."""
CASES = {
    "synchronous": {"staleness": 0},
    **{
        f"{optimizer} in a window": {
            "recipe": WINDOW,
            "staleness": 1,
            "table": {"optimizer": optimizer},
        }
        for optimizer in ("row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd")
    },
    **{
        f"{recipe} with three in flight": {"recipe": recipe, "staleness": 3}
        for recipe in ("freeze-until-last", "stratified", "re-anchor", "re-init", "alternate")
    },
    "tiers that close": {
        "staleness": 3,
        "plans": {
            "item": Plan.by_tier(
                {"head": [TrainingWindow(0, 1)], "tail": [TrainingWindow(0.5, 1.5)]}
            )
        },
    },
    "exact accumulation": {"recipe": WINDOW, "staleness": 1, "accumulated": Accumulated(2)},
    "fused accumulation": {
        "recipe": WINDOW,
        "staleness": 3,
        "accumulated": Accumulated(3, True, 0.5),
        "clip_norm": 0.1,
    },
    "bfloat16": {"staleness": 1, "table": {"dtype": torch.bfloat16}},
    "dropout": {
        "staleness": 1,
        "ranker": {"settings": SMALL.model_copy(update={"dropout": 0.2})},
    },
    "several tables and parts": {
        "recipe": "freeze-until-last",
        "staleness": 1,
        "tables": side_tables,
        "ranker": {
            "settings": SMALL.model_copy(update={"adapter": "full"}),
            "tables": {"user": USER, "author": AUTHOR},
        },
        "plans": {
            "user": Plan((TrainingWindow(0, 0.5), TrainingWindow(1, 2)), curve=Curve("cosine")),
            "adapter": Plan((TrainingWindow(0, 0.5), TrainingWindow(1.5, 2))),
            "ctx_a": Plan((TrainingWindow(0, 0.5), TrainingWindow(1.5, 2)), reset_state=False),
            "dense": Plan((TrainingWindow(0, 2),), curve=Curve("cosine", warm_up=0.7)),
        },
    },
    "cross-fitting": {"recipe": WINDOW, "num_rows": NUM_ROWS, "table": {"copies": 2}},
}


def train(trainer, on_step=lambda: None):
    """The request ids of each step, and the epochs' summaries."""
    seen, steps = [], trainer._steps

    def seeing(epoch):
        for group, losses in steps(epoch):
            seen.append([batch.request_id.tolist() for batch in group])
            yield group, losses

    trainer._steps = seeing
    trainer.on_step = lambda step, steps: on_step()
    return seen, [
        (summary.epoch, summary.losses, summary.steps, summary.requests)
        for summary in trainer.epochs()
    ]


def require_same(first, second):
    """Rows, parameters, states of optimizers and generators."""
    assert first.parts.keys() == second.parts.keys()
    for part, named in first.parts.items():
        assert named.keys() == second.parts[part].keys()
        for name, tensor in named.items():
            assert torch.equal(tensor, second.parts[part][name]), f"{part}/{name}"


@pytest.mark.parametrize("case", CASES)
def test_killed_after_any_step_and_resumed_it_ends_with_the_same_bits(case, tmp_path, monkeypatch):
    monkeypatch.setattr("thawline.training.checkpoint._flush", lambda path: None)  # Slow.

    def make():
        return make_trainer(**CASES[case])

    checkpoints = Checkpoints(tmp_path, keep=100)
    unbroken = make()
    seen, summaries = train(unbroken)
    end = unbroken.state_dict()
    saving = make()
    train(saving, lambda: checkpoints.save(saving.state_dict(), []))

    require_same(saving.state_dict(), end)
    per_epoch = unbroken.steps_per_epoch
    assert [epochs * per_epoch for epochs in checkpoints.saved()] == pytest.approx(
        range(1, unbroken.step + 1)
    )
    for step, epochs in enumerate(checkpoints.saved(), start=1):
        resumed = make()
        torch.manual_seed(step)
        resumed.load_state_dict(checkpoints.load(epochs).state)
        seen_after, summaries_after = train(resumed)
        require_same(resumed.state_dict(), end)
        assert seen_after == seen[step:]
        assert summaries_after == summaries[(step - 1) // unbroken.steps_per_epoch :]


def state(step, **tensors):
    facts = {"step": step, "steps_per_epoch": 1}
    return State({"part": tensors or {"weight": torch.tensor([1.0])}}, facts)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    for step in range(1, 7):
        checkpoints.save(state(step), [], best=2)

    assert checkpoints.saved() == [2, 5, 6]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "epoch-002.00000000",
        "epoch-005.00000000",
        "epoch-006.00000000",
    ]
    checkpoints.clear()
    assert not (tmp_path / "run").exists()


def test_tensors_and_epochs_come_back_as_they_were(tmp_path):
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.randn(2, 3, dtype=torch.bfloat16).T,
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 4),
    }
    saved = State({"x/y": tensors, "empty": {}}, {"step": 3, "steps_per_epoch": 2, "seconds": 0.1})
    epochs = [{"losses": {"total": 1 / 3}, "metrics": {"auc": None}}]
    Checkpoints(tmp_path).save(saved, epochs)

    found = Checkpoints(tmp_path).load_last()

    assert found.epochs == epochs
    assert found.state.facts == saved.facts
    assert found.state.parts.keys() == {"x/y", "empty"}
    for name, tensor in tensors.items():
        read = found.state.parts["x/y"][name]
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"checkpoint.json", "state-0.safetensors"}


@pytest.mark.parametrize("killed_at", ["tensors", "json", "rename"])
def test_a_kill_while_saving_leaves_the_one_before(tmp_path, monkeypatch, killed_at):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), [])

    def killed(*args, **options):
        raise KeyboardInterrupt

    target = {
        "tensors": "thawline.training.checkpoint.save_tensors",
        "json": "pathlib.Path.write_text",
        "rename": "pathlib.Path.rename",
    }[killed_at]
    with monkeypatch.context() as patch:
        patch.setattr(target, killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(state(2), [])

    again = Checkpoints(tmp_path)
    assert again.saved() == [1]
    assert again.load_last().state.facts["step"] == 1
    again.save(state(3), [])
    assert again.saved() == [1, 3]
    assert len(list(tmp_path.iterdir())) == 2  # Nothing of the second one is left.


def test_a_full_disk_is_named_and_the_one_before_stays(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), [])

    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("thawline.model.files.save_file", full)
        with pytest.raises(DataError, match="no space is left on its disk") as caught:
            checkpoints.save(state(2), [])
    assert "goes on from the checkpoint before" in caught.value.remedy
    assert checkpoints.load_last().state.facts["step"] == 1


def test_those_who_may_read_other_files_may_read_tensors(tmp_path):
    Checkpoints(tmp_path).save(state(1), [])

    made = tmp_path / "epoch-001.00000000"
    modes = {file.stat().st_mode for file in made.iterdir()}
    assert len(modes) == 1


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), [])
    file = tmp_path / "epoch-001.00000000" / "state-0.safetensors"
    file.write_bytes(file.read_bytes()[:-2])

    with pytest.raises(DataError, match=r"epoch-001\.00000000 cannot be read") as caught:
        checkpoints.load_last()
    assert "remove it" in caught.value.remedy


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), [])
    file = tmp_path / "epoch-001.00000000" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 0}))

    with pytest.raises(DataError, match="is a checkpoint of version 0"):
        checkpoints.load(1)


def test_what_is_not_finite_is_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), [])

    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(TrainingError, match="part holds NaN or inf in `rows` after step 2"):
            checkpoints.save(state(2, rows=torch.tensor([0.0, bad, 1.0])), [])
    assert checkpoints.saved() == [1]


def test_a_state_of_another_run_is_refused(tmp_path):
    saved = make_trainer()
    next(saved.epochs())
    longer = make_trainer()
    longer.steps_per_epoch += 1
    with pytest.raises(DataError, match="a saved run has 4 steps an epoch, this one 5"):
        longer.load_state_dict(saved.state_dict())
    other = make_trainer(table={"optimizer": "lazy-adam"})
    with pytest.raises(DataError, match="optimizer state"):
        other.load_state_dict(saved.state_dict())
