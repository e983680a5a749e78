"""Rows of a table that train while others do not."""

import pytest
import torch
from row_reference import DIM, NAMES, ROWS, Reference, make_steps, make_table, mask_of, run

from thawline.errors import TrainingError

EARLY, LATE = (1, 2, 3, 10), (3, 4, 5, 6)
"""Rows that thaw at different times; row 10 never has a gradient, row 3 is in both."""


def follow(table, reference, steps):
    for rows, grad in steps:
        table.lookup(rows).apply(grad)
        reference.step(rows, grad)


def assert_follows(table, reference):
    torch.testing.assert_close(table.weight.double(), reference.weight, rtol=0, atol=3e-5)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("padding", [(0,), (0, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_thaw_and_freeze_in_mid_run_follow_a_float64_reference(name, padding, reset):
    table = make_table(name, padding_row=padding)
    reference = Reference(name, table.weight, 0.1, padding=padding)
    steps = make_steps(12)
    follow(table, reference, steps[:3])

    table.freeze()
    table.thaw(reset_state=reset, rows=mask_of(*EARLY))
    reference.open = set(EARLY)
    reference.reset(EARLY if reset else ())
    follow(table, reference, steps[3:6])

    table.thaw(reset_state=reset, rows=mask_of(*LATE))
    reference.open |= set(LATE)
    reference.reset((4, 5, 6) if reset else ())
    follow(table, reference, steps[6:8])

    table.freeze(mask_of(1, 5))
    reference.open -= {1, 5}
    follow(table, reference, steps[8:10])

    table.thaw(reset_state=reset)
    reference.open = set(range(ROWS))
    reference.reset(range(ROWS) if reset else ())
    follow(table, reference, steps[10:])

    assert_follows(table, reference)
    assert (table.weight[list(padding)] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_closed_rows_of_an_open_table_and_their_state_keep_every_bit(name):
    table = make_table(name, weight_decay=0.1, support=torch.arange(ROWS), pull=0.1)
    run(table, make_steps(3))
    table.freeze(~mask_of(*EARLY))
    closed = [row for row in range(ROWS) if row not in EARLY]
    before = {key: value[closed].clone() for key, value in table.optimizer.state_dict().items()}
    weight = table.weight.clone()

    run(table, make_steps(4, seed=9))

    assert torch.equal(table.weight[closed], weight[closed])
    for key, value in table.optimizer.state_dict().items():
        assert torch.equal(value[closed], before[key])
    assert not (table.weight[[1, 2, 3]] == weight[[1, 2, 3]]).all(1).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_of_rows_that_thaw_late_equals_a_fresh_optimizers(name):
    table = make_table(name)
    run(table, make_steps())
    table.freeze(mask_of(*LATE))
    run(table, make_steps(3, seed=5))
    before = table.weight.clone()

    table.thaw(reset_state=True, rows=mask_of(*LATE))
    step = make_steps(1, seed=7)
    run(table, step)

    fresh = make_table(name)
    fresh.weight.copy_(before)
    run(fresh, step)
    assert torch.equal(table.weight[list(LATE)], fresh.weight[list(LATE)])
    assert not torch.equal(table.weight, before)


@pytest.mark.parametrize("name", ["lazy-adam", "dense-adam"])
def test_steps_are_counted_from_the_thaw_and_reading_does_not_count(name):
    table = make_table(name)
    run(table, make_steps())
    table.freeze()
    table.lookup(torch.tensor([1, 3])).wait()
    table.thaw(reset_state=True, rows=mask_of(1, 3))
    table.lookup(torch.tensor([1, 3])).wait()

    table.lookup(torch.tensor([1, 3, 5])).apply(torch.ones(3, DIM))

    assert table.optimizer.state["steps"][[1, 3], 0].tolist() == [1, 1]
    table.lookup(torch.tensor([1])).apply(torch.ones(1, DIM))
    second = 2 if name == "dense-adam" else 1
    assert table.optimizer.state["steps"][[1, 3], 0].tolist() == [2, second]


@pytest.mark.parametrize("name", NAMES)
def test_opening_every_row_one_by_one_is_opening_the_table(name):
    whole, pieces = make_table(name), make_table(name, trainable=False)
    for row in range(1, ROWS):
        pieces.thaw(reset_state=True, rows=mask_of(row))

    run(whole, make_steps())
    run(pieces, make_steps())

    assert torch.equal(whole.weight, pieces.weight)


def test_a_table_trains_while_any_row_is_open_and_padding_never_is():
    table = make_table("sgd", trainable=False, padding_row=(0, 7))
    assert not table.trainable
    table.thaw(reset_state=True, rows=mask_of(0, 7))
    assert not table.trainable
    table.thaw(reset_state=True, rows=mask_of(3, 4))
    assert table.trainable
    assert table.lookup(torch.tensor([9])).wait().requires_grad
    table.freeze(mask_of(3))
    assert table.trainable
    table.freeze(mask_of(4))
    assert not table.trainable
    assert not table.lookup(torch.tensor([3])).wait().requires_grad


def test_a_mask_that_is_changed_afterwards_changes_nothing():
    table = make_table("sgd", trainable=False)
    mask = mask_of(3)
    table.thaw(reset_state=True, rows=mask)
    before = table.weight.clone()
    mask[:] = True

    run(table, [(torch.tensor([3, 4]), torch.ones(2, DIM))])

    assert torch.equal(table.weight[4], before[4])
    assert not torch.equal(table.weight[3], before[3])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_closed_rows_alone_or_on_no_row_moves_nothing(name):
    table = make_table(name, trainable=False)
    table.thaw(reset_state=True, rows=mask_of(3))
    before = table.weight.clone()

    run(table, [(torch.tensor([4, 5]), torch.ones(2, DIM))])
    run(table, [(torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM))])

    assert torch.equal(table.weight, before)


@pytest.mark.parametrize(
    "rows", [torch.tensor([1, 2]), torch.ones(ROWS), torch.ones(3, dtype=torch.bool)]
)
def test_rows_that_are_no_mask_of_the_table_are_refused(rows):
    table = make_table("sgd")

    with pytest.raises(TrainingError, match=r"bool, of shape \[12\]"):
        table.thaw(reset_state=True, rows=rows)
    with pytest.raises(TrainingError, match="rows to open or close"):
        table.freeze(rows)
