"""Repairs of cold rows against brute force in float64."""

import pytest
import torch

from thawline.errors import TrainingError
from thawline.tables import repair
from thawline.tables.repair import NEIGHBOURS, REPAIRS, RIDGE, repair_cold_rows

ROWS, DIM = 60, 5


def rows(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, DIM, generator=generator) * scale


def masks():
    """Warm, cold, and rows (0, 1, 2) that are neither."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    warm, cold = torch.zeros(ROWS, dtype=torch.bool), torch.zeros(ROWS, dtype=torch.bool)
    warm[order[:35]], cold[order[35:]] = True, True
    warm[:3] = cold[:3] = False
    return warm, cold


def trained(first):
    """Rows after training: the cold ones may have moved too."""
    return first + rows(1, 0.3) + 0.2


def mean_drift(first, drift, row):
    return drift.mean(0)


def ridge(first, drift, row):
    """Penalised least squares by augmented equations, one drift coordinate after the other."""
    center = first.mean(0)
    variance = (first - center).square().mean()
    penalty = (RIDGE * variance * len(first)).sqrt()
    ones = torch.ones(len(first), 1).double()
    left = torch.cat([first, ones], dim=1)
    held = torch.cat([penalty * torch.eye(DIM).double(), torch.zeros(DIM, 1).double()], dim=1)
    left = torch.cat([left, held])
    right = torch.cat([drift, torch.zeros(DIM, DIM).double()])
    solved = torch.linalg.lstsq(left, right).solution
    return torch.cat([row, torch.ones(1).double()]) @ solved


def neighbours(first, drift, row):
    cosines = [float(each @ row / each.norm() / row.norm()) for each in first]
    best = sorted(range(len(first)), key=lambda index: -cosines[index])[:NEIGHBOURS]
    return torch.stack([drift[index] for index in best]).mean(0)


BRUTE = {"mean-drift": mean_drift, "ridge": ridge, "neighbours": neighbours}


@pytest.fixture(params=[None, 4])
def chunks(request, monkeypatch):
    """Both in one piece and in chunks that are smaller than the neighbours wanted."""
    if request.param:
        monkeypatch.setattr(repair, "WARM_CHUNK", request.param)
        monkeypatch.setattr(repair, "COLD_CHUNK", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", REPAIRS)
def test_cold_rows_move_by_what_brute_force_says_and_no_other_row_changes(how, dtype):
    warm, cold = masks()
    first = rows(0).to(dtype)
    before = trained(first.float()).to(dtype)
    weight = before.clone()

    repair_cold_rows(weight, first, how, warm=warm, cold=cold)

    start = first.double()
    drift = before.double() - start
    expected = before.double()
    for row in cold.nonzero().flatten():
        expected[row] += BRUTE[how](start[warm], drift[warm], start[row])
    assert torch.equal(weight[~cold], before[~cold])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)
    assert (weight[cold] != before[cold]).any(1).all()


def test_ridge_recovers_an_affine_map(monkeypatch):
    monkeypatch.setattr(repair, "RIDGE", 1e-9)
    warm, cold = masks()
    first = rows(0)
    mapped = first @ rows(4)[:DIM] + rows(5)[0]
    weight = torch.where(cold[:, None], first, mapped)

    repair_cold_rows(weight, first, "ridge", warm=warm, cold=cold)

    torch.testing.assert_close(weight, mapped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", REPAIRS)
@pytest.mark.parametrize("count", [1, 3])
def test_few_warm_rows_give_their_own_drift(how, count):
    _, cold = masks()
    warm = torch.zeros(ROWS, dtype=torch.bool)
    warm[(~cold).nonzero().flatten()[:count]] = True
    first = rows(0)
    weight = first.clone()
    weight[warm] += torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])

    repair_cold_rows(weight, first, how, warm=warm, cold=cold)

    expected = first[cold] + torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    torch.testing.assert_close(weight[cold], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", REPAIRS)
def test_rows_that_never_moved_stay(how):
    warm, cold = masks()
    first = rows(0)
    weight = first.clone()

    repair_cold_rows(weight, first, how, warm=warm, cold=cold)

    assert torch.equal(weight, first)


@pytest.mark.parametrize("how", REPAIRS)
def test_without_a_warm_row_a_repair_is_refused(how):
    _, cold = masks()
    weight = rows(0)

    with pytest.raises(TrainingError, match="no warm row") as caught:
        repair_cold_rows(weight, rows(0), how, warm=torch.zeros_like(cold), cold=cold)
    assert "finetune.cold_rows=keep" in caught.value.remedy
