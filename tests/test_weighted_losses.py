"""Weights of requests in the losses: a weight of 2 is the request twice."""

import dataclasses

import torch
from tensors import SETTINGS, make_batch, make_ranker, to_double
from torch.testing import assert_close

from thawline.data.batches import Batch
from thawline.model.losses import contrastive_loss, head_loss, pairwise_loss
from thawline.model.ranker import Counts

WEIGHTS = torch.tensor([2.0, 1.0, 3.0, 1.0, 2.0, 4.0], dtype=torch.float64)
QUIET = SETTINGS.model_copy(update={"contrastive_weight": 0.0})
"""Without the loss whose negatives are the batch's other requests."""


def weighted(batch: Batch, weights: torch.Tensor = WEIGHTS) -> Batch:
    return dataclasses.replace(batch, weight=weights)


def repeated(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """The batch with each request as often as its weight, and where each came from."""
    places = torch.repeat_interleave(torch.arange(len(batch)), WEIGHTS.long())
    return batch.select(places), places


def losses_and_gradients(batch, rows, *, settings=QUIET):
    """Losses, the gradient of the rows `[n, d]` and those of the network, in float64."""
    ranker = make_ranker(settings=settings).double().eval()
    leaf = rows.clone().requires_grad_()
    losses = ranker.loss(batch, {"item": leaf})
    losses.total.backward()
    grads = {name: own.grad for name, own in ranker.named_parameters() if own.grad is not None}
    return losses, leaf.grad, grads


def rows_of(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(batch.rows), SETTINGS.dim, generator=generator, dtype=torch.float64)


def test_a_weight_gives_the_gradients_of_so_many_copies_of_the_request():
    batch = to_double(make_batch())
    copies, places = repeated(batch)
    size, width = batch.history_row.shape
    count = batch.candidate_row.shape[1]
    rows = rows_of(batch)
    history, candidates = rows.split([size * width, size * count])
    copied = torch.cat(
        [
            history.view(size, -1)[places].view(-1, SETTINGS.dim),
            candidates.view(size, -1)[places].view(-1, SETTINGS.dim),
        ]
    )

    losses, by_row, by_name = losses_and_gradients(weighted(batch), rows)
    expected, by_copy, others = losses_and_gradients(copies, copied)

    for name in ("total", "head", "pairwise"):
        assert_close(getattr(losses, name), getattr(expected, name), rtol=0, atol=1e-14)
    assert by_name.keys() == others.keys()
    assert_close(by_name, others, rtol=0, atol=1e-14)
    parts = by_copy.split([len(places) * width, len(places) * count])
    summed = [
        torch.zeros(size, own.numel() // len(places), dtype=own.dtype).index_add_(
            0, places, own.reshape(len(places), -1)
        )
        for own in parts
    ]
    assert_close(
        by_row, torch.cat([own.reshape(-1, SETTINGS.dim) for own in summed]), rtol=0, atol=1e-14
    )
    assert by_row.abs().max() > 1e-3


def test_weights_that_are_all_alike_change_nothing_however_large():
    batch = to_double(make_batch())
    rows = rows_of(batch)
    expected, _, others = losses_and_gradients(batch, rows, settings=SETTINGS)
    for value in (1.0, 1e-6, 250.0):
        equal = weighted(batch, torch.full((6,), value, dtype=torch.float64))
        losses, _, grads = losses_and_gradients(equal, rows, settings=SETTINGS)
        assert_close(losses.total, expected.total, rtol=1e-13, atol=0)
        assert_close(grads, others, rtol=0, atol=1e-13)


def test_the_losses_of_weighted_requests_by_hand():
    """Two requests of two candidates: weights 3 and 0.5, one action."""
    logits = torch.tensor([[[0.0], [1.0]], [[2.0], [0.0]]], dtype=torch.float64)
    labels = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    weight = torch.tensor([3.0, 0.5], dtype=torch.float64)
    log = torch.nn.functional.softplus
    zero, one, two = (torch.tensor(value, dtype=torch.float64) for value in (0.0, 1.0, 2.0))
    head = (3 * (log(zero) + log(one)) + 0.5 * (log(two) + log(zero))) / (2 * 3 + 2 * 0.5)
    assert_close(head_loss(logits, labels, mask, weight=weight), head)
    # One pair each: the negative is 1 above the positive, and 2 above it.
    pairs = (3 * log(one) + 0.5 * log(two)) / 3.5
    assert_close(pairwise_loss(logits, labels, mask, weight=weight), pairs)
    # Of the first request alone, as a part of both.
    part = head_loss(logits[:1], labels[:1], mask[:1], torch.tensor(7.0), weight[:1])
    assert_close(part, 3 * (log(zero) + log(one)) / 7)


def test_weighted_losses_of_nothing_are_zero_and_have_no_gradient():
    logits = torch.randn(2, 3, 1, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    weight = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for loss in (head_loss, pairwise_loss):
        value = loss(logits, torch.ones(2, 3, 1), nothing, weight=weight)
        value.backward()
        assert value.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_positions_of_the_contrastive_loss_are_weighted_and_its_negatives_are_not():
    generator = torch.Generator().manual_seed(0)
    states, targets, negatives = (
        torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (3, 3, 6)
    )
    rows, negative_rows = torch.tensor([3, 4, 5]), torch.tensor([3, 9, 4, 9, 8, 7])
    log_q = torch.log(torch.tensor([0.1, 0.3, 0.2, 0.3, 0.05, 0.05], dtype=torch.float64))
    weight = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True])
    places = torch.tensor([0, 0, 1, 2, 2, 2])

    def loss(states, targets, rows, mask, weight=None):
        leaf = states.clone().requires_grad_()
        value = contrastive_loss(
            leaf, targets, rows, negatives, negative_rows, log_q,
            temperature=0.2, mask=mask, weight=weight,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(value, leaf)
        return value, gradient

    value, gradient = loss(states, targets, rows, mask, weight)
    expected, copied = loss(states[places], targets[places], rows[places], mask[places])
    assert_close(value, expected, rtol=0, atol=1e-14)
    assert_close(
        gradient, torch.zeros_like(gradient).index_add_(0, places, copied), rtol=0, atol=1e-14
    )


def test_counts_of_weighted_requests_add_up_to_those_of_the_whole_batch():
    batch = weighted(make_batch())
    parts = [batch.select(torch.arange(6) % 2 == odd) for odd in (0, 1)]
    whole, summed = Counts.of(batch), Counts.of(parts[0]) + Counts.of(parts[1])
    valid = (batch.candidate_mask.sum(1) * WEIGHTS).sum()
    assert whole.candidates == summed.candidates == valid
    assert whole.pairs == summed.pairs
    assert whole.positives == summed.positives
    assert {own.dtype for own in vars(whole).values()} == {torch.float64}


def test_a_batch_without_weights_has_none():
    batch = make_batch()
    assert batch.weight is None
    assert "weight" not in batch.tensors()
    assert weighted(batch).to("cpu").select(torch.arange(6) > 3).weight.tolist() == [2.0, 4.0]
