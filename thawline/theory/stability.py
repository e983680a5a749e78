"""How large a step may be where gradients arrive late."""

from __future__ import annotations

import math

from thawline.errors import ConfigError


def largest_stable_step(staleness: int) -> float:
    """Bound on a row's effective step under which gradients `staleness` updates late still settle.

    Near a minimum with curvature h, gradient descent with rate r and gradients read k updates ago
    moves the error x by

        x_{t+1} = x_t - a x_{t-k},      a = r h,

    whose solutions are sums of z^t over the roots of z^{k+1} - z^k + a = 0. For small a > 0 all
    roots lie inside the unit circle: one near 1 - a, the others near 0. They move continuously
    with a, so the first to leave must cross the circle, at z = e^{i w} say, where

        a = z^k (1 - z) = 2 sin(w / 2) e^{i (k w + w / 2 - pi / 2)}.

    As a is real and positive, (2k + 1) w = pi (mod 4 pi), and the smallest such a has
    w = pi / (2k + 1):

        a < 2 sin(pi / (2 (2k + 1))).

    That is 2 for k = 0 (plain gradient descent), then 1, 0.618, 0.445, 0.347, and about
    pi / (2k + 1) for large k.

    Assumptions: a quadratic basin, plain SGD and a constant lag. Batches read a row of popularity
    p only now and then: on average its effective step is a = r h p where the loss is a mean over
    lookups (r h n p where it is a sum over n of them), so the most popular row decides, not the
    share of stale lookups. Adaptive optimizers (Adagrad, Adam) bound the step by other means and
    are not covered.

    Source: Levin and May, "A note on difference-delay equations", Theoretical Population Biology
    9 (1976), for the bound; the multi-epoch reproduction (docs/theory.md) for its use on tables.

    Args:
        staleness: k, updates between a lookup's read and the newest write; 0 is synchronous.

    Returns:
        The least effective step a that is not stable; anything below it is.

    Raises:
        ConfigError: A negative staleness.

    >>> [round(largest_stable_step(k), 2) for k in (0, 1, 2, 4)]
    [2.0, 1.0, 0.62, 0.35]
    """
    if staleness < 0:
        raise ConfigError(f"staleness is {staleness}", "give 0 (synchronous) or more updates")
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
