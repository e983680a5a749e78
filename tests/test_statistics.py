import itertools
import math

import numpy as np
import pytest

from thawline.errors import DataError
from thawline.study.statistics import paired, pairs_needed, sign_flip_p


def test_three_pairs_by_hand():
    found = paired([0.01, 0.02, 0.06])
    assert found.n == 3
    assert found.mean == pytest.approx(0.03)
    # Squared distances 4e-4, 1e-4, 9e-4; their sum over 2 is 7e-4.
    assert found.sd == pytest.approx(math.sqrt(7e-4))
    assert found.agreement == 1
    # All of one sign: the flip that was found and its mirror, of eight.
    assert (found.p_value, found.exact) == (0.25, True)
    # Student's t with 2 degrees of freedom: 4.3027 at 97.5 %.
    error = math.sqrt(7e-4 / 3)
    assert found.standard_error == pytest.approx(error)
    assert found.low == pytest.approx(0.03 - 4.302653 * error, abs=1e-7)
    assert found.high == pytest.approx(0.03 + 4.302653 * error, abs=1e-7)
    assert found.smallest_effect == pytest.approx(2.8 * error)


def test_a_zero_agrees_with_no_sign_and_a_mean_of_zero_with_nobody():
    assert paired([0.0, 1.0, 2.0, -1.0]).agreement == 0.5
    assert paired([1.0, -1.0]).agreement == 0
    assert paired([0.0, 0.0]).p_value == 1


def test_one_pair_says_its_mean_and_nothing_of_the_spread():
    found = paired([0.5])
    assert (found.mean, found.p_value) == (0.5, 1.0)
    assert found.sd is found.low is found.high is found.smallest_effect is None


@pytest.mark.parametrize("seed", range(5))
def test_the_sign_flip_test_counts_every_flip(seed):
    values = np.random.default_rng(seed).normal(0.5, 1, 9)
    found = abs(values.sum())
    flips = [
        abs(np.dot(signs, values)) >= found - 1e-12
        for signs in itertools.product([-1, 1], repeat=len(values))
    ]
    assert sign_flip_p(values) == (pytest.approx(np.mean(flips)), True)


def test_flips_that_tie_up_to_rounding_count():
    # 0.1 + 0.2 is not 0.3 in floating point, but the flips (+,+,-) and (-,-,+) are 0 as found.
    assert sign_flip_p([0.1, 0.2, -0.3])[0] == 1


def test_twenty_pairs_are_counted_and_more_are_drawn():
    generator = np.random.default_rng(1)
    values = generator.normal(0.4, 1, 21)
    drawn, exact = sign_flip_p(values)
    assert not exact
    counted, exact = sign_flip_p(values[:20])
    assert exact
    # A normal approximation of 21 flips: their sum has the variance of the squares.
    z = abs(values.sum()) / math.sqrt((values**2).sum())
    assert drawn == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
    assert counted > 0
    least, _ = sign_flip_p(np.ones(30))
    assert 0 < least < 1e-5


def test_as_many_pairs_are_needed_as_the_tables_of_the_t_test_say():
    # Cohen (1988), two-sided 5 %, 80 % power, paired: d = 0.5 wants 34 pairs, d = 0.8 wants 15.
    assert pairs_needed(0.5, 1.0) == 34
    assert pairs_needed(-0.8, 1.0) == 15
    assert pairs_needed(0.1, 0.0) == 2
    assert pairs_needed(100.0, 1.0) == 2
    assert pairs_needed(0.01, 1e-17) == 2
    # The last that is searched and the first by the formula: (1.96 + 0.8416)^2 / effect^2 + 1.92.
    assert [pairs_needed(0.0887, 1.0), pairs_needed(0.0885, 1.0)] == [1000, 1005]
    assert pairs_needed(1e-7, 1.0) == pytest.approx(7.8489e14, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired([]), "there is no pair of runs"),
        (lambda: paired([1.0, math.nan]), "difference of pair 1 is not a number"),
        (lambda: pairs_needed(0.0, 1.0), "an effect of 0 cannot be shown"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(call, message):
    with pytest.raises(DataError, match=message):
        call()
