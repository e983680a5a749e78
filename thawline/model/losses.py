"""The three training objectives of the article, as pure functions in float32 or wider.

Where requests are weighted, a request of weight 2 counts as the same request twice: its terms are
weighted, and so is its part of the `count` over which a sum is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def head_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    count: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy: summed over actions and valid candidates, over `count`.

    Args:
        logits: `[B, C, A]`.
        labels: `[B, C, A]`, 0 or 1.
        mask: `[B, C]`, true where there is a candidate.
        count: `count_candidates` of the larger batch that this one is part of; None: of this one.
        weight: `[B]`, of the requests; None: all alike.
    """
    loss = functional.binary_cross_entropy_with_logits(
        _full(logits), _full(labels), reduction="none"
    ).sum(-1)
    count = count_candidates(mask, weight) if count is None else count
    return _over(_weighted(loss * mask, weight).sum(), count, weight)


def pairwise_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    count: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Logistic loss of each (positive, negative) pair of one request and action, over `count`.

    Args:
        logits: `[B, C, A]`.
        labels: `[B, C, A]`, 0 or 1.
        mask: `[B, C]`, true where there is a candidate.
        count: `count_pairs` of the larger batch that this one is part of; None: of this one.
        weight: `[B]`, of the requests; None: all alike.
    """
    logits = _full(logits)
    positive, negative = _split_labels(labels, mask)
    pairs = positive[:, :, None, :] & negative[:, None, :, :]
    loss = functional.softplus(logits[:, None, :, :] - logits[:, :, None, :])
    if count is None:
        count = pairs.sum() if weight is None else count_pairs(labels, mask, weight)
    return _over(_weighted(loss * pairs, weight).sum(), count, weight)


def count_candidates(mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """The valid candidates of `head_loss`, or the sum of their weights."""
    return _weighted(mask, weight).sum()


def count_pairs(labels: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """The (positive, negative) pairs of `pairwise_loss`, or the sum of their weights."""
    positive, negative = _split_labels(labels, mask)
    return _weighted(positive.sum(1) * negative.sum(1), weight).sum()


def _split_labels(labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which candidates are positive, and which negative, by action: bool `[B, C, A]`."""
    return (labels > 0) & mask[..., None], (labels <= 0) & mask[..., None]


def contrastive_loss(
    states: Tensor,
    targets: Tensor,
    target_rows: Tensor,
    negatives: Tensor,
    negative_rows: Tensor,
    negative_log_q: Tensor,
    *,
    temperature: float,
    mask: Tensor | None = None,
    negative_mask: Tensor | None = None,
    count: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Next-item InfoNCE with shared negatives and log-popularity correction.

    Scores are cosines over `temperature`. Sampled softmax corrects each negative's score by the
    log of its sampling probability (Bengio & Senécal 2008; Yi et al. 2019); the target, which is
    always there, needs none, and what all negatives share cancels into a constant:
    `-log exp(s⁺) / (exp(s⁺) + sum_j exp(s_j - log(m q_j)))` for `m` negatives. A negative that is
    a position's own target is left out of that position's sum.

    Weights are those of positions. Negatives count alike whoever's they are: they are a sample of
    the items, whose `negative_log_q` says how they were drawn.

    Args:
        states: `[n, d]`, what predicts.
        targets: `[n, d]`, the next items' vectors.
        target_rows: `[n]`, their rows.
        negatives: `[m, d]`, vectors of the shared negatives.
        negative_rows: `[m]`, their rows.
        negative_log_q: `[m]`, log of the probability with which each was drawn.
        temperature: Divides the cosines.
        mask: `[n]`, true at positions that count; None: at all. A mask, unlike a choice of
            positions, leaves shapes as they are: no compiler breaks, and no host waits for a GPU.
        negative_mask: `[m]`, true at negatives that count; None: at all.
        count: Positions of the larger batch that these are part of, or their weights; None: those
            that count here.
        weight: `[n]`, of the positions; None: all alike.

    Returns:
        The sum over the positions, over `count`; 0 where there is none.
    """
    if not len(states):
        return states.sum()
    if mask is None:
        mask = torch.ones_like(target_rows, dtype=torch.bool)
    if negative_mask is None:
        negative_mask = torch.ones_like(negative_rows, dtype=torch.bool)
    states = functional.normalize(_full(states), dim=-1) / temperature
    targets = functional.normalize(_full(targets), dim=-1)
    negatives = functional.normalize(_full(negatives), dim=-1)
    expected_draws = negative_log_q + negative_mask.sum().to(states.dtype).log()
    with torch.autocast(states.device.type, enabled=False):
        against = states @ negatives.T - expected_draws
    left_out = (target_rows[:, None] == negative_rows[None, :]) | ~negative_mask[None, :]
    against = against.masked_fill(left_out, -torch.inf)
    positive = (states * targets).sum(-1, keepdim=True)
    loss = torch.logsumexp(torch.cat([positive, against], dim=1), dim=1) - positive[:, 0]
    count = count_candidates(mask, weight) if count is None else count
    return _over(_weighted(torch.where(mask, loss, 0.0), weight).sum(), count, weight)


def _weighted(terms: Tensor, weight: Tensor | None) -> Tensor:
    """Terms `[B, ...]` times the weights `[B]` of their requests."""
    if weight is None:
        return terms
    if terms.is_floating_point():
        weight = weight.to(terms.dtype)
    return terms * weight.view(-1, *[1] * (terms.dim() - 1))


def _over(total: Tensor, count: Tensor, weight: Tensor | None) -> Tensor:
    """A sum over a count, 0 of nothing; weights may add up to less than 1."""
    if weight is None:
        return total / count.clamp(min=1)
    return total / torch.where(count > 0, count, 1.0).to(total.dtype)


def _full(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
