"""Micro-batches: exact ones are one big batch, fused ones an update each."""

from dataclasses import replace

import pytest
import torch
from tensors import NUM_ROWS, SETTINGS, ListReader, make_batch, make_ranker, make_weight

from thawline.config.training import Accumulation
from thawline.data.batches import Batch
from thawline.tables import LocalTable, make_optimizer
from thawline.training.components import TrainedTable
from thawline.training.loop import Accumulated, Trainer
from thawline.training.schedule import Schedule

OPTIMIZERS = ("row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd")
QUIET = SETTINGS.model_copy(update={"contrastive_weight": 0.0})
"""Without the loss whose negatives are a micro-batch's own."""


def make_trainer(batches, optimizer="row-wise-adagrad", *, rate=0.05, settings=QUIET, **options):
    table = LocalTable(
        make_weight(),
        optimizer=make_optimizer(optimizer, NUM_ROWS, SETTINGS.dim),
        learning_rate=rate,
    )
    ranker = make_ranker(settings=settings)
    reader = ListReader(batches)
    return Trainer(
        ranker, {"item": TrainedTable(table)}, reader, Schedule(2), learning_rate=1e-3, **options
    )


def weights(trainer):
    list(trainer.epochs())
    return [trainer.tables["item"].weight, *trainer.ranker.parameters()]


def joined(batches):
    """One batch of all their requests."""
    tensors = [batch.tensors() for batch in batches]
    return Batch(
        **{name: torch.cat([own[name] for own in tensors]) for name in tensors[0]}
        | {"oracle": None}
    )


def uneven_batches(count):
    return [make_batch(size=4 + index, seed=index) for index in range(count)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_exact_micro_batches_equal_one_big_batch_and_the_tail_is_flushed(optimizer, staleness):
    batches = uneven_batches(5)
    big = [joined(batches[:2]), joined(batches[2:4]), batches[4]]
    rate = 0.01 if optimizer.endswith("adam") else 0.05
    accumulated = make_trainer(
        batches, optimizer, rate=rate, staleness=staleness, accumulated=Accumulated(2)
    )
    whole = make_trainer(big, optimizer, rate=rate, staleness=staleness)

    first, second = weights(accumulated), weights(whole)

    assert accumulated.step == whole.step == 6
    for own, other in zip(first, second, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-4)


def test_weighted_micro_batches_equal_one_big_weighted_batch():
    each = torch.arange(1.0, 10.0, dtype=torch.float64) / 3
    batches = [replace(own, weight=each[: len(own)]) for own in uneven_batches(4)]
    big = [joined(batches[:2]), joined(batches[2:])]
    first = weights(make_trainer(batches, accumulated=Accumulated(2)))
    for own, other in zip(first, weights(make_trainer(big)), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-4)
    plain = weights(make_trainer(uneven_batches(4), accumulated=Accumulated(2)))
    assert (first[0] - plain[0]).abs().max() > 1e-2


def test_exact_micro_batches_are_looked_up_and_updated_once_a_step():
    trainer = make_trainer(uneven_batches(5), accumulated=Accumulated(2), staleness=1)
    table, calls = trainer.tables["item"], []
    lookup, update = table.lookup, table.update
    table.lookup = lambda rows: calls.append("lookup") or lookup(rows)
    table.update = lambda rows, grad: calls.append("update") or update(rows, grad)

    next(trainer.epochs())

    assert calls.count("lookup") == calls.count("update") == 3


def test_the_reported_losses_are_those_of_the_big_batch():
    batches = uneven_batches(4)
    parts = next(make_trainer(batches, accumulated=Accumulated(2)).epochs())
    whole = next(make_trainer([joined(batches[:2]), joined(batches[2:])]).epochs())

    assert parts.steps == whole.steps == 2
    assert parts.requests == whole.requests
    for name in ("total", "head", "pairwise"):
        assert parts.losses[name] == pytest.approx(whole.losses[name], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["row-wise-adagrad", "sgd"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_fused_micro_batches_update_the_rows_each_and_the_network_by_their_mean(optimizer, factor):
    batches = uneven_batches(5)
    trainer = make_trainer(batches, optimizer, accumulated=Accumulated(2, True, factor))

    # By hand: the table after every micro-batch, Adam after every second and at the end.
    ranker = make_ranker(settings=QUIET)
    table = LocalTable(
        make_weight(),
        optimizer=make_optimizer(optimizer, NUM_ROWS, SETTINGS.dim),
        learning_rate=0.05 * factor,
    )
    adam = torch.optim.Adam(ranker.parameters(), lr=1e-3)
    for _ in range(2):
        for pair in (batches[:2], batches[2:4], batches[4:]):
            adam.zero_grad()
            for batch in pair:
                lookup = table.lookup(batch.rows)
                rows = lookup.wait()
                total = ranker.loss(batch, {"item": rows}).total
                total.backward()
                lookup.apply(rows.grad)
            for parameter in ranker.parameters():
                parameter.grad /= len(pair)
            adam.step()

    for own, other in zip(weights(trainer), [table.weight, *ranker.parameters()], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5)
    assert trainer.step == 10


def test_a_config_says_in_words_how_micro_batches_add_up():
    assert Accumulation().words == "none"
    assert Accumulation(micro_batches=4).words == "exact, 4 micro-batches a step"
    fused = Accumulation(micro_batches=4, tables="fused", factor="mean")
    assert fused.words == "fused, 4 micro-batches a step, tables' learning rate x 0.25"
