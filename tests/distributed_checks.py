"""What holds for training in several processes; `test_distributed` runs these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tensors import SETTINGS, ListReader, make_batch, make_ranker, make_weight

from thawline.config import IdTableSettings
from thawline.errors import TrainingError
from thawline.model.ranker import Counts, Losses
from thawline.tables import LocalTable, make_optimizer
from thawline.tables.parts import Shards
from thawline.tables.sharded import ShardedTables
from thawline.tables.split import SplitTables
from thawline.training.components import TrainedTable
from thawline.training.distributed import DenseSums, EvenReader, padding_batch
from thawline.training.loop import Accumulated, Trainer
from thawline.training.recipes import make_plan
from thawline.training.schedule import Plan, Schedule, TrainingWindow

USER = IdTableSettings(column="user_id", rows=5, dim=4)
RATE = 0.05


def make_batches(rank, count, *, weighted=False):
    """Requests of one process; their number differs between processes and batches."""
    batches = [
        make_batch(size=3 + (rank + index) % 3, seed=10 * rank + index) for index in range(count)
    ]
    generator = torch.Generator().manual_seed(rank)
    for batch in batches:
        batch.ids["user"] = torch.randint(0, USER.rows, (len(batch),), generator=generator)
    if weighted:
        each = [(1.0 + torch.arange(len(own), dtype=torch.float64)) / 3 for own in batches]
        batches = [replace(own, weight=w + rank) for own, w in zip(batches, each, strict=True)]
    return batches


def user_rows():
    rows = torch.randn(USER.rows, USER.dim, generator=torch.Generator().manual_seed(5))
    rows[0] = 0
    return rows


def options(recipe, epochs, **more):
    user = Plan((TrainingWindow(0, 1),))
    return {
        "schedule": Schedule(epochs, {"item": make_plan(recipe, epochs), "user": user}),
        "learning_rate": 1e-3,
        "clip_norm": 0.5,
    } | more


def together(
    ranks,
    counts,
    *,
    recipe="freeze-until-last",
    epochs=2,
    engine=SplitTables,
    weighted=False,
    **more,
):
    """This process's trainer, where process r has `counts[r]` batches."""
    sharded = engine(
        {
            "item": Shards(make_weight(), "row-wise-adagrad", RATE, trainable=False),
            "user": Shards(user_rows(), "adagrad", RATE, trainable=False),
        },
        group=ranks.tables,
    )
    padding = padding_batch(actions=2, context=2, id_columns={"user": USER}, weighted=weighted)
    own = ListReader(make_batches(ranks.rank, counts[ranks.rank], weighted=weighted))
    own.num_requests = sum(map(len, own.batches))
    return Trainer(
        make_ranker(tables={"user": USER}),
        {name: TrainedTable(table) for name, table in sharded.sharded.items()},
        EvenReader(own, ranks, padding),
        group=sharded.beside,
        sums=DenseSums(ranks, sharded.settle),
        **options(recipe, epochs, **more),
    )


def alone(counts, *, recipe="freeze-until-last", epochs=2, weighted=False, **more):
    """One process whose steps are the processes' batches as micro-batches."""
    every = [make_batches(rank, count, weighted=weighted) for rank, count in enumerate(counts)]
    steps = zip(*every, strict=True)
    user = LocalTable(
        user_rows(),
        optimizer=make_optimizer("adagrad", USER.rows, USER.dim),
        learning_rate=RATE,
        trainable=False,
    )
    item = LocalTable(make_weight(), learning_rate=RATE, trainable=False)
    return Trainer(
        make_ranker(tables={"user": USER}),
        {"item": TrainedTable(item), "user": TrainedTable(user)},
        ListReader([batch for step in steps for batch in step]),
        accumulated=Accumulated(len(counts)),
        **options(recipe, epochs, **more),
    )


def require_equal(ranks, own, other):
    """The same tables and networks; the network's are the same bits in every process."""
    for name, table in own.tables.items():
        expected = other.tables[name].weight[table.own]
        torch.testing.assert_close(table.local, expected, rtol=0, atol=1e-5, msg=name)
    for name, parameter in own.ranker.named_parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0, group=ranks.dense)
        assert torch.equal(first, parameter), name
        expected = other.ranker.get_parameter(name)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-4, msg=name)


def training_together_equals_one_process_on_all_requests(ranks):
    counts = [3] * ranks.size
    for staleness, engine in ((0, SplitTables), (1, SplitTables), (1, ShardedTables)):
        for recipe in ("freeze-until-last", "window(0.5, 1)"):
            own = together(ranks, counts, recipe=recipe, staleness=staleness, engine=engine)
            other = alone(counts, recipe=recipe, staleness=staleness)
            summaries, expected = list(own.epochs()), list(other.epochs())
            require_equal(ranks, own, other)
            for one, two in zip(summaries, expected, strict=True):
                assert one.steps == two.steps == 3
                assert one.losses == pytest.approx(two.losses, rel=1e-4)


def weighted_requests_train_together_as_in_one_process(ranks):
    for engine in (SplitTables, ShardedTables):
        own = together(ranks, [3] * ranks.size, engine=engine, weighted=True)
        other = alone([3] * ranks.size, weighted=True)
        summaries, expected = list(own.epochs()), list(other.epochs())
        require_equal(ranks, own, other)
        for one, two in zip(summaries, expected, strict=True):
            assert one.losses == pytest.approx(two.losses, rel=1e-4)
    # The last step of the first process meets padding in the others.
    uneven = together(
        ranks, [2 if rank == 0 else 1 for rank in range(ranks.size)], weighted=True, epochs=1
    )
    assert [each.steps for each in uneven.epochs()] == [2]


def uneven_processes_stop_at_the_same_step(ranks):
    counts = [3 if rank == 0 else 2 for rank in range(ranks.size)]
    own = together(ranks, counts, recipe="co-train", staleness=1, epochs=2)
    summaries = list(own.epochs())
    assert [each.steps for each in summaries] == [3, 3]
    assert ranks.most(own.step) == -ranks.most(-own.step) == 6

    # Batches of padding add nothing: the last step is that of the first process alone.
    batches = [make_batches(rank, count) for rank, count in enumerate(counts)]
    padding = padding_batch(actions=2, context=2, id_columns={"user": USER})
    filled = [each + [padding] * (3 - len(each)) for each in batches]
    other = alone([3] * ranks.size, recipe="co-train", staleness=1)
    other.reader.batches = [each[at] for at in range(3) for each in filled]
    list(other.epochs())
    require_equal(ranks, own, other)


def a_batch_of_padding_adds_nothing(ranks):
    ranker = make_ranker(tables={"user": USER})
    padding = padding_batch(actions=2, context=2, id_columns={"user": USER})
    embeddings = {
        name: torch.randn(
            len(rows), {"item": SETTINGS.dim, "user": USER.dim}[name]
        ).requires_grad_()
        for name, rows in ranker.rows(padding).items()
    }
    counts = Counts(torch.tensor(7), torch.tensor(3), torch.tensor(2))
    losses = ranker.loss(padding, embeddings, counts)
    losses.total.backward()
    assert losses.total.item() == 0
    grads = [own.grad for own in [*ranker.parameters(), *embeddings.values()]]
    assert not any(grad is not None and grad.any() for grad in grads)


def a_process_without_requests_trains(ranks):
    counts = [2] * (ranks.size - 1) + [0]
    if ranks.size == 1:
        return
    own = together(ranks, counts, recipe="co-train", staleness=1)
    before = {name: table.local.clone() for name, table in own.tables.items()}
    assert [each.steps for each in own.epochs()] == [2, 2]
    moved = torch.tensor(
        [float((table.local != before[name]).sum()) for name, table in own.tables.items()]
    )
    dist.all_reduce(moved, group=ranks.dense)
    assert (moved > 0).all()


def an_epoch_without_a_batch_in_any_process_is_refused(ranks):
    with pytest.raises(TrainingError, match="no training request"):
        together(ranks, [0] * ranks.size)


def a_step_takes_one_lookup_and_one_sum_and_never_both_at_once(ranks):
    """With several micro-batches too; exchanges are those of the lookups and of the gradients."""
    for engine in (SplitTables, ShardedTables):
        accumulated = Accumulated(2)
        own = together(
            ranks,
            [8] * ranks.size,
            recipe="co-train",
            staleness=3,
            accumulated=accumulated,
            engine=engine,
        )
        sharded, reduced, exchanged = own.prefetcher.tables, [], []
        plain, exchange = dist.all_reduce, dist.all_to_all_single

        def watched(tensor, *arguments, group, **options):
            if group is ranks.dense:
                reduced.append(sharded.in_flight)  # noqa: B023
            return plain(tensor, *arguments, group=group, **options)  # noqa: B023

        def counted(*arguments, group, **options):
            assert group is ranks.tables
            exchanged.append(1)  # noqa: B023
            return exchange(*arguments, group=group, **options)  # noqa: B023

        launched = []
        look_up = sharded.lookup
        sharded.lookup = lambda *asked: launched.append(1) or look_up(*asked)  # noqa: B023
        dist.all_reduce, dist.all_to_all_single = watched, counted
        try:
            list(own.epochs())
        finally:
            dist.all_reduce, dist.all_to_all_single = plain, exchange
        assert len(launched) == 8
        assert reduced == [0] * 8
        if engine is SplitTables:
            # How many rows, which, their values; and their gradients.
            assert len(exchanged) == (3 + 1) * 8


def fused_micro_batches_update_the_tables_each(ranks):
    own = together(
        ranks, [4] * ranks.size, recipe="co-train", accumulated=Accumulated(2, fused=True)
    )
    summaries = list(own.epochs())
    assert [each.steps for each in summaries] == [4, 4]
    assert all(torch.isfinite(table.local).all() for table in own.tables.values())
    for parameter in own.ranker.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0, group=ranks.dense)
        assert torch.equal(first, parameter)


def sums_are_over_all_processes(ranks):
    settled = []
    sums = DenseSums(ranks, lambda: settled.append(1))
    total = ranks.size * (ranks.size + 1) // 2
    here = torch.tensor(ranks.rank + 1)
    own = Losses(*(here * each for each in torch.arange(4.0).requires_grad_()))
    losses = sums.losses(own)
    assert losses.contrastive.item() == 3 * total
    assert not losses.total.requires_grad

    parameters = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(4)]
    everywhere, somewhere, nowhere, frozen = parameters
    everywhere.grad = torch.full((2, 2), ranks.rank + 1.0)
    somewhere.grad = torch.full((2, 2), 5.0) if ranks.leads else None
    frozen.requires_grad_(False)
    sums.asked_to_stop = lambda: ranks.leads
    losses = sums.gradients(parameters, own)
    assert losses.contrastive.item() == 3 * total
    assert not losses.total.requires_grad
    assert sums.stopping
    assert everywhere.grad.tolist() == [[total, total]] * 2
    assert somewhere.grad.tolist() == [[5, 5]] * 2
    assert nowhere.grad is frozen.grad is None
    assert sums.gradients([frozen], own).contrastive.item() == 3 * total
    assert len(settled) == 3


def every_process_gets_the_first_one_s_parameters(ranks):
    ranker = make_ranker(seed=ranks.rank)
    ranks.share(ranker)
    first = make_ranker(seed=0)
    for name, parameter in ranker.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name))
