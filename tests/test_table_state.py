"""A table that is saved, loaded or replaced."""

import pytest
import torch
from row_reference import DIM, NAMES, ROWS, make_steps, make_table, mask_of, run
from safetensors.torch import load, save

from thawline.errors import DataError
from thawline.tables import LocalTable, make_optimizer

DTYPES = (torch.float32, torch.bfloat16)


def saved(table):
    """What comes back from a checkpoint's file."""
    return load(save(table.state_dict()))


@pytest.mark.parametrize("opened", ["all", "some", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_in_mid_window_changes_no_bit(name, dtype, opened):
    def until_the_middle():
        table = make_table(name, dtype=dtype, padding_row=(0, 2))
        run(table, make_steps(3))
        if opened == "some":
            table.thaw(reset_state=False)
            table.freeze(mask_of(1, 5))
        elif opened == "none":
            table.freeze()
        else:
            run(table, make_steps(2, seed=3))
        return table

    def from_the_middle(table):
        if table.trainable:
            run(table, make_steps(3, seed=5))
        table.thaw(reset_state=False)
        run(table, make_steps(2, seed=6))
        return table.state_dict()

    whole = from_the_middle(until_the_middle())
    other = LocalTable(
        torch.full((ROWS, DIM), 7.0).to(dtype),
        optimizer=make_optimizer(name, ROWS, DIM),
        learning_rate=3.0,
        padding_row=(0, 2),
        seed=9,
    )
    run(other, make_steps(2, seed=8))
    other.load_state_dict(saved(until_the_middle()))
    resumed = from_the_middle(other)

    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key


def test_a_state_is_loaded_into_the_same_memory():
    table = make_table("adagrad")
    weight = table.weight
    state = saved(make_table("adagrad"))
    run(table, make_steps())

    table.load_state_dict(state)

    assert table.weight is weight
    assert torch.equal(weight, state["weight"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_table("lazy-adam"), "optimizer state"),
        (make_table("sgd"), "optimizer state"),
        (make_table("adagrad"), "optimizer state"),
        (make_table("row-wise-adagrad", dtype=torch.bfloat16), "bfloat16"),
        (LocalTable(torch.ones(ROWS + 1, DIM)), r"\[13, 4\]"),
        (LocalTable(torch.ones(ROWS, DIM + 1)), r"\[12, 5\]"),
    ],
)
def test_a_state_of_another_table_or_optimizer_is_refused_and_nothing_changes(other, message):
    table = make_table("row-wise-adagrad")
    run(table, make_steps())
    before = saved(table)

    with pytest.raises(DataError, match=message):
        table.load_state_dict(other.state_dict())

    for key, value in table.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_state_without_rows_is_refused():
    with pytest.raises(DataError, match="saved table of none"):
        make_table("sgd").load_state_dict({})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_replaced_rows_are_bit_equal_and_train_on_with_or_without_state(name, reset, dtype):
    table = make_table(name, dtype=dtype, padding_row=(0, 4))
    weight, state = table.weight, make_table(name).optimizer
    run(table, make_steps())
    state.load_state_dict(table.optimizer.state_dict())
    given = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4)).to(dtype)

    table.replace(given, reset_state=reset)

    expected = given.clone()
    expected[[0, 4]] = 0
    assert table.weight is weight
    assert torch.equal(weight, expected)
    fresh = make_optimizer(name, ROWS, DIM).state_dict()
    for key, value in table.optimizer.state_dict().items():
        assert torch.equal(value, (fresh if reset else state.state_dict())[key])


@pytest.mark.parametrize("shape", [(ROWS + 1, DIM), (ROWS, DIM + 1), (1, DIM), (DIM,)])
def test_rows_of_another_shape_are_refused(shape):
    table = make_table("sgd")

    with pytest.raises(DataError, match=r"do not fit a table of \[12, 4\]"):
        table.replace(torch.ones(shape), reset_state=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_are_refused_and_named(bad, dtype):
    weight = torch.ones(ROWS, DIM, dtype=dtype)
    weight[7, 2] = bad

    with pytest.raises(DataError, match="row 7 of a table holds NaN or inf"):
        LocalTable(weight)
    table = make_table("sgd", dtype=dtype)
    before = table.weight.clone()
    with pytest.raises(DataError, match="row 7 of a table holds NaN or inf"):
        table.replace(weight, reset_state=True)
    assert torch.equal(table.weight, before)


def test_rows_of_another_type_are_refused():
    with pytest.raises(DataError, match=r"torch\.float64"):
        LocalTable(torch.ones(ROWS, DIM, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_forgets_the_rows_it_is_told_to_and_no_other(name):
    table = make_table(name)
    run(table, make_steps())
    before = {key: value.clone() for key, value in table.optimizer.state_dict().items()}

    table.optimizer.reset(mask_of(2, 3))

    for key, value in table.optimizer.state_dict().items():
        assert (value[[2, 3]] == 0).all()
        assert torch.equal(value[4:], before[key][4:])
        assert (before[key][[2, 3]] != 0).all()
    table.optimizer.reset()
    assert all((value == 0).all() for value in table.optimizer.state_dict().values())
