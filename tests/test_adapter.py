import pytest
import torch
from tensors import SETTINGS, make_batch, make_ranker, make_weight

from thawline.model.adapter import Adapter


def ranker_with(adapter):
    return make_ranker(settings=SETTINGS.model_copy(update={"adapter": adapter}))


@pytest.mark.parametrize(
    ("kind", "parameters"), [("off", 0), ("bias", 8), ("diagonal", 16), ("full", 72)]
)
def test_a_fresh_adapter_changes_no_bit_and_has_the_parameters_it_says(kind, parameters):
    adapter = Adapter(kind, 8)
    rows = make_weight()

    assert torch.equal(adapter(rows), rows)
    assert sum(parameter.numel() for parameter in adapter.parameters()) == parameters


@pytest.mark.parametrize("kind", ["bias", "diagonal", "full"])
def test_the_first_scores_equal_those_without_an_adapter_bit_for_bit(kind):
    batch, weight = make_batch(), make_weight()
    plain, adapted = ranker_with("off"), ranker_with(kind)

    with torch.no_grad():
        rows = {"item": weight[batch.rows]}
        assert torch.equal(plain(batch, rows), adapted(batch, rows))


def test_a_trained_adapter_is_the_formula_on_every_row():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, generator=generator)
    full, diagonal = Adapter("full", 3), Adapter("diagonal", 3)
    matrix, bias, scale = (
        torch.randn(shape, generator=generator) for shape in ((3, 3), (3,), (3,))
    )
    full.load_state_dict({"matrix": matrix, "bias": bias})
    diagonal.load_state_dict({"diagonal": scale, "bias": bias})

    for row, by_full, by_diagonal in zip(rows, full(rows), diagonal(rows), strict=True):
        torch.testing.assert_close(by_full, row + row @ matrix + bias)
        torch.testing.assert_close(by_diagonal, row * (1 + scale) + bias)


def test_the_adapter_trains_beside_a_frozen_table():
    batch, weight = make_batch(), make_weight()
    ranker = ranker_with("full")

    ranker.loss(batch, {"item": weight[batch.rows]}).total.backward()

    assert ranker.adapter.matrix.grad.norm() > 1e-3
    assert ranker.adapter.bias.grad.norm() > 1e-3
