"""How many lookups read rows that a batch just before them wrote."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import zeta

from thawline.errors import ConfigError
from thawline.theory.popularity import Floats, Popularity


def stale_share(popularity: Popularity, lookups: int, batches: int) -> float:
    """Fraction of lookups that read a row which one of the last `batches` batches updated.

    A lookup reads row i with probability p_i. The k batches before it made n k lookups, and none
    of them read row i with probability (1 - p_i)^(n k), so

        S_k = sum over i of p_i (1 - (1 - p_i)^(n k)).

    With k updates of staleness these are the lookups that miss at least one write. Bernoulli's
    inequality gives S_k <= n k / N_eff (`effective_rows`), and the two agree while no row is
    likely to be in n k lookups.

    Assumptions: lookups are independent draws from one popularity, batches are shuffled, and a
    batch updates each row that it reads. Bursts in a log that is read in order, and users whose
    requests follow each other, make neighbouring batches more alike than this; repeats within a
    request leave a batch fewer distinct rows than n draws would touch.

    Source: the multi-epoch reproduction (docs/theory.md), which has it within 0.004 of Monte Carlo.

    Args:
        popularity: How often rows are read.
        lookups: n, lookups a batch: history and candidates together, without padding.
        batches: k, at least 0.

    Returns:
        S_k within [0, 1]; a Zipf law's is within 1e-10 of the sum over all rows.

    Raises:
        ConfigError: No lookups, or a negative number of batches.

    >>> round(stale_share(Popularity.zipf(rows=10, alpha=0), lookups=2, batches=1), 2)
    0.19
    """
    if lookups < 1:
        raise ConfigError(f"a batch of {lookups} lookups reads nothing", "give at least 1")
    if batches < 0:
        raise ConfigError(f"the number of batches is {batches}", "give 0 or more")
    if batches == 0:
        return 0.0

    def term(share: Floats) -> Floats:
        # A single row has share 1 and the logarithm -inf, which is what its term needs.
        with np.errstate(divide="ignore"):
            return -share * np.expm1(lookups * batches * np.log1p(-share))

    return min(1.0, popularity.total(term))


def effective_rows(popularity: Popularity) -> float:
    """N_eff: the rows of a uniform table in which two lookups meet as often as in this one.

    Two lookups read the same row with probability sum over i of p_i^2; among N equally popular
    rows that is 1 / N, so N_eff = 1 / sum p_i^2. `stale_share` is close to n k / N_eff where it
    is small.

    >>> effective_rows(Popularity.from_counts([2, 1, 1, 0]))
    2.6666666666666665
    """
    return 1 / popularity.total(np.square)


def effective_rows_limit(alpha: float) -> float:
    """N_eff of a Zipf law over ever more rows.

    With p_i = i^-alpha / H_N(alpha), H_N(s) being the sum of i^-s over N rows,

        N_eff = H_N(alpha)^2 / H_N(2 alpha)  ->  zeta(alpha)^2 / zeta(2 alpha)   for alpha > 1,

    since both sums converge; for alpha <= 1 the first does not, and N_eff grows without bound.
    The approach is slow near 1: H_N falls short of zeta(alpha) by about
    N^(1 - alpha) / (alpha - 1), so N_eff by twice that over zeta(alpha), relatively. At
    alpha = 1.1 the limit is 75.2, a billion rows have 58.3 and ten billion 61.6.

    Source: the multi-epoch reproduction (docs/theory.md), which quotes "about 62" for 1.1.

    Args:
        alpha: The Zipf exponent, at least 0.

    Returns:
        The limit; infinity for alpha <= 1.

    Raises:
        ConfigError: An exponent below 0 or not a number.

    >>> round(effective_rows_limit(2), 2)
    2.5
    """
    if not alpha >= 0:
        raise ConfigError(f"the Zipf exponent is {alpha:g}", "give a number of at least 0")
    if alpha <= 1:
        return math.inf
    return float(zeta(alpha) ** 2 / zeta(2 * alpha))
