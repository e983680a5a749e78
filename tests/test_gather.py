"""The gather of single rows against `F.embedding` and `EmbeddingBag`, compiled and not."""

import pytest
import torch
from operators import Operators
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from thawline.errors import TrainingError
from thawline.tables.gather import gather, sum_rows

N, D = 40, 24


@pytest.fixture
def weight():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def rows():
    """200 of 40 rows: many duplicates, and some rows that none reads."""
    return torch.randint(0, N - 5, (200,), generator=torch.Generator().manual_seed(1))


def gradient(read, weight, *, seed=2):
    """Values and the weight's gradient, for one random upstream gradient."""
    leaf = weight.clone().requires_grad_()
    values = read(leaf)
    upstream = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    values.backward(upstream.to(values.dtype))
    return values.detach(), leaf.grad


def summed_row_by_row(upstream, rows, num_rows):
    """Float64, one gradient after the other."""
    total = torch.zeros(num_rows, upstream.shape[-1], dtype=torch.float64)
    for row, piece in zip(rows.tolist(), upstream.double(), strict=True):
        total[row] += piece
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_those_of_an_embedding_and_of_an_embedding_bag(
    weight, rows, dtype
):
    weight = weight.to(dtype)

    def bag(leaf):
        module = nn.EmbeddingBag(N, D, mode="sum")
        module.weight = nn.Parameter(leaf)
        return functional.embedding_bag(rows, leaf, torch.arange(len(rows)), mode="sum")

    values, grad = gradient(lambda leaf: gather(leaf, rows), weight)
    for other in (lambda leaf: functional.embedding(rows, leaf), bag):
        their_values, their_grad = gradient(other, weight)
        assert torch.equal(values, their_values)
        torch.testing.assert_close(grad, their_grad)


def test_rows_of_any_shape_and_of_int32_are_read(weight, rows):
    shaped = rows.view(4, 5, 10).int()

    values, grad = gradient(lambda leaf: gather(leaf, shaped), weight)

    their_values, their_grad = gradient(lambda leaf: functional.embedding(shaped, leaf), weight)
    assert values.shape == (4, 5, 10, D)
    assert torch.equal(values, their_values)
    torch.testing.assert_close(grad, their_grad)


def test_no_row_gives_no_value_and_a_gradient_of_zeros(weight):
    values, grad = gradient(lambda leaf: gather(leaf, torch.zeros(0, dtype=torch.int64)), weight)

    assert values.shape == (0, D)
    assert torch.equal(grad, torch.zeros(N, D))


def test_first_and_second_gradients_are_the_numerical_ones():
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[4, 0], [4, 2], [4, 0]])

    assert torch.autograd.gradcheck(lambda leaf: gather(leaf, rows).square(), weight)
    assert torch.autograd.gradgradcheck(lambda leaf: gather(leaf, rows).square(), weight)


@pytest.mark.parametrize("width", [3, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_of_one_row_are_summed_without_stalling(dtype, width):
    # One by one in bfloat16, 1 + 1 + ... stops at 256.
    summed = sum_rows(torch.ones(5_000, width, dtype=dtype), torch.zeros(5_000).long(), 2)

    assert summed.dtype == dtype
    torch.testing.assert_close(summed[0].float(), torch.full((width,), 5_000.0), rtol=0.004, atol=0)
    assert summed[1].tolist() == [0.0] * width


def test_the_sum_has_the_same_bits_every_time_and_on_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 7, (30_000,), generator=generator)
    grad = torch.randn(30_000, D, generator=generator)
    before = torch.get_num_threads()
    sums = []
    try:
        for threads in (1, 2, 4, 2, 1):
            torch.set_num_threads(threads)
            sums.append(sum_rows(grad, rows, 7))
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(sums[0], other) for other in sums[1:])
    torch.testing.assert_close(
        sums[0].double(), summed_row_by_row(grad, rows, 7), rtol=1e-4, atol=1e-3
    )


def test_a_gradient_that_is_expanded_or_transposed_is_summed_alike(weight, rows):
    leaf = weight.clone().requires_grad_()
    gather(leaf, rows).sum().backward()
    expected = torch.bincount(rows, minlength=N).float()[:, None].expand(N, D)
    assert torch.equal(leaf.grad, expected)

    turned = torch.randn(D, len(rows)).T
    assert torch.equal(sum_rows(turned, rows, N), sum_rows(turned.contiguous(), rows, N))


@pytest.mark.parametrize("frozen_by", ["requires_grad", "no_grad", "inference_mode"])
def test_a_frozen_weight_is_read_without_operator_and_without_graph(weight, rows, frozen_by):
    weight.requires_grad_(frozen_by != "requires_grad")
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        frozen_by, torch.enable_grad
    )

    with context(), Operators() as operators:
        values = gather(weight, rows)

    assert values.grad_fn is None
    assert not values.requires_grad
    assert torch.equal(values, weight.detach()[rows])
    assert "thawline::gather" not in operators.names
    assert "aten::index_select" in operators.names


def test_a_training_weight_is_read_by_the_operator(weight, rows):
    with Operators() as operators:
        gather(weight.requires_grad_(), rows)

    assert "thawline::gather" in operators.names


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("outside", [N, -1, 2**40])
def test_a_row_outside_the_table_is_named(weight, outside, trains):
    weight.requires_grad_(trains)

    with pytest.raises(TrainingError, match=rf"row {outside} is outside a table of {N} rows"):
        gather(weight, torch.tensor([3, outside, 5]))


def test_rows_that_are_no_integers_keep_torchs_own_error(weight):
    with pytest.raises(RuntimeError, match="index"):
        gather(weight, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("shape", [(200,), (10, 20), (0,)])
def test_the_operators_keep_the_contract_of_torch_library(weight, rows, shape):
    rows = rows[: torch.Size(shape).numel()].view(shape)
    grad = torch.randn(*shape, D)

    for leaf in (weight, weight.clone().requires_grad_()):
        torch.library.opcheck(torch.ops.thawline.gather.default, (leaf, rows))
    for leaf in (grad, grad.clone().requires_grad_()):
        torch.library.opcheck(torch.ops.thawline.gather_backward.default, (leaf, rows, N))


def compiled_gradient(weight, rows, backend):
    torch.compiler.reset()
    read = torch.compile(
        lambda leaf: gather(leaf, rows).tanh() * 2, fullgraph=True, backend=backend
    )
    return gradient(read, weight)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph_it_gives_the_same(weight, rows, backend):
    values, grad = compiled_gradient(weight, rows, backend)

    their_values, their_grad = gradient(lambda leaf: gather(leaf, rows).tanh() * 2, weight)
    torch.testing.assert_close(values, their_values)
    torch.testing.assert_close(grad, their_grad)


@pytest.mark.parametrize("trains", [True, False])
def test_compiled_too_a_row_outside_the_table_is_named(weight, trains):
    torch.compiler.reset()
    read = torch.compile(gather, fullgraph=True, backend="aot_eager")

    with pytest.raises(TrainingError, match=f"row {N} is outside"):
        read(weight.requires_grad_(trains), torch.tensor([1, N]))


def test_batches_of_several_lengths_share_one_compiled_graph(weight):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    read = torch.compile(gather, fullgraph=True, backend=counter, dynamic=True)
    leaf = weight.requires_grad_()

    for length in (7, 12, 30):
        assert torch.equal(read(leaf, torch.arange(length)), leaf[:length])

    assert counter.frame_count == 1
