import copy
import dataclasses

import pytest
import torch
from tensors import ListReader, make_batch, make_ranker, make_weight, to_double

from thawline.errors import TrainingError
from thawline.tables import LocalTable
from thawline.training.loop import Trainer
from thawline.training.schedule import make_schedule


def make_trainer(recipe, *, epochs=3, batches=4, seed=0, **options):
    table = LocalTable(make_weight(), learning_rate=0.05, trainable=False)
    reader = ListReader([make_batch(seed=index) for index in range(batches)])
    schedule = make_schedule(recipe, epochs)
    ranker = make_ranker(seed=seed)
    return Trainer(ranker, table, reader, schedule, learning_rate=0.01, **options)


def run(trainer):
    return list(trainer.epochs())


def reference_run(trainer, trains):
    """The same training in float64: dense autograd over the whole table, Adagrad row by row."""
    ranker = copy.deepcopy(trainer.ranker).double()
    weight = trainer.table.weight.double().clone().requires_grad_()
    adam = torch.optim.Adam(ranker.parameters(), lr=0.01)
    state = torch.zeros(len(weight), dtype=torch.float64)
    step = 0
    for _ in range(trainer.schedule.epochs):
        for batch in trainer.reader.batches:
            batch = to_double(batch)
            weight.grad = None
            adam.zero_grad()
            ranker.loss(batch, weight[batch.rows]).total.backward()
            if trains(step):
                if not trains(step - 1):
                    state.zero_()
                with torch.no_grad():
                    for row in set(batch.rows.tolist()) - {0}:
                        gradient = weight.grad[row]
                        state[row] += gradient.square().mean()
                        weight[row] -= 0.05 * gradient / (state[row].sqrt() + 1e-8)
            adam.step()
            step += 1
    return ranker, weight.detach()


@pytest.mark.parametrize(
    ("recipe", "trains"),
    [
        ("co-train", lambda step: step >= 0),
        ("frozen", lambda step: False),
        ("freeze-until-last", lambda step: step >= 8),
        ("train-first", lambda step: 0 <= step < 4),
        ("window(0.5, 1.25)", lambda step: 2 <= step < 7),
    ],
)
def test_training_equals_a_float64_reference(recipe, trains):
    trainer = make_trainer(recipe)
    ranker, weight = reference_run(trainer, trains)

    run(trainer)

    torch.testing.assert_close(trainer.table.weight.double(), weight, rtol=0, atol=2e-4)
    for name, parameter in trainer.ranker.named_parameters():
        expected = ranker.get_parameter(name)
        torch.testing.assert_close(
            parameter.double(), expected, rtol=0, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_frozen_epoch_keeps_every_bit_of_the_table_and_its_state():
    trainer = make_trainer("freeze-until-last")
    start = trainer.table.weight.clone()

    epochs = trainer.epochs()
    next(epochs)
    next(epochs)

    assert torch.equal(trainer.table.weight, start)
    assert torch.equal(trainer.table.optimizer.state["accumulator"], torch.zeros(len(start)))
    next(epochs)
    assert not torch.equal(trainer.table.weight, start)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    def weights(seed):
        trainer = make_trainer("co-train", seed=seed)
        run(trainer)
        return [trainer.table.weight, *trainer.ranker.state_dict().values()]

    first, again, other = weights(0), weights(0), weights(1)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_an_epoch_summary_counts_steps_requests_and_the_share_in_which_the_table_trained():
    seen = []
    trainer = make_trainer("window(0.5, 1)", on_step=lambda step, steps: seen.append((step, steps)))

    summaries = run(trainer)

    assert [s.item_share for s in summaries] == [0.5, 0.5, 0.0]
    assert [(s.epoch, s.steps, s.requests) for s in summaries] == [
        (0, 4, 24),
        (1, 4, 24),
        (2, 4, 24),
    ]
    assert seen == [(step, 12) for step in range(1, 13)]
    assert 0 <= summaries[0].waiting <= summaries[0].seconds


def test_the_reported_losses_are_means_over_the_steps():
    trainer = make_trainer("frozen", epochs=1, batches=2)
    first = trainer.ranker.loss(
        trainer.reader.batches[0], trainer.table.weight[trainer.reader.batches[0].rows]
    )
    seen = []
    step = trainer.train_step
    trainer.train_step = lambda batch: seen.append(step(batch)) or seen[-1]

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
