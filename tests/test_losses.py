import math

import pytest
import torch

from thawline.model.losses import contrastive_loss, head_loss, pairwise_loss

LOGITS = torch.tensor(
    [[[0.3, -1.0], [1.2, 0.1], [-0.4, 2.0]], [[0.0, 0.5], [5.0, 1.0], [9.0, 9.0]]]
)
LABELS = torch.tensor([[[1, 0], [0, 0], [0, 1]], [[1, 1], [0, 0], [1, 1]]]).float()
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_head_loss_is_the_mean_over_valid_candidates_summed_over_actions():
    total = count = 0
    for request in range(2):
        for candidate in range(3):
            if not MASK[request, candidate]:
                continue
            count += 1
            for action in range(2):
                p = 1 / (1 + math.exp(-LOGITS[request, candidate, action]))
                y = LABELS[request, candidate, action]
                total -= math.log(p if y else 1 - p)
    assert float(head_loss(LOGITS, LABELS, MASK)) == pytest.approx(total / count, abs=1e-6)


def test_pairwise_loss_is_the_mean_over_positive_negative_pairs_of_one_request_and_action():
    terms = []
    for request in range(2):
        for action in range(2):
            for i in range(3):
                for j in range(3):
                    valid = MASK[request, i] and MASK[request, j]
                    if valid and LABELS[request, i, action] and not LABELS[request, j, action]:
                        margin = LOGITS[request, i, action] - LOGITS[request, j, action]
                        terms.append(math.log(1 + math.exp(-margin)))
    assert len(terms) == 6
    expected = sum(terms) / len(terms)
    assert float(pairwise_loss(LOGITS, LABELS, MASK)) == pytest.approx(expected, abs=1e-6)


def test_losses_without_candidates_or_pairs_are_zero_and_finite():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert float(head_loss(LOGITS, LABELS, nothing)) == 0.0
    assert float(pairwise_loss(LOGITS, LABELS, nothing)) == 0.0
    assert float(pairwise_loss(LOGITS, torch.ones_like(LABELS), MASK)) == 0.0


def test_contrastive_loss_equals_the_formula_and_leaves_own_targets_out():
    generator = torch.Generator().manual_seed(0)
    states, targets = (torch.randn(4, 5, generator=generator) for _ in range(2))
    negatives = torch.randn(6, 5, generator=generator)
    target_rows = [3, 4, 5, 6]
    negative_rows = [3, 9, 4, 9, 8, 7]
    log_q = torch.log(torch.tensor([0.1, 0.3, 0.2, 0.3, 0.05, 0.05]))

    loss = contrastive_loss(
        states,
        targets,
        torch.tensor(target_rows),
        negatives,
        torch.tensor(negative_rows),
        log_q,
        temperature=0.2,
    )

    def cosine(a, b):
        a, b = a.double(), b.double()
        return float(a @ b / a.norm() / b.norm())

    expected = 0.0
    for i in range(4):
        own = math.exp(cosine(states[i], targets[i]) / 0.2)
        others = sum(
            math.exp(cosine(states[i], negatives[j]) / 0.2) / (6 * math.exp(log_q[j]))
            for j in range(6)
            if negative_rows[j] != target_rows[i]
        )
        expected -= math.log(own / (own + others)) / 4
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_popularity_correction_estimates_the_softmax_over_the_whole_catalog():
    generator = torch.Generator().manual_seed(1)
    catalog = torch.randn(50, 8, generator=generator)
    state = torch.randn(1, 8, generator=generator)
    q = torch.rand(50, generator=generator)
    q /= q.sum()
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=generator)

    loss = contrastive_loss(
        state,
        catalog[:1],
        torch.tensor([0]),
        catalog[drawn],
        drawn,
        q.log()[drawn],
        temperature=0.5,
    )

    scores = torch.nn.functional.normalize(catalog, dim=1) @ torch.nn.functional.normalize(state).T
    full_softmax = -torch.log_softmax(scores[:, 0].double() / 0.5, dim=0)[0]
    assert float(loss) == pytest.approx(float(full_softmax), abs=0.01)


def test_contrastive_loss_of_no_position_is_zero_with_a_gradient():
    states = torch.zeros(0, 4, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)

    loss = contrastive_loss(
        states, torch.zeros(0, 4), empty, torch.zeros(0, 4), empty, torch.zeros(0), temperature=1.0
    )

    loss.backward()
    assert float(loss.detach()) == 0.0
    assert states.grad.shape == (0, 4)
