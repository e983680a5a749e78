"""Cross-fitted item rows, against dense autograd over two weight matrices in float64."""

import copy
import dataclasses

import pytest
import torch
from tensors import (
    AUTHOR,
    NUM_ROWS,
    USER,
    ListReader,
    make_batch,
    make_ranker,
    make_weight,
    to_double,
    with_ids,
)
from training_reference import ReferenceAdam, ReferenceTable

from thawline.errors import TrainingError
from thawline.model.ranker import Counts
from thawline.tables import LocalTable
from thawline.training.components import TrainedTable
from thawline.training.cross_fit import CrossFitTrainer, fold_of, mean_of_copies
from thawline.training.loop import Trainer
from thawline.training.recipes import make_plan
from thawline.training.schedule import Plan, Schedule, TrainingWindow

RATE = 0.01


def ids_of_fold(fold, count, start=0):
    ids = torch.arange(start, start + 20 * count + 20)
    return ids[fold_of(ids) == fold][:count]


def batch_of(folds, seed=0):
    """A batch whose requests are of these folds, with ids of further tables."""
    batch = with_ids(make_batch(len(folds), seed=seed), seed=seed)
    ids = torch.stack([ids_of_fold(fold, 1, 100 * place)[0] for place, fold in enumerate(folds)])
    return dataclasses.replace(batch, request_id=ids)


BATCHES = [[0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1, 0]]
"""Folds of the requests of each batch; in one of them a fold is empty."""


def two_copies(*, apart=False):
    """Copies of every row; `apart`: as after some training."""
    other = make_weight(seed=1) if apart else make_weight()
    return torch.cat([make_weight(), other])


def make_trainer(recipe="co-train", *, epochs=2, plans=None, ranker=None, tables=None, **options):
    item = LocalTable(two_copies(), learning_rate=0.05, trainable=False, padding_row=(0, NUM_ROWS))
    batches = [batch_of(folds, seed=index) for index, folds in enumerate(BATCHES)]
    return CrossFitTrainer(
        ranker or make_ranker(),
        {"item": TrainedTable(item), **(tables or {})},
        ListReader(batches),
        Schedule(epochs, {"item": make_plan(recipe, epochs), **(plans or {})}),
        num_rows=NUM_ROWS,
        learning_rate=RATE,
        **options,
    )


def side_table(settings, seed):
    weight = torch.randn(settings.rows, settings.dim, generator=torch.Generator().manual_seed(seed))
    return TrainedTable(LocalTable(weight, learning_rate=0.1, trainable=False))


def always(step, row=0):
    return step >= 0


def copies_of(table, trains):
    """A reference table for each copy."""
    both = []
    for weight in table.weight.chunk(2):
        one = LocalTable(weight.clone(), learning_rate=table.learning_rate)
        both.append(ReferenceTable(one, trains))
    return both


def reference_run(trainer, copies, others, item_trains):
    """Trains a float64 copy of the ranker; `copies` and `others` are trained in place."""
    ranker = copy.deepcopy(trainer.ranker).double()
    adam = ReferenceAdam(ranker.parameters(), RATE, always)
    step = 0
    for _ in range(trainer.schedule.epochs):
        for batch in map(to_double, trainer.reader.batches):
            folds = fold_of(batch.request_id)
            for table in [*copies, *others.values()]:
                table.weight.grad = None
                table.thaw(step)
            if not any(map(item_trains, range(step + 1))):
                network, rows = loss_of(ranker, batch, copies[0].weight.detach(), others), {}
            else:
                network, rows = 0.0, {}
                for fold in (0, 1):
                    part = part_of(batch, folds == fold)
                    if not len(part):
                        continue
                    read, own = copies[1 - fold].weight.detach(), copies[fold].weight
                    network += loss_of(ranker, part, read, others, batch)
                    (own.grad,) = torch.autograd.grad(
                        loss_of(ranker, part, own, others, batch), own
                    )
                    rows[fold] = part.rows
            ranker.zero_grad()
            network.backward()
            for fold, touched in rows.items():
                copies[fold].update(step, touched, 1.0)
            for name, table in others.items():
                table.update(step, ranker.rows(batch)[name], 1.0)
            adam.step(step)
            step += 1
    return ranker


def part_of(batch, mask):
    """Some requests of a batch, field by field."""
    changed = {
        each.name: getattr(batch, each.name)[mask]
        for each in dataclasses.fields(batch)
        if each.name not in ("ids", "oracle", "weight")
    }
    return dataclasses.replace(batch, ids={n: v[mask] for n, v in batch.ids.items()}, **changed)


def loss_of(ranker, batch, item, others, whole=None):
    """The total loss; of a part of a batch what it adds to that of the `whole`."""
    rows = ranker.rows(batch)
    embeddings = {"item": item[rows["item"]]}
    embeddings |= {name: table.weight[rows[name]] for name, table in others.items()}
    return ranker.loss(batch, embeddings, Counts.of(whole or batch)).total


def require_equal(trainer, ranker, copies, others):
    expected = {"item": torch.cat([one.weight for one in copies])}
    expected |= {name: table.weight for name, table in others.items()}
    for name, weight in expected.items():
        torch.testing.assert_close(
            trainer.tables[name].weight.double(), weight.detach(), rtol=0, atol=2e-4
        )
    for name, parameter in trainer.ranker.named_parameters():
        torch.testing.assert_close(
            parameter.double(), ranker.get_parameter(name), rtol=0, atol=2e-3
        )


@pytest.mark.parametrize(
    ("recipe", "trains"),
    [
        ("co-train", always),
        ("freeze-until-last", lambda step, row=0: step >= 4),
        ("train-first", lambda step, row=0: 0 <= step < 4),
        ("window(0.5, 1)", lambda step, row=0: 2 <= step < 6),
    ],
)
def test_cross_fitting_equals_a_float64_reference(recipe, trains):
    trainer = make_trainer(recipe)
    copies = copies_of(trainer.tables["item"], trains)
    ranker = reference_run(trainer, copies, {}, trains)

    list(trainer.epochs())

    require_equal(trainer, ranker, copies, {})
    first, second = trainer.tables["item"].weight.chunk(2)
    assert not torch.equal(first, second)


def test_other_id_tables_train_through_the_networks_pass_alone():
    trainer = make_trainer(
        ranker=make_ranker(tables={"user": USER, "author": AUTHOR}),
        tables={"user": side_table(USER, 1), "author": side_table(AUTHOR, 2)},
        plans={"user": Plan((TrainingWindow(0, 2),)), "author": Plan((TrainingWindow(0, 1),))},
    )
    copies = copies_of(trainer.tables["item"], always)
    others = {
        "user": ReferenceTable(trainer.tables["user"], always),
        "author": ReferenceTable(trainer.tables["author"], lambda step, row: 0 <= step < 4),
    }
    ranker = reference_run(trainer, copies, others, always)

    list(trainer.epochs())

    require_equal(trainer, ranker, copies, others)


@pytest.mark.parametrize(("recipe", "epochs"), [("frozen", 2), ("freeze-until-last", 1)])
def test_before_the_table_trains_a_step_is_that_of_plain_training(recipe, epochs):
    trainer = make_trainer(recipe)
    item = LocalTable(make_weight(), trainable=False)
    plain = Trainer(
        make_ranker(),
        {"item": TrainedTable(item)},
        trainer.reader,
        trainer.schedule,
        learning_rate=RATE,
    )

    for each in (trainer, plain):
        running = each.epochs()
        for _ in range(epochs):
            next(running)

    for mine, theirs in zip(trainer.ranker.parameters(), plain.ranker.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(trainer.tables["item"].weight, two_copies())


def step_on(folds, weight, seed=0):
    """The network's gradient in one step on given rows, and the rows after it."""
    trainer = make_trainer()
    table = trainer.tables["item"]
    table.replace(weight, reset_state=True)
    table.thaw(reset_state=True)
    trainer.train_step(batch_of(folds, seed) if isinstance(folds, list) else folds)
    gradient = {
        name: parameter.grad.clone()
        for name, parameter in trainer.ranker.named_parameters()
        if parameter.grad is not None
    }
    return gradient, table.weight.chunk(2)


def with_copy(weight, fold, seed):
    """The rows with one copy set to other values."""
    changed = list(weight.chunk(2))
    changed[fold] = make_weight(seed=seed)
    return torch.cat(changed)


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fold", [0, 1])
def test_the_network_reads_nothing_that_the_requests_own_fold_wrote(fold):
    weight = two_copies(apart=True)
    gradient, _ = step_on([fold] * 6, weight)

    own, _ = step_on([fold] * 6, with_copy(weight, fold, seed=7))
    other, _ = step_on([fold] * 6, with_copy(weight, 1 - fold, seed=7))

    assert same(own, gradient)
    assert not same(other, gradient)


@pytest.mark.parametrize("fold", [0, 1])
def test_beside_requests_of_the_other_fold_a_request_reads_none_of_its_own_traces(fold):
    weight = two_copies(apart=True)
    mixed = batch_of([0, 1, 1, 0, 1, 0])
    chosen = fold_of(mixed.request_id) == fold
    changed = with_copy(weight, fold, seed=7)

    gradient, _ = step_on(mixed, changed)

    ranker = make_ranker()
    for part, read in ((chosen, weight.chunk(2)[1 - fold]), (~chosen, changed.chunk(2)[fold])):
        loss_of(ranker, part_of(mixed, part), read, {}, mixed).backward()
    for name, value in gradient.items():
        expected = ranker.get_parameter(name).grad
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fold", [0, 1])
def test_a_copy_is_written_by_its_own_fold_alone(fold):
    weight = two_copies(apart=True)
    mixed = batch_of([0, 1, 1, 0, 1, 0])
    chosen = fold_of(mixed.request_id) == fold
    swapped = batch_of([0, 1, 1, 0, 1, 0], seed=5)
    mask = {name: chosen.view(-1, *[1] * (v.dim() - 1)) for name, v in mixed.tensors().items()}
    beside = dataclasses.replace(
        mixed,
        **{
            name: torch.where(mask[name], value, getattr(swapped, name))
            for name, value in mixed.tensors().items()
            if not name.startswith(("ids.", "labels", "candidate_mask"))
        },
    )

    _, after = step_on(mixed, weight)
    _, again = step_on(beside, weight)

    touched = set(part_of(mixed, chosen).rows.tolist()) - {0}
    moved = (after[fold] != weight.chunk(2)[fold]).any(1).nonzero().squeeze(1).tolist()
    assert set(moved) == touched
    assert torch.equal(after[fold], again[fold])
    assert not torch.equal(after[1 - fold], again[1 - fold])


def test_the_rows_train_where_the_network_does_not():
    parts = make_ranker().components()
    trainer = make_trainer(plans={name: Plan() for name in parts})
    before = copy.deepcopy(trainer.ranker.state_dict())

    list(trainer.epochs())

    assert all(torch.equal(before[n], value) for n, value in trainer.ranker.state_dict().items())
    for one in trainer.tables["item"].weight.chunk(2):
        assert not torch.equal(one, make_weight())
        assert not one[0].any()


def test_a_copy_that_is_not_finite_stops_the_step_that_reads_it():
    trainer = make_trainer()
    trainer.tables["item"].thaw(reset_state=True)
    trainer.tables["item"].weight[:NUM_ROWS] = torch.nan

    with pytest.raises(TrainingError, match=r"nan at step 0 \(epoch 0\)"):
        trainer.train_step(batch_of([0] * 6))


def test_a_fold_is_a_bit_of_a_hash_of_the_id():
    def splitmix64(value):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            value = (value ^ (value >> shift)) * factor % 2**64
        return value

    ids = [*range(50), 2**62, 2**63 - 1]

    assert fold_of(torch.tensor(ids)).tolist() == [splitmix64(each) >> 63 for each in ids]


def test_folds_halve_the_requests():
    folds = fold_of(torch.arange(100_000))

    assert set(folds.tolist()) == {0, 1}
    for part in (folds, folds[::2], folds[1::2], folds[:10_000]):
        # Five standard deviations.
        assert abs(float(part.double().mean()) - 0.5) < 2.5 / len(part) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exported_rows_are_the_mean_of_both_copies(dtype):
    weight = two_copies(apart=True).to(dtype)

    mean = mean_of_copies(weight)

    expected = (weight[:NUM_ROWS].double() + weight[NUM_ROWS:].double()) / 2
    assert mean.dtype == dtype
    assert torch.equal(mean, expected.to(dtype))
