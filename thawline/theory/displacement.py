"""How far a row moves after one gradient when no other follows, per unit learning rate.

A rare row gets a gradient and then waits. What its optimizer makes of that single gradient is the
trace that the example leaves, whatever the size of the gradient.
"""

from __future__ import annotations

import math

from thawline.errors import ConfigError


def dense_adam(beta1: float = 0.9, beta2: float = 0.999) -> float:
    """Movement of a coordinate whose row stays idle after one gradient, under dense Adam.

    PyTorch's Adam moves every row at every step, with or without a gradient. After a gradient g
    on clean moments, t steps later (t = 0 for the step of the gradient itself),

        m_t = (1 - b1) b1^t g,      v_t = (1 - b2) b2^t g^2,
        move_t = m_t / sqrt(v_t) = (1 - b1) / sqrt(1 - b2) * (b1 / sqrt(b2))^t * sign(g),

    a geometric series. All moves have the sign of g, and their sum is

        (1 - b1) / (sqrt(1 - b2) * (1 - b1 / sqrt(b2))),

    about 31.8 for the usual betas: the row goes on for ten times its first step.

    Assumptions: the step counter is far past the bias correction (as in a tensor that has trained
    for some thousands of steps), epsilon is small beside sqrt(v), no weight decay, and idle steps
    enough for the series to end (some 50 for b1 = 0.9).

    Source: Kingma and Ba, "Adam", ICLR 2015, for the update; the multi-epoch reproduction
    (docs/theory.md) for the sum, which it gives as about 31.7.

    Args:
        beta1: Decay of the first moment, b1.
        beta2: Decay of the second moment, b2.

    Returns:
        Total movement divided by the learning rate, as a coordinate's absolute value.

    Raises:
        ConfigError: A beta outside [0, 1), or b1 >= sqrt(b2), where the series has no sum.

    >>> round(dense_adam(), 2)
    31.77
    """
    first = lazy_adam(beta1, beta2)
    ratio = beta1 / math.sqrt(beta2) if beta2 else math.inf
    if ratio >= 1:
        raise ConfigError(
            f"beta1 {beta1:g} is not below the root of beta2 {beta2:g}: "
            "under dense Adam an idle row would never come to rest",
            "lower beta1 or raise beta2",
        )
    return first / (1 - ratio)


def lazy_adam(beta1: float = 0.9, beta2: float = 0.999) -> float:
    """Movement of a coordinate after one gradient under lazy Adam, which moves touched rows alone.

    Only the step of the gradient itself counts, the first term of `dense_adam`'s series:

        (1 - b1) / sqrt(1 - b2),

    about 3.16 for the usual betas. This is for a global step counter far past the bias correction
    (`torch.optim.SparseAdam`). Where each row has a step counter of its own, or the state is fresh,
    bias correction makes a row's first step exactly 1.

    Source: as for `dense_adam`.

    Args:
        beta1: Decay of the first moment, b1.
        beta2: Decay of the second moment, b2.

    Returns:
        Movement divided by the learning rate, as a coordinate's absolute value.

    Raises:
        ConfigError: A beta outside [0, 1).

    >>> round(lazy_adam(), 2)
    3.16
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value:g}", "choose it within [0, 1)")
    return (1 - beta1) / math.sqrt(1 - beta2)


def row_wise_adagrad(update: int = 1) -> float:
    """Movement of a row at its n-th update under row-wise Adagrad, for gradients of equal size.

    One accumulator a row, of width d: G <- G + |g|^2 / d, and the row moves by g / sqrt(G). After
    n gradients of the same norm G = n |g|^2 / d, and the root mean square over the row's
    coordinates of the move is

        (|g| / sqrt(d)) / sqrt(n |g|^2 / d) = 1 / sqrt(n):

    exactly 1 at the first step, and smaller with each further exposure. Idle steps move nothing.

    Assumptions: the accumulator starts at 0, and epsilon is small beside sqrt(G). A single
    coordinate moves by more than the root mean square where the gradient is uneven, at most by
    sqrt(d).

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods", JMLR 2011; the row-wise form
    is that of FBGEMM and TorchRec.

    Args:
        update: n, counted from 1.

    Returns:
        Movement divided by the learning rate, as the root mean square over the row's coordinates.

    Raises:
        ConfigError: An update below 1.

    >>> [row_wise_adagrad(update) for update in (1, 4, 100)]
    [1.0, 0.5, 0.1]
    """
    if update < 1:
        raise ConfigError(f"update {update} of a row does not exist", "count updates from 1")
    return 1 / math.sqrt(update)
