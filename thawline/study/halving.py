"""Successive halving (Jamieson & Talwalkar 2016): which arms a round of few epochs lets go on."""

from __future__ import annotations

from collections.abc import Mapping

from thawline.config.running import LOWER_IS_BETTER


def survivors(
    scores: Mapping[str, float | None],
    baselines: Mapping[str, str],
    *,
    figure: str,
    eta: int,
) -> list[str]:
    """The best arms, one in `eta`, rounded up, and what they are compared with.

    Args:
        scores: By arm, its mean figure over the seeds; None where no trial came to an end. Equal
            ones stay in order.
        baselines: By arm, the one it is compared with.
        figure: Of the scores: of some, less is better.
        eta: 2 or more.

    Returns:
        Names in the order of `scores`; arms without a score are never among the best.
    """
    sign = 1 if figure in LOWER_IS_BETTER else -1
    known = {name: value for name, value in scores.items() if value is not None}
    ranked = sorted(known, key=lambda name: sign * known[name])
    best = ranked[: -(-len(scores) // eta)]
    kept = {*best, *(baselines[name] for name in best)}
    return [name for name in scores if name in kept]
