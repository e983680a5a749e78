"""The network compiled, in bfloat16, and with activations computed again."""

import pytest
import torch
from tensors import SETTINGS, make_batch, make_ranker, make_weight
from torch.testing import assert_close

from thawline.training.forward import make_forward

SIZES = ((6, 16, 4), (5, 16, 4), (6, 24, 4), (4, 32, 5))
"""Requests, width of the history, candidates: of batches as an epoch has them."""


def losses_and_gradients(ranker, forward, batch):
    ranker.zero_grad()
    rows = make_weight()[batch.rows].requires_grad_()
    losses = forward(batch, {"item": rows})
    losses.total.backward()
    grads = {name: own.grad for name, own in ranker.named_parameters() if own.grad is not None}
    return losses, {"rows": rows.grad, **grads}


def assert_equal(ranker, forward, batch, **tolerance):
    losses, grads = losses_and_gradients(ranker, forward, batch)
    expected, expected_grads = losses_and_gradients(ranker, ranker.loss, batch)
    assert_close(vars(losses), vars(expected), **tolerance)
    assert_close(grads, expected_grads, **tolerance)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_compiled_network_has_no_graph_break_and_one_graph_for_batches_of_all_sizes():
    ranker = make_ranker(history=64)
    torch._dynamo.reset()
    forward = make_forward(ranker, compiled=True, backend="aot_eager")

    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        torch._dynamo.error_on_graph_break(True),
    ):
        for size, history, candidates in SIZES:
            assert_equal(ranker, forward, make_batch(size, history=history, candidates=candidates))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recompute", "backend"),
    # The second has the same graphs in another order, so that one run of the slow backend will do.
    [(False, "inductor"), (True, "aot_eager")],
    ids=["plain", "recomputing"],
)
def test_the_compiled_network_gives_the_losses_and_gradients_of_the_plain_one(recompute, backend):
    settings = SETTINGS.model_copy(update={"layers": 1, "checkpoint_activations": recompute})
    ranker = make_ranker(settings=settings)
    forward = make_forward(ranker, compiled=True, backend=backend)

    for size, history, candidates in SIZES[:2]:
        batch = make_batch(size, history=history, candidates=candidates)
        assert_equal(ranker, forward, batch, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_losses_gradients_and_parameters_stay_float32_and_near():
    ranker, batch = make_ranker(), make_batch()
    seen = []
    ranker.heads.register_forward_hook(lambda module, given, made: seen.append(made.dtype))

    losses, grads = losses_and_gradients(ranker, make_forward(ranker, bfloat16=True), batch)

    assert seen == [torch.bfloat16]
    for loss in vars(losses).values():
        assert loss.dtype == torch.float32
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    expected, expected_grads = losses_and_gradients(ranker, ranker.loss, batch)
    assert_close(losses.total, expected.total, rtol=0.02, atol=0)
    for name in ("rows", "heads.weight", "next_item.weight"):
        assert (grads[name] - expected_grads[name]).norm() < 0.02 * expected_grads[name].norm()


def test_in_bfloat16_the_contrastive_loss_multiplies_in_float32():
    ranker, batch = make_ranker(), make_batch()
    products = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and made.shape == (len(batch), len(batch)):
                products.append(made.dtype)
            return made

    with Seen():
        make_forward(ranker, bfloat16=True)(batch, {"item": make_weight()[batch.rows]})

    assert products == [torch.float32]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_computed_again_change_no_bit_and_are_not_kept(dropout):
    plain = SETTINGS.model_copy(update={"dropout": dropout})
    batch, kept, found = make_batch(), [], []
    for recompute in (False, True):
        settings = plain.model_copy(update={"checkpoint_activations": recompute})
        ranker = make_ranker(settings=settings)
        kept.append(0)

        def count(tensor):
            kept[-1] += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found.append(losses_and_gradients(ranker, ranker.loss, batch))

    (losses, grads), (again, grads_again) = found
    assert torch.equal(losses.total, again.total)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert kept[1] < kept[0]
