"""The three training objectives of the article, as pure functions in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def head_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy: mean over valid candidates, summed over actions.

    Args:
        logits: `[B, C, A]`.
        labels: `[B, C, A]`, 0 or 1.
        mask: `[B, C]`, true where there is a candidate.
    """
    loss = functional.binary_cross_entropy_with_logits(
        _full(logits), _full(labels), reduction="none"
    ).sum(-1)
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def pairwise_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Logistic loss of each (positive, negative) pair of one request and action, mean over pairs.

    Args:
        logits: `[B, C, A]`.
        labels: `[B, C, A]`, 0 or 1.
        mask: `[B, C]`, true where there is a candidate.
    """
    logits = _full(logits)
    positive = (labels > 0) & mask[..., None]
    negative = (labels <= 0) & mask[..., None]
    pairs = positive[:, :, None, :] & negative[:, None, :, :]
    loss = functional.softplus(logits[:, None, :, :] - logits[:, :, None, :])
    return (loss * pairs).sum() / pairs.sum().clamp(min=1)


def contrastive_loss(
    states: Tensor,
    targets: Tensor,
    target_rows: Tensor,
    negatives: Tensor,
    negative_rows: Tensor,
    negative_log_q: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """Next-item InfoNCE with shared negatives and log-popularity correction.

    Scores are cosines over `temperature`. Sampled softmax corrects each negative's score by the
    log of its sampling probability (Bengio & Senécal 2008; Yi et al. 2019); the target, which is
    always there, needs none, and what all negatives share cancels into a constant:
    `-log exp(s⁺) / (exp(s⁺) + sum_j exp(s_j - log(m q_j)))` for `m` negatives. A negative that is
    a position's own target is left out of that position's sum.

    Args:
        states: `[n, d]`, what predicts.
        targets: `[n, d]`, the next items' vectors.
        target_rows: `[n]`, their rows.
        negatives: `[m, d]`, vectors of the shared negatives.
        negative_rows: `[m]`, their rows.
        negative_log_q: `[m]`, log of the probability with which each was drawn.
        temperature: Divides the cosines.

    Returns:
        Mean over the `n` positions; 0 where there is none.
    """
    if not len(states):
        return states.sum()
    states = functional.normalize(_full(states), dim=-1) / temperature
    targets = functional.normalize(_full(targets), dim=-1)
    negatives = functional.normalize(_full(negatives), dim=-1)
    expected_draws = negative_log_q + torch.log(torch.tensor(float(len(negatives))))
    against = states @ negatives.T - expected_draws
    own = target_rows[:, None] == negative_rows[None, :]
    against = against.masked_fill(own, -torch.inf)
    positive = (states * targets).sum(-1, keepdim=True)
    return (torch.logsumexp(torch.cat([positive, against], dim=1), dim=1) - positive[:, 0]).mean()


def _full(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
