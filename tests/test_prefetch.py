"""Lookups ahead of their batch, against a loop that is one update late by hand."""

import pytest
import torch

from thawline.errors import ConfigError, TrainingError
from thawline.tables import LocalTable, TableGroup, make_optimizer
from thawline.training.prefetch import Prefetcher

ROWS, DIM = 12, 3
OPTIMIZERS = ("row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd")


def make_table(optimizer="row-wise-adagrad", **options):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, DIM, generator=generator)
    made = make_optimizer(optimizer, ROWS, DIM)
    return LocalTable(weight, optimizer=made, learning_rate=0.1, **options)


def make_batches(count=7):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (8,), generator=generator) for _ in range(count)]


def loss_of(rows):
    return (rows.tanh() * torch.arange(1.0, 1 + rows.numel()).view_as(rows)).sum()


def late_by_hand(table, batches, staleness):
    """Each batch reads the rows as they were `staleness` updates before its turn."""
    past = [table.weight.clone()]
    for index, rows in enumerate(batches):
        read = past[max(0, index - staleness)][rows].requires_grad_()
        loss_of(read).backward()
        table.update(rows, read.grad)
        past.append(table.weight.clone())
    return table.weight


def train(prefetcher, batches, *, call=True, **hooks):
    for step in prefetcher.steps(batches, **hooks):
        loss = loss_of(step.embeddings["item"])
        if call:
            step.look_ahead()
        loss.backward()
        step.apply()


def prefetcher_of(table, staleness):
    return Prefetcher(TableGroup({"item": table}), lambda rows: {"item": rows}, staleness=staleness)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("call", [True, False], ids=["looks ahead", "forgets to"])
def test_a_run_equals_a_hand_written_late_reference_bit_for_bit(optimizer, staleness, call):
    table, batches = make_table(optimizer), make_batches()
    expected = late_by_hand(make_table(optimizer), batches, staleness)

    train(prefetcher_of(table, staleness), batches, call=call)

    assert torch.equal(table.weight, expected)


def test_every_batch_is_drawn_and_looked_up_once_in_the_article_s_order():
    table, events = make_table(), []
    batches = make_batches(4)
    numbers = {id(rows): index for index, rows in enumerate(batches)}
    lookup, update = table.lookup, table.update
    table.lookup = lambda rows: events.append(f"lookup {numbers[id(rows)]}") or lookup(rows)
    table.update = lambda rows, grad: (
        events.append(f"update {numbers[id(rows)]}") or update(rows, grad)
    )

    for index, step in enumerate(prefetcher_of(table, 1).steps(iter(batches))):
        events.append(f"forward {index}")
        loss = loss_of(step.embeddings["item"])
        step.look_ahead()
        events.append(f"backward {index}")
        loss.backward()
        step.apply()

    assert events == [
        *("lookup 0", "forward 0", "lookup 1", "backward 0", "update 0"),
        *("forward 1", "lookup 2", "backward 1", "update 1"),
        *("forward 2", "lookup 3", "backward 2", "update 2"),
        *("forward 3", "backward 3", "update 3"),
    ]


@pytest.mark.parametrize("staleness", [1, 3])
def test_lookups_do_not_cross_a_change_of_the_tables(staleness):
    table, batches = make_table(trainable=False), make_batches(6)
    thawed_at, seen = 3, []

    def prepare(index):
        if index == thawed_at:
            table.thaw(reset_state=True)

    steps = prefetcher_of(table, staleness).steps(
        batches, prepare=prepare, drained_at=lambda index: index == thawed_at
    )
    for step in steps:
        seen.append(step.embeddings["item"].requires_grad)
        if seen[-1]:
            loss_of(step.embeddings["item"]).backward()
        step.apply()

    assert seen == [False] * 3 + [True] * 3
    expected = late_by_hand(make_table(), batches[3:], staleness)
    assert torch.equal(table.weight, expected)


def test_evaluation_between_two_runs_finds_nothing_in_flight():
    table, batches = make_table(), make_batches(6)
    prefetcher = prefetcher_of(table, 2)
    twin = make_table()

    for half in (batches[:3], batches[3:]):
        train(prefetcher, half)
        late_by_hand(twin, half, 2)
        assert torch.equal(table.weight, twin.weight)


def test_a_step_must_be_applied_exactly_once():
    steps = prefetcher_of(make_table(), 1).steps(make_batches())
    step = next(steps)
    with pytest.raises(TrainingError, match="ended without its update"):
        next(steps)

    step.apply({"item": None})
    with pytest.raises(TrainingError, match="applied twice"):
        step.apply()


def test_the_lane_hears_of_all_that_lookups_read_before_a_run_is_dropped():
    table, batches, told = make_table(), make_batches(3), []
    prefetcher = Prefetcher(
        TableGroup({"item": table}), lambda rows: {"item": rows}, counts=lambda rows: rows.max()
    )
    prefetcher.lane.reads = told.append
    steps = prefetcher.steps(batches)
    step = next(steps)
    step.look_ahead()
    assert step.counts == batches[0].max()
    steps.close()

    assert [own.tolist() for own in told] == [
        own.tolist() for rows in batches[:2] for own in (rows, rows.max())
    ]


def test_no_batch_is_no_step():
    prepared = []

    assert list(prefetcher_of(make_table(), 1).steps([], prepare=prepared.append)) == []
    assert prepared == []


def test_a_negative_staleness_is_refused():
    with pytest.raises(ConfigError, match="staleness of -1"):
        prefetcher_of(make_table(), -1)


def test_an_error_of_the_reader_surfaces_with_its_message():
    def broken():
        yield from make_batches(2)
        raise OSError("part-3.parquet is truncated")

    with pytest.raises(OSError, match=r"part-3\.parquet is truncated"):
        train(prefetcher_of(make_table(), 1), broken())
