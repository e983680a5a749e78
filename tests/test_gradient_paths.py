"""Each gradient path by itself, by autograd on a tiny model in float64."""

import itertools

import pytest
import torch
from tensors import SETTINGS, make_batch, make_ranker, make_weight, to_double

from thawline.config import GRADIENT_PATHS

CANDIDATE_PATHS = ("contrastive", "transformer", "feature_cross")


def row_gradient(paths, *, adapter="off"):
    """Gradients of the total loss by looked-up row, [n, d], and whether it is a candidate's."""
    settings = SETTINGS.model_copy(update={"gradient_paths": paths, "adapter": adapter})
    ranker = make_ranker(settings=settings).double()
    batch = to_double(make_batch())
    embeddings = make_weight().double()[batch.rows].requires_grad_()
    ranker.loss(batch, {"item": embeddings}).total.backward()
    gradient = torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
    return gradient, torch.arange(len(gradient)) >= batch.history_row.numel(), ranker


def test_open_candidate_paths_sum_to_the_whole_for_every_subset():
    alone = {path: row_gradient((path,))[0] for path in CANDIDATE_PATHS}
    for count in range(1, 4):
        for paths in itertools.combinations(CANDIDATE_PATHS, count):
            together, candidate, _ = row_gradient(paths)
            expected = sum(alone[path] for path in paths)
            torch.testing.assert_close(together[candidate], expected[candidate], atol=1e-12, rtol=0)
            assert together[candidate].norm() > 1e-3


def test_all_paths_equal_the_candidate_paths_and_the_history_together():
    whole, candidate, _ = row_gradient(GRADIENT_PATHS)
    without_history, _, _ = row_gradient(CANDIDATE_PATHS)
    history_alone, _, _ = row_gradient(("history",))

    torch.testing.assert_close(whole, without_history + history_alone, atol=1e-12, rtol=0)
    assert (without_history[~candidate] == 0).all()
    assert (history_alone[candidate] == 0).all()
    assert history_alone[~candidate].norm() > 1e-3


@pytest.mark.parametrize("path", CANDIDATE_PATHS)
def test_a_cut_path_contributes_exactly_zero(path):
    """Only the losses behind the open paths are left: the cut one's own loss changes nothing."""
    others = tuple(other for other in CANDIDATE_PATHS if other != path)
    kept, candidate, _ = row_gradient(others)
    alone, _, _ = row_gradient((path,))

    assert not torch.allclose(kept[candidate], (kept + alone)[candidate], atol=1e-6)
    rest = sum(row_gradient((other,))[0] for other in others)
    assert torch.equal((kept - rest)[candidate].abs() < 1e-12, torch.ones_like(kept[candidate]) > 0)


def test_without_any_path_the_rows_get_no_gradient_and_the_adapter_still_trains():
    gradient, _, ranker = row_gradient((), adapter="full")

    assert (gradient == 0).all()
    assert ranker.adapter.matrix.grad.norm() > 1e-3


def test_cutting_paths_changes_no_score():
    batch, weight = make_batch(), make_weight()
    whole = make_ranker()
    cut = make_ranker(settings=SETTINGS.model_copy(update={"gradient_paths": ("contrastive",)}))

    with torch.no_grad():
        rows = {"item": weight[batch.rows]}
        assert torch.equal(whole(batch, rows), cut(batch, rows))
