"""Statistics of two sides that ran with the same seeds: what pairs of figures say.

Two runs with one seed share their data and their first weights, so the difference within a pair
varies less than the figures do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats

from thawline.errors import DataError

MOST_FLIPPED = 20
"""Pairs up to which all 2^n flips are counted; beyond, `FLIPS` are drawn."""
FLIPS = 1_000_000
SHOWN_WITH = 2.8
"""z(0.975) + z(0.80): an effect of so many standard errors is found with 80 % power at 5 %."""
ALWAYS_SHOWN = 100
"""Standard deviations of an effect that two pairs show."""
SEARCHED = 1_000
"""Pairs up to which the number needed is searched by the t-test's own power; beyond, a formula
has it right, and the power is too flat in the number for a search to end."""
AGREES = 1e-12
"""Relative difference within which two sums of flips are one (rounding)."""


@dataclass(frozen=True)
class Paired:
    """What n differences say, each of one pair of runs."""

    n: int
    mean: float
    sd: float | None
    """Sample standard deviation; None for one pair."""
    agreement: float
    """Share of the pairs whose difference has the sign of the mean; a zero agrees with none."""
    p_value: float
    """Two-sided, of the exact sign-flip test."""
    exact: bool
    """False where flips were drawn, since there are too many."""
    low: float | None
    """Of the 95 % interval of the mean, by Student's t; None for one pair."""
    high: float | None
    smallest_effect: float | None
    """What such pairs could show: 80 % power at 5 %."""

    @property
    def standard_error(self) -> float | None:
        """Of the mean; None for one pair."""
        return None if self.sd is None else self.sd / math.sqrt(self.n)


def paired(differences: Sequence[float]) -> Paired:
    """Sums up the differences of pairs of runs.

    Args:
        differences: One a seed, each the second side minus the first.

    Raises:
        DataError: No pair, or a difference that is not finite.
    """
    values = np.asarray(differences, np.float64)
    if not len(values):
        raise DataError("there is no pair of runs to compare", "give runs of both sides")
    if not np.isfinite(values).all():
        raise DataError(
            f"the difference of pair {int(np.argmin(np.isfinite(values)))} is not a number",
            "compare figures that are defined in every run",
        )
    n, mean = len(values), float(values.mean())
    p_value, exact = sign_flip_p(values)
    sd = low = high = smallest = None
    if n > 1:
        sd = float(values.std(ddof=1))
        half = _t_quantile(n - 1) * sd / math.sqrt(n)
        low, high = mean - half, mean + half
        smallest = SHOWN_WITH * sd / math.sqrt(n)
    agreement = float((np.sign(values) == np.sign(mean)).mean()) if mean else 0.0
    return Paired(n, mean, sd, agreement, p_value, exact, low, high, smallest)


@lru_cache
def _t_quantile(freedom: int) -> float:
    """Of Student's t at 97.5 %."""
    return float(stats.t.ppf(0.975, freedom))


def sign_flip_p(differences: Sequence[float] | np.ndarray) -> tuple[float, bool]:
    """The two-sided p-value of the sign-flip test of Fisher (1935).

    If the sides do not differ, each difference could as well have had the other sign. The p-value
    is the share of the 2^n flips whose mean is at least as far from 0 as the one that was found,
    so that n pairs can reach 2 / 2^n at the least.

    Args:
        differences: [n], at least one.

    Returns:
        The p-value, and whether all flips were counted (n up to `MOST_FLIPPED`).
    """
    values = np.asarray(differences, np.float64)
    found = abs(values.sum())
    least = found - AGREES * np.abs(values).sum()
    if len(values) <= MOST_FLIPPED:
        # Every sum, one difference at a time: half of the flips, the others being their mirror.
        sums = values[:1].copy()
        for value in values[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= least).mean()), True
    generator = np.random.default_rng(0)
    hits, drawn, at_once = 0, 0, 50_000
    while drawn < FLIPS:
        signs = generator.integers(0, 2, (at_once, len(values)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ values) >= least).sum())
        drawn += at_once
    # The flip that was found is one of them, so that p is never 0.
    return (hits + 1) / (drawn + 1), False


def pairs_needed(effect: float, sd: float, *, power: float = 0.8, level: float = 0.05) -> int:
    """How many pairs show an effect.

    Args:
        effect: Mean difference that is to be found, not 0.
        sd: Of the differences.
        power: How probable it is to be found.
        level: Of the two-sided t-test.

    Returns:
        The least number of pairs, at least 2, whose t-test has the power.

    Raises:
        DataError: No effect.
    """
    if not effect:
        raise DataError("an effect of 0 cannot be shown", "name the least difference that matters")

    def reaches(n: int) -> bool:
        shift = abs(effect) / sd * math.sqrt(n)
        bound = stats.t.ppf(1 - level / 2, n - 1)
        return bool(stats.nct.sf(bound, n - 1, shift) >= power)

    # The power of so large an effect is 1, which the noncentral t overflows at.
    if abs(effect) > ALWAYS_SHOWN * sd or reaches(2):
        return 2
    # Student's t asks for more pairs than the normal law does, by few.
    two_sided = float(stats.norm.ppf(1 - level / 2))
    normal = ((two_sided + float(stats.norm.ppf(power))) * sd / effect) ** 2
    if normal > SEARCHED:
        return math.ceil(normal + two_sided**2 / 2)
    n = max(3, math.floor(normal))
    while not reaches(n):
        n += 1
    return n
