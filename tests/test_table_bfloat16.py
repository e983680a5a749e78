"""Rows held as bfloat16: half the memory, and steps that add up on average."""

import pytest
import torch
from row_reference import DIM, NAMES, ROWS, Reference, make_steps, make_table, mask_of, run

from thawline.tables import LocalTable, make_optimizer
from thawline.tables.rounding import round_stochastically

VALUES = (1.0 + 1e-4, -1.0 - 1e-4, 0.3, -2.7e-5, 1e-39, 7.3e30, 0.0, 1.5)
"""Just beside a bfloat16, between two, denormal, huge, and two that are bfloat16 already."""


@pytest.mark.parametrize("value", VALUES)
def test_the_mean_of_many_roundings_is_the_value(value):
    values = torch.full((200_000,), value)

    rounded = round_stochastically(values, torch.Generator().manual_seed(3)).double()

    below, above = rounded.min().item(), rounded.max().item()
    exact = float(values[0].double())
    assert below <= exact <= above
    assert set(rounded.unique().tolist()) == {below, above}
    probability = (exact - below) / (above - below) if above > below else 0.0
    error = (above - below) * (probability * (1 - probability) / len(values)) ** 0.5
    assert abs(rounded.mean().item() - exact) <= 4 * error


def test_the_two_results_are_neighbours():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))

    rounded = round_stochastically(values, torch.Generator().manual_seed(1))

    down = (values.view(torch.int32) & -0x10000).view(torch.float32)
    up = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((rounded.float() == down) | (rounded.float() == up)).all()


def test_rounding_is_decided_by_the_generator_alone():
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def rounded(seed):
        return round_stochastically(values, torch.Generator().manual_seed(seed))

    assert torch.equal(rounded(1), rounded(1))
    assert not torch.equal(rounded(1), rounded(2))


def test_what_is_infinite_or_no_number_stays_so():
    values = torch.tensor([float("inf"), -float("inf"), float("nan")])

    rounded = round_stochastically(values, torch.Generator().manual_seed(1))

    assert rounded.tolist()[:2] == [float("inf"), -float("inf")]
    assert rounded[2].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_many_draws_of_one_update_is_the_float64_references(name):
    """Columns are repeated 2,000 times; each copy is rounded by a draw of its own."""
    copies = 2_000
    start = make_table(name, dtype=torch.bfloat16).weight
    reference = Reference(name, start, 0.001)
    table = LocalTable(
        start.repeat(1, copies),
        optimizer=make_optimizer(name, ROWS, DIM * copies),
        learning_rate=0.001,
    )

    for rows, grad in make_steps(1):
        reference.step(rows, grad)
        table.lookup(rows).apply(grad.repeat(1, copies))

    draws = table.weight.double().view(ROWS, copies, DIM)
    error = draws.std(1) / copies**0.5
    assert ((draws.mean(1) - reference.weight).abs() <= 5 * error + 1e-6).all()
    touched = [row for row in set(rows.tolist()) if row]
    assert (draws.std(1)[touched] > 0).float().mean() > 0.9


def test_steps_far_below_the_last_bit_add_up():
    """The last bit of a bfloat16 near 1 is 1/128; a step of 1/10,000 to the nearest is none."""
    table = LocalTable(
        torch.ones(2, 1_000).bfloat16(), optimizer=make_optimizer("sgd", 2, 1_000), learning_rate=1
    )

    run(table, [(torch.tensor([1]), torch.full((1, 1_000), 1e-4))] * 300)

    assert table.weight[1].double().mean().item() == pytest.approx(1 - 0.03, abs=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_lookups_and_state_are_float32_and_closed_or_padding_rows_keep_every_bit(name):
    table = make_table(name, dtype=torch.bfloat16, padding_row=(0, 2))
    table.freeze(mask_of(5, 6))
    before = table.weight.clone()

    embeddings = table.lookup(torch.tensor([1, 5])).wait()
    run(table, make_steps())

    assert embeddings.dtype == torch.float32
    assert torch.equal(embeddings, before[[1, 5]].float())
    assert table.weight.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in table.optimizer.state_dict().values())
    assert torch.equal(table.weight[[5, 6]], before[[5, 6]])
    assert (table.weight[[0, 2]] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bits(name):
    first, again = (make_table(name, dtype=torch.bfloat16) for _ in range(2))

    for table in (first, again):
        run(table, make_steps())

    assert torch.equal(first.weight, again.weight)


def test_rules_hold_for_bfloat16_rows():
    anchor = make_table("sgd", dtype=torch.bfloat16).weight.clone()
    table = make_table("sgd", dtype=torch.bfloat16, learning_rate=2.0, drift_cap=0.5, anchor=anchor)

    run(table, [(torch.tensor([2, 4]), torch.tensor([[5.0] * DIM, [1e-2] * DIM]))])

    drift = (table.weight.float() - anchor.float()).norm(dim=1) / anchor.float().norm(dim=1)
    assert drift[2].item() == pytest.approx(0.5, abs=0.01)
    assert 0 < drift[4].item() < 0.1
