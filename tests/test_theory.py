import doctest
import importlib
import math
import pkgutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from thawline import cli, theory
from thawline.errors import ConfigError, DataError
from thawline.theory import Popularity

BILLION = 1_000_000_000


def zipf_shares(rows, alpha):
    share = np.arange(1, rows + 1, dtype=np.float64) ** -alpha
    return share / share.sum()


def simulated_shares(windows, epochs, examples=50_000, batch_size=10):
    """Trains by the step on shuffled examples, and counts what each epoch shows again."""
    rng = np.random.default_rng(0)
    steps = examples // batch_size
    written = np.zeros(examples, dtype=bool)
    shares = []
    for epoch in range(epochs):
        shares.append(written.mean())
        order = rng.permutation(examples)
        for step in range(steps):
            now = epoch + step / steps
            if any(start <= now < end for start, end in windows):
                written[order[step * batch_size : (step + 1) * batch_size]] = True
    return shares


def simulated_adam(idle_steps, *, beta1=0.9, beta2=0.999):
    """PyTorch's Adam, long past its bias correction: one gradient, then zeros."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(beta1, beta2), eps=0.0)
    optimizer.state[weight] = {
        "step": torch.tensor(1e6),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
    for gradient in (-0.037, *[0.0] * idle_steps):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight.item()


def simulated_stale_share(share, lookups, batches, rounds=200):
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(share), size=(rounds + batches, lookups), p=share)
    stale = [
        np.isin(drawn[now], drawn[now - batches : now]).mean()
        for now in range(batches, rounds + batches)
    ]
    return np.mean(stale)


def slowest_root(step, staleness):
    recursion = np.zeros(staleness + 2)
    recursion[0] = 1
    recursion[1] -= 1
    recursion[-1] += step
    return np.abs(np.roots(recursion)).max()


def modules():
    names = [module.name for module in pkgutil.iter_modules(theory.__path__)]
    return [importlib.import_module(f"thawline.theory.{name}") for name in names]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_the_examples_in_the_docs_run(module):
    assert doctest.testmod(module).failed == 0


# Timing


@pytest.mark.parametrize(
    ("start", "share"), [(0, 1), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1, 0)]
)
def test_the_timing_law_is_linear_in_the_start_of_a_window(start, share):
    assert theory.written_then_replayed([(start, start + 1)], epochs=2) == share


@pytest.mark.parametrize(
    ("windows", "epochs"),
    [
        ([(0, 2)], 2),
        ([], 3),
        ([(2, 3)], 3),
        ([(0, 1)], 3),
        ([(0.3, 1.7)], 3),
        ([(0.25, 0.5), (1.5, 1.75), (2.1, 2.2)], 4),
        ([(0, 0.2), (1, 1.2), (2, 2.2), (3, 3.2)], 4),
    ],
)
def test_shares_of_any_windows_are_those_of_a_simulated_run(windows, epochs):
    # A share of 50,000 examples strays by 0.0022 (one standard deviation) at most.
    assert theory.replayed_by_epoch(windows, epochs) == pytest.approx(
        simulated_shares(windows, epochs), abs=0.01
    )


def test_two_half_epochs_leave_a_quarter_unwritten():
    windows = [(0, 0.5), (1.25, 1.75)]

    assert theory.replayed_by_epoch(windows, epochs=3) == [0, 0.5, 0.75]
    assert theory.written_then_replayed(windows, epochs=3) == 0.75


def test_windows_may_overlap_and_come_in_any_order():
    assert theory.written_then_replayed([(0.5, 0.75), (0, 0.5), (0.25, 0.5)], epochs=2) == 0.75


def test_a_single_epoch_replays_nothing():
    assert theory.written_then_replayed([(0, 1)], epochs=1) == 0


@pytest.mark.parametrize(
    ("windows", "epochs", "message"),
    [
        ([(1, 0.5)], 2, r"window \[1, 0.5\) ends before it starts"),
        ([(0, math.nan)], 2, r"window \[0, nan\) ends before"),
        ([(1.5, 2.5)], 2, r"window \[1.5, 2.5\) lies outside a run of 2 epochs"),
        ([(-0.5, 0.5)], 2, r"window \[-0.5, 0.5\) lies outside"),
        ([], 0, "a run of 0 epochs"),
    ],
)
def test_windows_that_do_not_fit_the_run_are_refused(windows, epochs, message):
    with pytest.raises(ConfigError, match=message):
        theory.written_then_replayed(windows, epochs)


# Displacement


def test_an_idle_row_under_dense_adam_moves_ten_times_its_first_step():
    assert theory.dense_adam() == pytest.approx(31.7, abs=0.1)
    assert theory.dense_adam() == pytest.approx(simulated_adam(idle_steps=300), rel=1e-9)


@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.95), (0.5, 0.9)])
def test_dense_adam_agrees_with_pytorch_at_other_betas(betas):
    simulated = simulated_adam(300, beta1=betas[0], beta2=betas[1])

    assert theory.dense_adam(*betas) == pytest.approx(simulated, rel=1e-9)


def test_lazy_adam_moves_a_row_once():
    weight = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SparseAdam([weight], lr=1.0, eps=1e-30)
    optimizer.state[weight] = {
        "step": 1_000_000,
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
    for row, gradient in ((0, -0.037), (1, 0.5), (1, 0.2)):
        value = torch.tensor([[gradient]], dtype=torch.float64)
        weight.grad = torch.sparse_coo_tensor([[row]], value, (2, 1), check_invariants=True)
        optimizer.step()

    assert theory.lazy_adam() == pytest.approx(3.16, abs=0.005)
    assert theory.lazy_adam() == pytest.approx(weight[0].item(), rel=1e-9)


def test_steps_of_row_wise_adagrad_shrink_with_the_root_of_their_number():
    gradient = np.array([3.0, -4.0, 0.0, 12.0])
    accumulator, moves = 0.0, []
    for _ in range(9):
        accumulator += np.mean(gradient**2)
        moves.append(np.sqrt(np.mean((gradient / np.sqrt(accumulator)) ** 2)))

    assert theory.row_wise_adagrad() == 1
    assert [theory.row_wise_adagrad(n) for n in range(1, 10)] == pytest.approx(moves, rel=1e-12)


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan)])
def test_betas_outside_their_range_are_refused(betas):
    with pytest.raises(ConfigError, match="choose it within"):
        theory.lazy_adam(*betas)


@pytest.mark.parametrize("betas", [(0.9, 0.81), (0.9, 0.5), (0.0, 0.0)])
def test_a_momentum_that_never_rests_is_refused(betas):
    with pytest.raises(ConfigError, match="never come to rest"):
        theory.dense_adam(*betas)


def test_an_update_before_the_first_is_refused():
    with pytest.raises(ConfigError, match="update 0"):
        theory.row_wise_adagrad(0)


# Popularity


@pytest.mark.parametrize("alpha", [0, 0.5, 0.8, 1, 1.1, 1.5, 3, 8])
def test_sums_of_a_zipf_law_are_those_over_every_row(alpha):
    popularity, share = Popularity.zipf(1_000_000, alpha), zipf_shares(1_000_000, alpha)

    assert popularity.hottest == pytest.approx(share[0], rel=1e-10)
    assert popularity.total(lambda p: p) == pytest.approx(1, rel=1e-12)
    assert theory.effective_rows(popularity) == pytest.approx(1 / (share**2).sum(), rel=1e-10)
    for lookups, batches in ((1, 1), (2560, 1), (28_160, 4)):
        brute = -share @ np.expm1(lookups * batches * np.log1p(-share))
        stale = theory.stale_share(popularity, lookups, batches)
        assert stale == pytest.approx(brute, rel=1e-10)


def test_a_small_zipf_table_is_summed_row_by_row():
    popularity = Popularity.zipf(3, 1)

    assert popularity.share == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert popularity.weight.tolist() == [1, 1, 1]


def test_a_billion_rows_take_well_under_a_second():
    began = time.perf_counter()
    popularity = Popularity.zipf(BILLION, 1.1)
    theory.stale_share(popularity, 28_160, 4)
    theory.effective_rows(popularity)
    took = time.perf_counter() - began

    assert len(popularity.share) < 70_000
    assert took < 0.5


def test_counts_are_the_popularity_of_a_catalog():
    popularity = Popularity.from_counts([1, 0, 2, 1])

    assert popularity.rows == 4
    assert popularity.hottest == 0.5
    assert popularity.share.tolist() == [0.5, 0.25]
    assert popularity.weight.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "every count is 0"),
        ([0, 0], "every count is 0"),
        ([3, -1], "negative or not finite"),
        ([3, math.nan], "negative or not finite"),
        ([3, math.inf], "negative or not finite"),
    ],
)
def test_counts_without_a_popularity_are_refused(counts, message):
    with pytest.raises(DataError, match=message):
        Popularity.from_counts(counts)


@pytest.mark.parametrize(("rows", "alpha"), [(0, 1.1), (10, -1), (10, math.nan), (10, math.inf)])
def test_a_zipf_law_that_is_none_is_refused(rows, alpha):
    with pytest.raises(ConfigError):
        Popularity.zipf(rows, alpha)


# Staleness


def test_two_equal_rows_are_stale_by_the_odds_of_a_coin():
    coin = Popularity.from_counts([7, 7])

    assert theory.stale_share(coin, lookups=1, batches=1) == pytest.approx(1 / 2)
    assert theory.stale_share(coin, lookups=2, batches=1) == pytest.approx(3 / 4)
    assert theory.stale_share(coin, lookups=2, batches=2) == pytest.approx(15 / 16)


@pytest.mark.parametrize("alpha", [0, 0.8, 1.1, 2])
@pytest.mark.parametrize(("lookups", "batches"), [(100, 1), (500, 1), (500, 4)])
def test_the_stale_share_is_that_of_simulated_batches(alpha, lookups, batches):
    simulated = simulated_stale_share(zipf_shares(5000, alpha), lookups, batches)
    share = theory.stale_share(Popularity.zipf(5000, alpha), lookups, batches)

    assert share == pytest.approx(simulated, abs=0.01)


def test_the_stale_share_follows_counts_as_it_follows_the_law_they_came_from():
    counts = zipf_shares(200_000, 1.1) * 1e6
    shares = [
        theory.stale_share(popularity, 2560, 2)
        for popularity in (Popularity.from_counts(counts), Popularity.zipf(200_000, 1.1))
    ]

    assert shares[0] == pytest.approx(shares[1], rel=1e-10)


def test_synchronous_lookups_are_never_stale_and_a_single_row_always_is():
    one = Popularity.zipf(1, 1.1)

    assert theory.stale_share(one, 100, batches=0) == 0
    assert theory.stale_share(one, 100, batches=1) == 1


def test_few_lookups_are_stale_as_among_effective_rows():
    popularity = Popularity.zipf(BILLION, 0.5)
    share = 1000 / theory.effective_rows(popularity)

    assert theory.stale_share(popularity, 1000, 1) == pytest.approx(share, rel=0.01)
    assert theory.stale_share(popularity, 1000, 1) < share


def test_effective_rows_are_the_rows_of_a_uniform_table():
    assert theory.effective_rows(Popularity.zipf(BILLION, 0)) == pytest.approx(BILLION)


@pytest.mark.parametrize(("alpha", "limit"), [(1.1, 75.161), (1.5, 5.6774), (2, 2.5)])
def test_effective_rows_have_a_limit_above_exponent_one(alpha, limit):
    # zeta(2)^2 / zeta(4) = (pi^2 / 6)^2 / (pi^4 / 90) = 2.5.
    assert theory.effective_rows_limit(alpha) == pytest.approx(limit, rel=1e-4)


def test_effective_rows_come_near_the_limit_slowly_at_exponent_1_1():
    found = [theory.effective_rows(Popularity.zipf(10**power, 1.1)) for power in (9, 10, 16, 80)]

    assert found == pytest.approx([58.34, 61.63, 71.64, 75.161], rel=1e-3)


def test_effective_rows_grow_without_bound_up_to_exponent_one():
    assert theory.effective_rows_limit(1) == math.inf
    assert theory.effective_rows(Popularity.zipf(10**12, 1)) > 400


@pytest.mark.parametrize(
    ("lookups", "batches", "message"), [(0, 1, "batch of 0 lookups"), (5, -1, "batches is -1")]
)
def test_batches_that_cannot_be_are_refused(lookups, batches, message):
    with pytest.raises(ConfigError, match=message):
        theory.stale_share(Popularity.zipf(10, 1), lookups, batches)


@pytest.mark.parametrize("alpha", [-1, math.nan])
def test_the_limit_of_no_zipf_law_is_refused(alpha):
    with pytest.raises(ConfigError, match="Zipf exponent"):
        theory.effective_rows_limit(alpha)


# Stability


@pytest.mark.parametrize(("late", "bound"), [(0, 2), (1, 1), (2, 0.618), (4, 0.347)])
def test_the_bound_on_a_late_step_falls_with_its_lateness(late, bound):
    assert theory.largest_stable_step(late) == pytest.approx(bound, abs=5e-4)


@pytest.mark.parametrize("late", [0, 1, 2, 3, 4, 10, 50])
def test_the_bound_is_where_a_root_of_the_recursion_leaves_the_unit_circle(late):
    bound = theory.largest_stable_step(late)

    assert slowest_root(0.01 * bound, late) < 1
    assert slowest_root(0.5 * bound, late) < 1
    assert slowest_root(0.999 * bound, late) < 1
    assert slowest_root(bound, late) == pytest.approx(1, abs=1e-9)
    assert slowest_root(1.001 * bound, late) > 1


@pytest.mark.parametrize("late", [0, 1, 2, 4])
def test_descent_on_late_gradients_settles_below_the_bound_alone(late):
    def error_after(step, updates=5000):
        past = [1.0] * (late + 1)
        for _ in range(updates):
            past.append(past[-1] - step * past[-1 - late])
        return max(abs(error) for error in past[-20:])

    bound = theory.largest_stable_step(late)

    assert error_after(0.99 * bound) < 1e-3
    assert error_after(1.01 * bound) > 1e3


def test_a_negative_staleness_is_refused():
    with pytest.raises(ConfigError, match="staleness is -1"):
        theory.largest_stable_step(-1)


# The command


@pytest.fixture
def dataset(tmp_path):
    """A dataset folder as far as theory reads it: 3 items, counted 1, 2 and 1 times."""
    root = tmp_path / "dataset"
    root.mkdir()
    catalog = pa.table(
        {
            "item_id": pa.array([10, 11, 12]),
            "row": pa.array([2, 3, 4]),
            "first_seen": pa.array([0, 1, 2], pa.timestamp("us", tz="UTC")),
            "pretrain_count": pa.array([1, 0, 1]),
            "support": pa.array([0, 2, 0]),
            "tier": pa.array([3, 2, 3], pa.int8()),
        }
    )
    pq.write_table(catalog, root / "catalog.parquet")
    return root


def printed(*arguments):
    result = CliRunner().invoke(cli.app, ["theory", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return [
        [cell.strip() for cell in line.strip("│┃ \n").replace("┃", "│").split("│")]
        for line in result.stdout.splitlines()
    ]


def test_the_command_prints_each_figure():
    lines = printed("--rows", 2, "--zipf", 0, "--lookups", 1, "--staleness", 1, "--staleness", 2)

    assert ["rows", "2"] in lines
    assert ["effective rows", "2.0"] in lines
    assert ["lookups of the hottest row", "50.00 %"] in lines
    assert ["1", "50.00 %", "1", "2"] in lines
    assert ["2", "75.00 %", "0.618", "1.24"] in lines
    assert ["dense Adam", "31.77"] in [line[:2] for line in lines]
    assert ["lazy Adam", "3.16"] in [line[:2] for line in lines]
    assert ["row-wise Adagrad", "1.00"] in [line[:2] for line in lines]
    assert ["0.25", "75.00 %", "75.00 %"] in lines


def test_the_command_draws_the_timing_law_for_longer_runs():
    lines = printed("--rows", 2, "--epochs", 3)

    # From 1.5, half of epoch 1 trains; from 0.5, half of epoch 0 and then half or all of epoch 1.
    assert ["0.5", "75.00 %", "100.00 %"] in lines
    assert ["1.5", "50.00 %", "50.00 %"] in lines
    assert ["2", "0.00 %", "0.00 %"] in lines


def test_the_command_reads_the_popularity_of_a_catalog(dataset):
    lines = printed("--dataset", dataset, "--lookups", 1, "--staleness", 1)

    # Shares 1/4, 1/2, 1/4: 1 / (1/16 + 1/4 + 1/16) effective rows, and 3/8 of lookups stale.
    assert ["rows", "3"] in lines
    assert ["effective rows", "2.7"] in lines
    assert ["1", "37.50 %", "1", "2"] in lines


def test_a_catalog_and_a_zipf_law_exclude_each_other(dataset):
    with pytest.raises(ConfigError, match="brings its own rows"):
        printed("--dataset", dataset, "--zipf", 1.1)


def test_a_folder_without_a_catalog_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"catalog\.parquet"):
        printed("--dataset", tmp_path)
