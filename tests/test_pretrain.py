import copy
import math

import pytest
import torch
from tensors import NUM_ROWS, SETTINGS, ListReader, make_weight

from thawline.config import Pretrain
from thawline.data.batches import SequenceBatch
from thawline.errors import TrainingError
from thawline.tables import LocalTable
from thawline.training.pretrain import Pretrainer


def make_sequences(seed=0, size=5, width=8):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (size, 1), generator=generator)
    rows = torch.randint(2, NUM_ROWS, (size, width), generator=generator)
    real = torch.arange(width) < lengths
    log_q = torch.full((size, width), -math.log(NUM_ROWS - 2)) * real
    return SequenceBatch(item_row=rows * real, log_q=log_q)


def make_pretrainer(batches=3, *, held_out=None, **settings):
    return Pretrainer(
        LocalTable(make_weight()),
        ListReader([make_sequences(seed) for seed in range(batches)]),
        ListReader([make_sequences(9)] if held_out is None else held_out),
        model=SETTINGS,
        settings=Pretrain(**({"epochs": 2, "negatives": 16, "recall_at": 3} | settings)),
        max_length=8,
        seed=0,
    )


def test_a_step_equals_a_float64_reference_over_every_position():
    pretrainer = make_pretrainer()
    batch = pretrainer.reader.batches[0]
    network = copy.deepcopy(pretrainer.network).double()
    weight = pretrainer.table.weight.double().clone().requires_grad_()
    real = [(i, j) for i in range(5) for j in range(8) if batch.item_row[i, j] != 0]
    chosen = torch.randint(len(real), (16,), generator=torch.Generator().manual_seed(0)).tolist()
    negatives = [int(batch.item_row[real[index]]) for index in chosen]

    terms = []
    states = network(weight[batch.item_row])
    for i, j in real:
        if j == 0:
            continue
        target = int(batch.item_row[i, j])
        scores = [torch.cosine_similarity(states[i, j], weight[target], dim=0) / 0.1]
        scores += [
            torch.cosine_similarity(states[i, j], weight[row], dim=0) / 0.1
            - math.log(16 / (NUM_ROWS - 2))
            for row in negatives
            if row != target
        ]
        terms.append(torch.logsumexp(torch.stack(scores), 0) - scores[0])
    expected = torch.stack(terms).mean()
    expected.backward()
    gradient = weight.grad
    moved = weight.detach().clone()
    for row in set(batch.item_row.flatten().tolist()) - {0}:
        g = gradient[row]
        moved[row] -= 0.05 * g / (g.square().mean().sqrt() + 1e-8)

    loss = pretrainer.train_step(batch)

    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(pretrainer.table.weight.double(), moved, rtol=0, atol=1e-4)


def test_recall_is_the_share_of_last_items_among_the_nearest_rows():
    pretrainer = make_pretrainer()
    batch = pretrainer.held_out.batches[0]
    hits = 0
    catalog = torch.nn.functional.normalize(pretrainer.table.weight[2:], dim=1)
    for sequence in batch.item_row:
        items = sequence[sequence != 0]
        state = pretrainer.network(pretrainer.table.weight[items][None])[0, -1].detach()
        nearest = (catalog @ state).topk(3).indices + 2
        hits += int(items[-1] in nearest)

    assert pretrainer.recall() == pytest.approx(hits / 5)


def test_a_recall_over_the_whole_catalog_is_one_and_none_without_held_out_sequences():
    assert make_pretrainer(recall_at=NUM_ROWS).recall() == 1.0
    assert make_pretrainer(held_out=[]).recall() is None


def test_several_epochs_are_summarised_and_the_padding_row_stays_zero():
    pretrainer = make_pretrainer()

    epochs = list(pretrainer.epochs())

    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert pretrainer.table.weight[0].tolist() == [0.0] * SETTINGS.dim


def test_the_same_seed_gives_the_same_table():
    tables = []
    for _ in range(2):
        pretrainer = make_pretrainer()
        list(pretrainer.epochs())
        tables.append(pretrainer.table.weight)
    assert torch.equal(*tables)


def test_no_training_sequence_is_an_error_unless_there_is_nothing_to_train():
    with pytest.raises(TrainingError, match="no training sequence"):
        make_pretrainer(batches=0)
    assert list(make_pretrainer(batches=0, epochs=0).epochs()) == []
