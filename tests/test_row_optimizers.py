"""Every optimizer and rule of the item rows against float64 references, row by row."""

import pytest
import torch
from row_reference import DIM, NAMES, ROWS, Reference, make_steps, make_table, run

from thawline.tables import LocalTable, make_optimizer
from thawline.tables.optimizers import LazyAdam, RowWiseAdagrad


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_equals_its_float64_reference(name):
    table = make_table(name)
    reference = Reference(name, table.weight, 0.1)

    for rows, grad in make_steps():
        table.lookup(rows).apply(grad)
        reference.step(rows, grad)

    torch.testing.assert_close(table.weight.double(), reference.weight, rtol=0, atol=2e-5)
    assert (table.weight[0] == 0).all()


def test_dense_adam_is_torch_adam_on_the_whole_table():
    table = make_table("dense-adam")
    copy = table.weight.clone().requires_grad_()
    adam = torch.optim.Adam([copy], lr=0.1)

    for rows, grad in make_steps():
        table.lookup(rows).apply(grad)
        copy.grad = torch.zeros_like(copy).index_add_(0, rows, grad)
        copy.grad[0] = 0
        adam.step()

    torch.testing.assert_close(table.weight, copy.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense-adam"])
def test_rows_without_a_gradient_keep_every_bit(name):
    table = make_table(name, weight_decay=0.1, frequency_scaling=0.5, support=torch.arange(ROWS))
    before = table.weight.clone()

    run(table, make_steps())

    assert torch.equal(table.weight[10:], before[10:])
    assert not (table.weight[1:10] == before[1:10]).all(1).any()


def test_dense_adam_moves_rows_by_old_momentum_and_lazy_adam_does_not():
    once = [(torch.tensor([3]), torch.ones(1, DIM))]
    other = [(torch.tensor([5]), torch.ones(1, DIM))] * 3
    dense, lazy = make_table("dense-adam"), make_table("lazy-adam")
    for table in (dense, lazy):
        run(table, once)
    dense_before, lazy_before = dense.weight[3].clone(), lazy.weight[3].clone()

    run(dense, other)
    run(lazy, other)

    assert not torch.equal(dense.weight[3], dense_before)
    assert torch.equal(lazy.weight[3], lazy_before)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_after_a_thaw_with_reset_equals_a_fresh_optimizers(name):
    table = make_table(name)
    run(table, make_steps())
    table.freeze()
    rows_then = table.weight.clone()

    table.thaw(reset_state=True)
    run(table, make_steps(1, seed=7))

    fresh = LocalTable(rows_then, optimizer=make_optimizer(name, ROWS, DIM), learning_rate=0.1)
    run(fresh, make_steps(1, seed=7))
    assert torch.equal(table.weight, fresh.weight)


def test_the_first_steps_of_idle_rows_are_those_of_theory():
    """Row-wise Adagrad and lazy Adam first move a row by one learning rate a coordinate."""
    gradient = torch.full((1, DIM), 0.3)
    rows = torch.tensor([1])

    for optimizer in (RowWiseAdagrad(ROWS), LazyAdam(ROWS, DIM)):
        direction = optimizer.direction(rows, gradient)
        torch.testing.assert_close(direction, torch.ones(1, DIM), rtol=0, atol=1e-5)


def test_weight_decay_shrinks_the_rows_of_the_batch_by_the_learning_rate():
    table = make_table("sgd", weight_decay=0.5)
    before = table.weight.clone()

    run(table, [(torch.tensor([3, 3]), torch.zeros(2, DIM))])

    torch.testing.assert_close(table.weight[3], before[3] * (1 - 0.1 * 0.5))
    assert torch.equal(table.weight[4:], before[4:])


def test_the_pull_draws_rare_rows_back_more():
    anchor = torch.zeros(ROWS, DIM)
    support = torch.zeros(ROWS, dtype=torch.int64)
    support[3] = 8
    table = make_table("sgd", pull=0.5, anchor=anchor, support=support)
    before = table.weight.clone()

    run(table, [(torch.tensor([2, 3]), torch.zeros(2, DIM))])

    torch.testing.assert_close(table.weight[2], before[2] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(table.weight[3], before[3] * (1 - 0.1 * 0.5 / 3))


@pytest.mark.parametrize("name", ["sgd", "dense-adam"])
def test_the_drift_cap_keeps_rows_within_a_multiple_of_their_pretrained_norm(name):
    free = make_table(name, learning_rate=2.0)
    anchor = free.weight.clone()
    capped = make_table(name, learning_rate=2.0, drift_cap=0.5, anchor=anchor)
    one = [(torch.tensor([2, 4]), torch.tensor([[5.0] * DIM, [1e-3] * DIM]))]

    run(free, one)
    run(capped, one)

    drift = capped.weight - anchor
    assert float(drift[2].norm() / anchor[2].norm()) == pytest.approx(0.5, rel=1e-5)
    way = (free.weight - anchor)[2]
    torch.testing.assert_close(drift[2] / drift[2].norm(), way / way.norm())
    if name == "sgd":
        assert torch.equal(capped.weight[4], free.weight[4])


def test_frequency_scaling_slows_rare_rows_by_the_power_of_their_share():
    support = torch.zeros(ROWS, dtype=torch.int64)
    support[3], support[5] = 3, 15
    table = make_table("sgd", frequency_scaling=0.5, support=support)
    before = table.weight.clone()

    run(table, [(torch.tensor([2, 3, 5]), torch.ones(3, DIM))])

    moved = (before - table.weight)[:, 0]
    assert moved[[2, 3, 5]].tolist() == pytest.approx([0.1 * 0.25, 0.1 * 0.5, 0.1], rel=1e-4)


def test_the_force_of_decay_and_pull_meets_the_rows_of_the_batch_even_under_dense_adam():
    table = make_table("dense-adam", weight_decay=0.5, learning_rate=0.1)
    free = make_table("dense-adam", learning_rate=0.1)
    before = table.weight.clone()
    table.freeze(torch.arange(ROWS) == 2)
    free.freeze(torch.arange(ROWS) == 2)

    for each in (table, free):
        run(each, [(torch.tensor([2, 5, 9]), torch.ones(3, DIM))])

    for row in (5, 9):
        torch.testing.assert_close(table.weight[row], free.weight[row] - 0.05 * before[row])
    untouched = [row for row in range(ROWS) if row not in (5, 9)]
    assert torch.equal(table.weight[untouched], before[untouched])


@pytest.mark.parametrize("name", NAMES)
def test_each_update_takes_the_learning_rate_set_just_before_it_the_first_included(name):
    table = make_table(name, learning_rate=99.0)
    reference = Reference(name, table.weight, 99.0)

    for index, (rows, grad) in enumerate(make_steps()):
        table.learning_rate = reference.lr = 0.1 / (index + 1)
        table.lookup(rows).apply(grad)
        reference.step(rows, grad)

    torch.testing.assert_close(table.weight.double(), reference.weight, rtol=0, atol=2e-5)
