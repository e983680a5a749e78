import pytest
import torch

from thawline.errors import TrainingError
from thawline.tables import LocalTable
from thawline.tables.local import sum_by_row


def reference_row_wise_adagrad(weight, steps, learning_rate, eps=1e-8):
    """Row by row, in float64: `G += mean(g²)`, then `w -= lr g / (sqrt(G) + eps)`."""
    weight = weight.double().clone()
    state = [0.0] * len(weight)
    for rows, grad in steps:
        summed = {}
        for row, piece in zip(rows.tolist(), grad.double(), strict=True):
            summed[row] = summed.get(row, 0) + piece
        for row, g in summed.items():
            if row == 0:
                continue
            state[row] += float((g * g).mean())
            weight[row] -= learning_rate * g / (state[row] ** 0.5 + eps)
    return weight, torch.tensor(state)


def random_steps(generator, count, num_rows=20, lookups=50, dim=8):
    return [
        (
            torch.randint(0, num_rows, (lookups,), generator=generator),
            torch.randn(lookups, dim, generator=generator),
        )
        for _ in range(count)
    ]


def apply_steps(table, steps):
    for rows, grad in steps:
        table.lookup(rows).apply(grad)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_row_wise_adagrad_equals_a_float64_reference_with_duplicates_and_padding(generator):
    table = LocalTable(torch.randn(20, 8, generator=generator), learning_rate=0.1)
    start = table.weight.clone()
    steps = random_steps(generator, 6)

    apply_steps(table, steps)

    weight, state = reference_row_wise_adagrad(start, steps, 0.1)
    torch.testing.assert_close(table.weight.double(), weight, rtol=0, atol=2e-6)
    torch.testing.assert_close(table.optimizer.state["accumulator"], state, rtol=1e-5, atol=1e-6)


def test_the_padding_row_is_zero_and_never_moves(generator):
    table = LocalTable(torch.ones(5, 4), learning_rate=1.0)

    apply_steps(table, [(torch.tensor([0, 0, 3]), torch.ones(3, 4))])

    assert table.weight[0].tolist() == [0.0] * 4
    assert table.weight[3].tolist() != [1.0] * 4


def test_duplicate_rows_are_summed_once_in_ascending_order():
    rows, summed = sum_by_row(
        torch.tensor([7, 2, 7, 2, 5]), torch.tensor([[1.0], [10.0], [2.0], [20.0], [5.0]])
    )

    assert rows.tolist() == [2, 5, 7]
    assert summed.tolist() == [[30.0], [5.0], [3.0]]


def test_a_frozen_table_gives_no_graph_and_keeps_every_bit(generator):
    table = LocalTable(torch.randn(20, 8, generator=generator))
    apply_steps(table, random_steps(generator, 2))
    weight, state = table.weight.clone(), table.optimizer.state["accumulator"].clone()

    table.freeze()
    embeddings = table.lookup(torch.tensor([1, 2, 3])).wait()

    assert not embeddings.requires_grad
    with pytest.raises(TrainingError, match="frozen table"):
        table.lookup(torch.tensor([1])).apply(torch.ones(1, 8))
    assert torch.equal(table.weight, weight)
    assert torch.equal(table.optimizer.state["accumulator"], state)


def test_a_lookup_of_a_training_table_is_a_leaf_that_collects_a_gradient():
    table = LocalTable(torch.ones(4, 2))

    lookup = table.lookup(torch.tensor([1, 1, 2]))
    embeddings = lookup.wait()
    (embeddings * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()

    assert embeddings.is_leaf
    assert embeddings.grad.tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("reset", [True, False])
def test_the_first_update_after_a_thaw_is_a_fresh_one_only_if_state_is_reset(generator, reset):
    table = LocalTable(torch.randn(20, 8, generator=generator), learning_rate=0.1)
    before, after = random_steps(generator, 3), random_steps(generator, 1)
    apply_steps(table, before)
    table.freeze()
    frozen = table.weight.clone()

    table.thaw(reset_state=reset)
    apply_steps(table, after)

    fresh = LocalTable(frozen.clone(), learning_rate=0.1)
    apply_steps(fresh, after)
    assert torch.equal(table.weight, fresh.weight) is reset


def test_the_learning_rate_of_the_moment_is_used(generator):
    step = random_steps(generator, 1)
    start = torch.randn(20, 8, generator=generator)
    slow = LocalTable(start.clone(), learning_rate=9.0)
    slow.learning_rate = 0.5

    apply_steps(slow, step)

    weight, _ = reference_row_wise_adagrad(start, step, 0.5)
    torch.testing.assert_close(slow.weight[1:].double(), weight[1:], rtol=0, atol=2e-6)


def test_a_row_outside_the_table_is_named():
    with pytest.raises(TrainingError, match="row 9 is outside a table of 4 rows"):
        LocalTable(torch.ones(4, 2)).lookup(torch.tensor([1, 9]))


def test_a_random_table_is_the_same_for_a_seed_and_has_rows_of_norm_one():
    first, again = LocalTable.random(500, 64, seed=3), LocalTable.random(500, 64, seed=3)

    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, LocalTable.random(500, 64, seed=4).weight)
    assert first.weight[1:].norm(dim=1).mean() == pytest.approx(1.0, abs=0.02)


def test_a_row_below_the_table_is_named():
    with pytest.raises(TrainingError, match="row -1 is outside a table of 4 rows"):
        LocalTable(torch.ones(4, 2)).lookup(torch.tensor([1, -1]))


def test_gradients_of_rows_left_out_are_not_summed():
    rows, grad = torch.tensor([7, 2, 0, 7, 4]), torch.tensor([[1.0], [10.0], [5.0], [2.0], [9.0]])
    keep = torch.ones(8, dtype=torch.bool)
    keep[2] = False

    kept, summed = sum_by_row(rows, grad, keep=keep, drop=(0, 4))

    assert kept.tolist() == [7]
    assert summed.tolist() == [[3.0]]


def test_rows_may_come_in_32_bits():
    wide, narrow = (LocalTable(torch.ones(6, 2), learning_rate=0.1) for _ in range(2))
    rows = torch.tensor([3, 5, 3, 0])
    grad = torch.arange(4.0)[:, None].expand(4, wide.weight.shape[1]).contiguous()

    wide.lookup(rows).apply(grad)
    narrow.lookup(rows.int()).apply(grad)

    assert torch.equal(wide.weight, narrow.weight)
