import dataclasses
import math

import pytest
import torch
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
from training_reference import ReferenceTable, reference_run

from thawline.data.manifest import TIERS
from thawline.errors import ConfigError, TrainingError
from thawline.tables import LocalTable
from thawline.training.components import TrainedTable
from thawline.training.loop import Trainer
from thawline.training.recipes import make_plan
from thawline.training.schedule import Curve, Plan, Schedule, TrainingWindow

RATE = 0.01


def make_trainer(
    recipe="co-train",
    *,
    epochs=3,
    batches=4,
    seed=0,
    plans=None,
    ranker=None,
    tables=None,
    content=None,
    **options,
):
    """The item table follows the recipe; `plans` are those of other components."""
    schedule = Schedule(epochs, {"item": make_plan(recipe, epochs), **(plans or {})})
    ranker = ranker or make_ranker(seed=seed)
    reader = ListReader([with_ids(make_batch(seed=index), seed=index) for index in range(batches)])
    tables = {"item": item_table(), **(tables or {})}
    return Trainer(ranker, tables, reader, schedule, learning_rate=RATE, content=content, **options)


def item_table():
    table = LocalTable(make_weight(), learning_rate=0.05, trainable=False)
    tiers = {name: torch.arange(NUM_ROWS) % 4 == index for index, name in enumerate(TIERS)}
    return TrainedTable(table, tiers, table.weight.clone(), fresh_rows)


def fresh_rows(epoch):
    return make_weight(seed=100 + epoch)


def side_table(settings, seed):
    weight = torch.randn(settings.rows, settings.dim, generator=torch.Generator().manual_seed(seed))
    return TrainedTable(LocalTable(weight, learning_rate=0.1, trainable=False))


def run(trainer):
    return list(trainer.epochs())


def require_equal(trainer, ranker, tables):
    for name, table in tables.items():
        torch.testing.assert_close(
            trainer.tables[name].weight.double(), table.weight.detach(), rtol=0, atol=2e-4
        )
    for name, parameter in trainer.ranker.named_parameters():
        torch.testing.assert_close(
            parameter.double(),
            ranker.get_parameter(name),
            rtol=0,
            atol=2e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def always(step, row=0):
    return step >= 0


STRATIFIED_START = (0, 4, 8, 8)
"""The first step of head, torso, tail and cold rows; row i is of tier i % 4."""


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(
    ("recipe", "trains", "renew"),
    [
        ("co-train", always, None),
        ("frozen", lambda step, row: False, None),
        ("freeze-until-last", lambda step, row: step >= 8, None),
        ("train-first", lambda step, row: 0 <= step < 4, None),
        ("window(0.5, 1.25)", lambda step, row: 2 <= step < 7, None),
        ("alternate", lambda step, row: step >= 0 and step % 4 >= 2, None),
        ("stratified", lambda step, row: step >= STRATIFIED_START[row % 4], None),
        ("re-anchor", always, lambda epoch: make_weight() if epoch else None),
        ("re-init", always, lambda epoch: fresh_rows(epoch) if epoch else None),
    ],
)
def test_training_equals_a_float64_reference(recipe, trains, renew, staleness):
    trainer = make_trainer(recipe, staleness=staleness)
    item = ReferenceTable(trainer.tables["item"], trains, renew=renew or (lambda epoch: None))
    parts = {"dense": (RATE, always)}
    ranker = reference_run(trainer, {"item": item}, parts, staleness=staleness)

    run(trainer)

    require_equal(trainer, ranker, {"item": item})


def test_several_tables_and_parts_train_each_by_a_plan_of_its_own():
    settings = SETTINGS.model_copy(update={"adapter": "full", "content_tower": (6,)})
    ranker = make_ranker(settings=settings, tables={"user": USER, "author": AUTHOR}, content_dim=5)
    content = torch.randn(NUM_ROWS, 5, generator=torch.Generator().manual_seed(9))
    content[0] = 0
    plans = {
        "user": Plan((TrainingWindow(0, 1), TrainingWindow(2, 3))),
        "author": Plan(),
        "adapter": Plan((TrainingWindow(1, 3),)),
        "content_tower": Plan((TrainingWindow(0, 2),), curve=Curve("cosine")),
        "history_action": Plan(),
        "ctx_b": Plan((TrainingWindow(0.5, 1), TrainingWindow(1.5, 2))),
        "dense": Plan((TrainingWindow(0, 0.5), TrainingWindow(1, 3)), curve=Curve(warm_up=0.5)),
    }
    trainer = make_trainer(
        "window(0.5, 1)",
        ranker=ranker,
        plans=plans,
        tables={"user": side_table(USER, 1), "author": side_table(AUTHOR, 2)},
        content=LocalTable(content.clone(), trainable=False),
        learning_rates={"adapter": 0.03},
    )
    tables = {
        "item": ReferenceTable(trainer.tables["item"], lambda step, row: 2 <= step < 6),
        "user": ReferenceTable(
            trainer.tables["user"], lambda step, row: 0 <= step < 4 or step >= 8
        ),
        "author": ReferenceTable(trainer.tables["author"], lambda step, row: False),
    }
    author = trainer.tables["author"].weight.clone()
    action = ranker.action.weight.detach().clone()
    parts = {
        "adapter": (0.03, lambda step: step >= 4),
        "content_tower": (
            RATE,
            lambda step: 0 <= step < 8,
            lambda step: (1 + math.cos(math.pi * step / 8)) / 2,
        ),
        "history_action": (RATE, lambda step: False),
        "ctx_b": (RATE, lambda step: step in (2, 3, 6, 7)),
        "dense": (
            RATE,
            lambda step: step in (0, 1) or step >= 4,
            lambda step: 0.5 if not step else 1,
        ),
        "ctx_a": (RATE, always),
    }
    expected = reference_run(trainer, tables, parts, content=content)

    summaries = run(trainer)

    require_equal(trainer, expected, tables)
    assert torch.equal(trainer.tables["author"].weight, author)
    assert torch.equal(ranker.action.weight, action)
    assert summaries[0].trained == {
        "item": 0.5,
        "user": 1.0,
        "author": 0.0,
        "adapter": 0.0,
        "content_tower": 1.0,
        "history_action": 0.0,
        "ctx_a": 1.0,
        "ctx_b": 0.5,
        "dense": 0.5,
    }


def test_a_learning_rate_curve_reaches_the_update_before_the_first_step():
    curve = Curve("cosine", warm_up=0.5)
    trainer = make_trainer(plans={"item": Plan((TrainingWindow(0, 3),), curve=curve)})

    def factor(step):
        return (step + 1) / 2 if step < 2 else (1 + math.cos(math.pi * (step - 2) / 10)) / 2

    item = ReferenceTable(trainer.tables["item"], always)
    ranker = reference_run(trainer, {"item": item}, {"dense": (RATE, always)}, factor=factor)

    run(trainer)

    require_equal(trainer, ranker, {"item": item})


def test_a_frozen_epoch_keeps_every_bit_of_the_table_and_its_state():
    trainer = make_trainer("freeze-until-last")
    start = trainer.tables["item"].weight.clone()

    epochs = trainer.epochs()
    next(epochs)
    next(epochs)

    assert torch.equal(trainer.tables["item"].weight, start)
    assert torch.equal(
        trainer.tables["item"].optimizer.state["accumulator"], torch.zeros(len(start))
    )
    next(epochs)
    assert not torch.equal(trainer.tables["item"].weight, start)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    def weights(seed):
        trainer = make_trainer("co-train", seed=seed)
        run(trainer)
        return [trainer.tables["item"].weight, *trainer.ranker.state_dict().values()]

    first, again, other = weights(0), weights(0), weights(1)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_an_epoch_summary_counts_steps_requests_and_the_share_in_which_the_table_trained():
    seen = []
    trainer = make_trainer("window(0.5, 1)", on_step=lambda step, steps: seen.append((step, steps)))

    summaries = run(trainer)

    assert [s.trained["item"] for s in summaries] == [0.5, 0.5, 0.0]
    assert [(s.epoch, s.steps, s.requests) for s in summaries] == [
        (0, 4, 24),
        (1, 4, 24),
        (2, 4, 24),
    ]
    assert seen == [(step, 12) for step in range(1, 13)]
    assert 0 <= summaries[0].waiting <= summaries[0].seconds


def test_the_reported_losses_are_means_over_the_steps():
    trainer = make_trainer("frozen", epochs=1, batches=2)
    batch = trainer.reader.batches[0]
    first = trainer.forward(batch, {"item": trainer.tables["item"].weight[batch.rows]})
    seen = []
    loss = trainer.forward
    trainer.forward = lambda *of: seen.append(loss(*of)) or seen[-1]

    (summary,) = run(trainer)

    torch.testing.assert_close(seen[0].total, first.total)
    for name in ("total", "head", "pairwise", "contrastive"):
        mean = float(sum(getattr(losses, name) for losses in seen).detach()) / 2
        assert summary.losses[name] == pytest.approx(mean, rel=1e-6)


def test_gradients_are_clipped_to_the_given_norm():
    free, clipped = make_trainer("frozen"), make_trainer("frozen", clip_norm=1e-3)
    batch = free.reader.batches[0]

    free.train_step(batch)
    clipped.train_step(batch)

    def norm(trainer):
        return torch.cat([p.grad.flatten() for p in trainer.ranker.parameters()]).norm()

    assert norm(free) > 0.1
    assert float(norm(clipped)) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("staleness", "order"),
    [(0, "look fwd back look fwd back"), (1, "look fwd look back fwd back")],
)
def test_the_next_lookup_is_launched_between_forward_and_backward(staleness, order):
    trainer, calls = make_trainer(batches=2, staleness=staleness), []
    forward, look_up = trainer.forward, trainer.prefetcher.tables.lookup

    def recorded(*arguments):
        calls.append("fwd")
        losses = forward(*arguments)
        losses.total.register_hook(lambda grad: calls.append("back"))
        return losses

    trainer.forward = recorded
    trainer.prefetcher.tables.lookup = lambda *rows: calls.append("look") or look_up(*rows)
    next(trainer.epochs())

    assert " ".join(calls) == order


def test_a_loss_that_is_not_finite_stops_with_step_epoch_and_request_ids():
    trainer = make_trainer("co-train")
    broken = make_batch(seed=1)
    trainer.reader.batches[1] = dataclasses.replace(
        broken, history_age=broken.history_age * torch.nan
    )

    with pytest.raises(TrainingError, match=r"nan at step 1 \(epoch 0\).*100, 101, 102"):
        run(trainer)


def test_no_training_request_is_an_error_before_training():
    with pytest.raises(TrainingError, match="no training request"):
        make_trainer("co-train", batches=0)


def test_a_window_that_holds_no_step_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"window \[0.05, 0.1\) of `dense` holds no step.*4"):
        make_trainer(plans={"dense": Plan((TrainingWindow(0.05, 0.1),))})


def test_a_step_in_which_nothing_can_train_stops_with_its_number():
    by_tier = Plan.by_tier({"head": [TrainingWindow(0, 1)], "tail": [TrainingWindow(1, 2)]})
    frozen = {name: Plan() for name in make_ranker().components()}
    every = torch.ones(NUM_ROWS, dtype=torch.bool)
    table = dataclasses.replace(item_table(), tiers={"head": every, "tail": ~every})

    trainer = make_trainer(epochs=2, plans={"item": by_tier} | frozen, tables={"item": table})

    with pytest.raises(TrainingError, match="nothing trains at step 4"):
        run(trainer)
