"""What holds for sharded tables, in every process of a job; `test_sharded` runs these."""

from __future__ import annotations

import functools
import os
import random
import time
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from thawline.errors import ConfigError, DataError, TrainingError
from thawline.tables import LocalTable, make_optimizer
from thawline.tables import parts as room
from thawline.tables.optimizers import OptimizerName
from thawline.tables.parts import Shards
from thawline.tables.sharded import FUSED, ShardedTables
from thawline.tables.split import SplitTables
from thawline.training.prefetch import Prefetcher

SIZES = {"item": (13, 8), "user": (6, 8), "author": (7, 4)}
"""Rows and width by table: two widths, and numbers of rows that do not divide."""


def in_both_engines(check):
    """The check, of the tables that TorchRec splits and of our own."""

    @functools.wraps(check)
    def run(ranks):
        for engine in (SplitTables, ShardedTables):
            check(ranks, engine)

    return run


def make_rows(name):
    generator = torch.Generator().manual_seed(len(name))
    rows = torch.randn(*SIZES[name], generator=generator)
    rows[0] = 0
    return rows


def make_sharded(ranks, engine, optimizer="row-wise-adagrad", *, names=tuple(SIZES), **options):
    return engine(
        {name: Shards(make_rows(name), optimizer, 0.1, **options) for name in names},
        group=ranks.tables,
    )


def optimizers_of(engine):
    """Those that the backward can hold, or all."""
    return FUSED if engine is ShardedTables else get_args(OptimizerName)


def make_local(optimizer="row-wise-adagrad"):
    return {
        name: LocalTable(
            make_rows(name), optimizer=make_optimizer(optimizer, *size), learning_rate=0.1
        )
        for name, size in SIZES.items()
    }


def parts_of(ranks, step, *, names=tuple(SIZES), empty=None, count=9):
    """The rows and gradients of each process; process `empty` has none."""
    parts = []
    for rank in range(ranks.size):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        size = 0 if rank == empty else count
        rows = {
            name: torch.randint(0, SIZES[name][0], (size,), generator=generator) for name in names
        }
        grads = {name: torch.randn(size, SIZES[name][1], generator=generator) for name in names}
        parts.append((rows, grads))
    return parts


def joined(parts, index, name):
    return torch.cat([part[index][name] for part in parts])


def require_close(sharded, local, atol=1e-5):
    for name, table in sharded.sharded.items():
        torch.testing.assert_close(
            table.local, local[name].weight[table.own], rtol=0, atol=atol, msg=name
        )


def snapshot(table):
    return {name: each.clone() for name, each in table.state_dict().items()}


def changed(table, before):
    """The parts of a table's state that are not the same bits as before."""
    now = table.state_dict()
    return [name for name in before if not torch.equal(now[name], before[name])]


def train_both(ranks, sharded, local, steps):
    for step in steps:
        parts = parts_of(ranks, step)
        rows, grads = parts[ranks.rank]
        sharded.lookup(rows).apply(grads)
        for name, table in local.items():
            table.update(joined(parts, 0, name), joined(parts, 1, name))
    sharded.settle()


@in_both_engines
def updates_equal_one_process_on_the_whole_batch(ranks, engine):
    for optimizer in optimizers_of(engine):
        sharded, local = make_sharded(ranks, engine, optimizer), make_local(optimizer)
        for step in range(6):
            parts = parts_of(ranks, step, empty=ranks.size - 1 if step == 2 else None)
            rows, grads = parts[ranks.rank]
            lookup = sharded.lookup(rows)
            read = lookup.wait()
            for name, table in local.items():
                torch.testing.assert_close(read[name], table.weight[rows[name]], rtol=0, atol=1e-5)
                # Set after the lookup, as it is where rows are read ahead.
                table.learning_rate = sharded.tables[name].learning_rate = 0.1 / (1 + step)
            lookup.apply(grads)
            for name, table in local.items():
                table.update(joined(parts, 0, name), joined(parts, 1, name))
            require_close(sharded, local)


@in_both_engines
def no_row_at_all_is_a_step_like_any_other(ranks, engine):
    sharded = make_sharded(ranks, engine)
    before = {name: snapshot(table) for name, table in sharded.sharded.items()}
    rows = {name: torch.empty(0, dtype=torch.int64) for name in SIZES}
    lookup = sharded.lookup(rows)
    assert {name: list(own.shape) for name, own in lookup.wait().items()} == {
        name: [0, size[1]] for name, size in SIZES.items()
    }
    lookup.apply({})
    assert not any(changed(sharded.tables[name], before[name]) for name in SIZES)


@in_both_engines
def frozen_steps_run_no_backward_and_leave_every_bit(ranks, engine):
    sharded, local = make_sharded(ranks, engine), make_local()
    train_both(ranks, sharded, local, range(2))
    for table in sharded.sharded.values():
        table.freeze()
    before = {name: snapshot(table) for name, table in sharded.sharded.items()}
    for step in range(3):
        lookup = sharded.lookup(parts_of(ranks, step)[ranks.rank][0])
        assert not any(own.requires_grad for own in lookup.wait().values())
        lookup.apply(dict.fromkeys(SIZES))
    assert not any(changed(sharded.tables[name], before[name]) for name in SIZES)
    with pytest.raises(TrainingError, match="frozen table `item`"):
        lookup.apply({"item": torch.ones(9, 8)})


@in_both_engines
def a_thousand_frozen_steps_take_no_more_memory(ranks, engine):
    if ranks.size != 2:  # They take seconds, and what they see is the same everywhere.
        return
    sharded = make_sharded(ranks, engine, names=("item",), trainable=False)
    rows = torch.arange(4_000) % 13  # 128 kB of values a step, so 100 MB in 800 steps.
    used = []
    steps = Prefetcher(sharded, lambda rows: {"item": rows}).steps(repeat(rows, 1_000))
    for index, step in enumerate(steps):
        step.apply()
        if index in (199, 999):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert used[1] - used[0] < 25e6


@in_both_engines
def the_first_update_after_a_thaw_equals_a_fresh_optimizers(ranks, engine):
    for optimizer in optimizers_of(engine):
        sharded = make_sharded(ranks, engine, optimizer)
        train_both(ranks, sharded, {}, range(3))
        before = {name: table.gather() for name, table in sharded.sharded.items()}
        for table in sharded.sharded.values():
            table.freeze()
        sharded.lookup(parts_of(ranks, 3)[ranks.rank][0]).apply({})
        for table in sharded.sharded.values():
            table.thaw(reset_state=True)
        train_both(ranks, sharded, {}, [7])
        parts = parts_of(ranks, 7)
        for name, table in sharded.sharded.items():
            whole = table.gather()
            if ranks.leads:
                made = make_optimizer(optimizer, *SIZES[name])
                fresh = LocalTable(before[name], optimizer=made, learning_rate=0.1)
                fresh.update(joined(parts, 0, name), joined(parts, 1, name))
                torch.testing.assert_close(whole, fresh.weight, rtol=0, atol=1e-5)


@in_both_engines
def a_thaw_may_keep_the_state(ranks, engine):
    sharded, local = make_sharded(ranks, engine), make_local()
    train_both(ranks, sharded, local, range(2))
    for table in [*sharded.sharded.values(), *local.values()]:
        table.freeze()
        table.thaw(reset_state=False)
    train_both(ranks, sharded, local, range(2, 4))
    require_close(sharded, local)


@in_both_engines
def a_frozen_table_beside_one_that_trains_keeps_every_bit(ranks, engine):
    for optimizer in optimizers_of(engine):
        sharded, local = make_sharded(ranks, engine, optimizer), make_local(optimizer)
        train_both(ranks, sharded, local, range(2))
        sharded.tables["user"].freeze()
        before = snapshot(sharded.tables["user"])
        for step in range(3):
            parts = parts_of(ranks, step)
            rows, grads = parts[ranks.rank]
            read = sharded.lookup(rows)
            assert not read.wait()["user"].requires_grad
            assert read.wait()["item"].requires_grad
            read.apply({name: own for name, own in grads.items() if name != "user"})
            for name in ("item", "author"):
                local[name].update(joined(parts, 0, name), joined(parts, 1, name))
        assert changed(sharded.tables["user"], before) == []
        del local["user"], sharded.sharded["user"]
        require_close(sharded, local)


@in_both_engines
def closed_rows_keep_every_bit_and_newly_open_ones_start_fresh(ranks, engine):
    sharded, local = make_sharded(ranks, engine), make_local()
    early = {name: torch.arange(size[0]) % 2 == 0 for name, size in SIZES.items()}
    for name in SIZES:
        for table in (sharded.tables[name], local[name]):
            table.freeze()
            table.thaw(reset_state=True, rows=early[name])
    before = {name: snapshot(table) for name, table in sharded.sharded.items()}
    train_both(ranks, sharded, local, range(3))
    require_close(sharded, local)
    for name, table in sharded.sharded.items():
        closed = ~early[name][table.own]
        for part in ("weight", "optimizer.accumulator"):
            now = table.state_dict()[part]
            assert torch.equal(now[closed], before[name][part][closed])
    for name in SIZES:
        for table in (sharded.tables[name], local[name]):
            table.thaw(reset_state=True, rows=~early[name])
    train_both(ranks, sharded, local, range(3, 6))
    require_close(sharded, local)
    assert all(table.trainable for table in sharded.sharded.values())


@in_both_engines
def padding_rows_stay_zero_and_replaced_rows_train_afresh(ranks, engine):
    sharded = make_sharded(ranks, engine, padding_rows=(0, 3))
    train_both(ranks, sharded, {}, range(2))
    new = {name: torch.ones(*size) for name, size in SIZES.items()}
    for name, table in sharded.sharded.items():
        table.replace(new[name], reset_state=True)
    local = {
        name: LocalTable(new[name].clone(), learning_rate=0.1, padding_row=(0, 3)) for name in SIZES
    }
    train_both(ranks, sharded, local, range(2))
    require_close(sharded, local)
    for table in sharded.sharded.values():
        whole = table.gather()
        if ranks.leads:
            assert not whole[[0, 3]].any()


@in_both_engines
def the_first_process_gathers_a_table_chunk_by_chunk(ranks, engine):
    sharded = make_sharded(ranks, engine)
    table, usual = sharded.tables["item"], room.CHUNK_ROWS
    room.CHUNK_ROWS = 4
    try:
        parts = [len(part) for part in table.chunks()]
        whole = table.gather()
    finally:
        room.CHUNK_ROWS = usual
    assert sum(parts) == 13
    assert max(parts) <= 4
    assert torch.equal(whole, make_rows("item") if ranks.leads else torch.empty(0, 8))


@in_both_engines
def a_saved_state_goes_on_without_a_changed_bit(ranks, engine):
    sharded = make_sharded(ranks, engine)
    train_both(ranks, sharded, {}, range(2))
    saved = {name: snapshot(table) for name, table in sharded.sharded.items()}
    train_both(ranks, sharded, {}, range(2, 4))
    unbroken = {name: snapshot(table) for name, table in sharded.sharded.items()}
    other = make_sharded(ranks, engine, trainable=False)
    for name, table in other.sharded.items():
        table.load_state_dict(saved[name])
    train_both(ranks, other, {}, range(2, 4))
    for name, table in other.sharded.items():
        assert changed(table, unbroken[name]) == []
    with pytest.raises(DataError, match="does not fit this process's"):
        other.tables["item"].load_state_dict(saved["user"])


def a_saved_state_of_one_engine_goes_on_in_the_other(ranks):
    for optimizer in FUSED:
        for one, two in ((ShardedTables, SplitTables), (SplitTables, ShardedTables)):
            sharded, local = make_sharded(ranks, one, optimizer), make_local(optimizer)
            train_both(ranks, sharded, local, range(2))
            other = make_sharded(ranks, two, optimizer, trainable=False)
            for name, table in other.sharded.items():
                table.load_state_dict(snapshot(sharded.sharded[name]))
            train_both(ranks, other, local, range(2, 4))
            require_close(other, local)


@in_both_engines
def prefetch_equals_a_late_reference_written_by_hand(ranks, engine):
    batches = [parts_of(ranks, step) for step in range(6)]
    for staleness in (0, 1, 3):
        sharded, local = make_sharded(ranks, engine), make_local()
        prefetcher = Prefetcher(sharded, lambda parts: parts[ranks.rank][0], staleness=staleness)
        past = [{name: table.weight.clone() for name, table in local.items()}]
        for index, step in enumerate(prefetcher.steps(batches)):
            loss_of(step.embeddings).backward()
            step.apply()
            late = past[max(0, index - staleness)]
            for name, table in local.items():
                rows = joined(batches[index], 0, name)
                read = late[name][rows].requires_grad_()
                loss_of({name: read}).backward()
                table.update(rows, read.grad)
            past.append({name: table.weight.clone() for name, table in local.items()})
        require_close(sharded, local)


def loss_of(embeddings):
    return sum((own.tanh() * own).sum() for own in embeddings.values())


def ids_are_deduplicated_before_they_travel_in_one_exchange_a_width(ranks):
    sharded, sent = make_sharded(ranks, ShardedTables), []
    for each in sharded._collections:
        each.module.input_dist = record(each.module.input_dist, sent)
    rows = {name: torch.tensor([1, 2, 2, 1, 5]) for name in SIZES}
    lookup = sharded.lookup(rows)
    assert sorted(sent) == [3, 6]
    for name, own in lookup.wait().items():
        assert torch.equal(own, make_rows(name)[rows[name]])


def record(input_dist, sent):
    def counting(context, features):
        sent.append(features.values().numel())
        return input_dist(context, features)

    return counting


def all_tables_share_an_exchange_of_distinct_rows(ranks):
    sharded = make_sharded(ranks, SplitTables)
    rows = {name: torch.tensor([1, 2, 2, 1, 5]) for name in SIZES}
    with recorded_exchanges() as sent:
        lookup = sharded.lookup(rows, torch.tensor([3, ranks.rank]))
        read = lookup.wait()
        lookup.apply({name: torch.ones_like(own) for name, own in read.items()})
        sharded.settle()
    # Numbers of rows and the counts, rows, values of all widths; then as many gradients.
    distinct, values = 3 * 3, 3 * (8 + 8 + 4)
    assert sent[0] == ranks.size * (3 + 2)
    assert sent[1] == distinct
    assert sent[3] == values
    assert len(sent) == 4
    assert lookup.total().tolist() == [3 * ranks.size, sum(range(ranks.size))]
    for name, own in read.items():
        assert torch.equal(own, make_rows(name)[rows[name]])


@contextmanager
def recorded_exchanges(delay=lambda: 0.0):
    """How many numbers this process sends in each exchange, which may be late by `delay()` s."""
    plain, sent = dist.all_to_all_single, []

    def recording(output, given, *arguments, **options):
        sent.append(given.numel())
        time.sleep(delay())
        return plain(output, given, *arguments, **options)

    dist.all_to_all_single = recording
    try:
        yield sent
    finally:
        dist.all_to_all_single = plain


def random_delays_change_no_bit(ranks):
    """Each process waits before each exchange as it likes."""
    batches = [parts_of(ranks, step) for step in range(6)]
    found = []
    for longest in (0.0, 0.004):
        draw = random.Random(ranks.rank)  # noqa: S311
        sharded = make_sharded(ranks, SplitTables)
        prefetcher = Prefetcher(sharded, lambda parts: parts[ranks.rank][0], staleness=1)
        with recorded_exchanges(lambda: draw.uniform(0, longest)):  # noqa: B023
            for step in prefetcher.steps(batches):
                loss = loss_of(step.embeddings)
                step.look_ahead()
                loss.backward()
                step.apply()
            found.append({name: snapshot(table) for name, table in sharded.sharded.items()})
    for name, table in sharded.sharded.items():
        assert changed(table, found[0][name]) == []


@in_both_engines
def a_table_alone_and_one_held_whole_answer_too(ranks, engine):
    sharded, local = make_sharded(ranks, engine), make_local()
    parts = parts_of(ranks, 0)
    lookup = sharded.tables["item"].lookup(parts[ranks.rank][0]["item"])
    assert lookup.wait().shape == (9, 8)
    lookup.apply(parts[ranks.rank][1]["item"])
    local["item"].update(joined(parts, 0, "item"), joined(parts, 1, "item"))
    require_close(sharded, local)

    content = LocalTable(torch.ones(4, 2), trainable=False)
    group = sharded.beside(sharded.tables | {"content": content})
    read = group.lookup(parts[ranks.rank][0] | {"content": torch.tensor([3, 1])})
    assert read.wait()["content"].tolist() == [[1, 1], [1, 1]]
    read.apply(dict.fromkeys(group.tables))
    sharded.settle()


@in_both_engines
def what_cannot_be_sharded_is_refused(ranks, engine):
    rows = torch.zeros(4, 8)
    with pytest.raises(DataError, match="bfloat16"):
        engine({"item": Shards(rows.bfloat16())}, group=ranks.tables)
    sharded = make_sharded(ranks, engine)
    for row in (-1, 13):
        asked = {name: torch.tensor([1]) for name in SIZES} | {"item": torch.tensor([2, row])}
        with pytest.raises(TrainingError, match=f"`item`: row {row} is outside .* 13 rows"):
            sharded.lookup(asked)
    with pytest.raises(TrainingError, match="rows of `item` were looked up"):
        sharded.lookup({"item": torch.tensor([1])})
    with pytest.raises(DataError, match="do not fit"):
        sharded.tables["item"].replace(torch.zeros(2, 8), reset_state=True)
    with pytest.raises(TrainingError, match="give a mask"):
        sharded.tables["item"].freeze(torch.tensor([1, 2]))


def another_backend_than_gloo_is_refused(ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group: "nccl")
        with pytest.raises(ConfigError, match="the processes talk by nccl"):
            make_sharded(ranks, SplitTables)


def what_torchrec_does_not_take_is_refused(ranks):
    rows = torch.zeros(4, 8)
    for optimizer in ("lazy-adam", "dense-adam"):
        with pytest.raises(ConfigError, match=f"tables.item.optimizer is {optimizer}"):
            ShardedTables({"item": Shards(rows, optimizer)}, group=ranks.tables)
    with pytest.raises(ConfigError, match="6 wide"):
        ShardedTables({"item": Shards(torch.zeros(4, 6))}, group=ranks.tables)
