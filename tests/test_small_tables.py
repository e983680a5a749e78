"""Small tables: both backwards against float64, and the choice between them kept on disk."""

import json
import os

import pytest
import torch
from operators import Operators
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from thawline.errors import ConfigError, TrainingError
from thawline.tables import choices, small
from thawline.tables.choices import Choices, quickest
from thawline.tables.small import SmallTable, sum_one_hot

ROWS, DIM = 12, 16
WAYS = ["one-hot", "scatter"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file of choices of a user who has none yet, and a process that remembers none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(small, "CHOICES", Choices("small_tables.json"))
    return tmp_path / "cache" / "thawline" / "small_tables.json"


@pytest.fixture
def ids():
    """600 ids in `[30, 20]`; the last row is never read."""
    return torch.randint(0, ROWS - 1, (30, 20), generator=torch.Generator().manual_seed(0))


def make_table(backward, dtype=torch.float32, rows=ROWS, dim=DIM):
    torch.manual_seed(0)
    return SmallTable(rows, dim, backward=backward).to(dtype)


def random_grad(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def summed_id_by_id(grad, ids, rows):
    """Float64, one gradient after the other."""
    total = torch.zeros(rows, grad.shape[-1], dtype=torch.float64)
    pieces = grad.double().reshape(-1, grad.shape[-1])
    for row, piece in zip(ids.flatten().tolist(), pieces, strict=True):
        total[row] += piece
    return total


@pytest.mark.parametrize("backward", [*WAYS, "auto"])
def test_values_are_an_embeddings_and_gradients_those_of_a_float64_reference(backward, ids):
    table = make_table(backward)
    grad = random_grad(30, 20, DIM)

    values = table(ids)
    values.backward(grad)

    assert torch.equal(values, nn.functional.embedding(ids, table.weight))
    torch.testing.assert_close(
        table.weight.grad.double(), summed_id_by_id(grad, ids, ROWS), rtol=1e-5, atol=1e-5
    )
    assert table.weight.grad[-1].tolist() == [0.0] * DIM


@pytest.mark.parametrize("backward", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_lose_no_more_than_one_rounding(backward, dtype, monkeypatch):
    monkeypatch.setitem(small.ONE_HOT_ELEMENTS, "cpu", 30)
    ids = torch.randint(0, 3, (5_000,), generator=torch.Generator().manual_seed(0))
    grad = random_grad(5_000, 8, dtype=dtype).abs()
    table = make_table(backward, dtype, rows=3, dim=8)

    table(ids).backward(grad)

    assert table.weight.grad.dtype == dtype
    torch.testing.assert_close(
        table.weight.grad.double(), summed_id_by_id(grad, ids, 3), rtol=0.005, atol=0
    )


@pytest.mark.parametrize("backward", WAYS)
def test_first_and_second_gradients_are_the_numerical_ones(backward):
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[3, 0], [3, 2], [3, 0]])

    def read(leaf):
        return torch.ops.thawline.small_table(leaf, ids, backward).square()

    assert torch.autograd.gradcheck(read, weight)
    assert torch.autograd.gradgradcheck(read, weight)


@pytest.mark.parametrize("backward", WAYS)
def test_gradients_have_the_same_bits_every_time(backward):
    ids = torch.randint(0, ROWS, (50_000,), generator=torch.Generator().manual_seed(0))
    grad = random_grad(50_000, DIM)
    sums = [small.WAYS[backward](grad.clone(), ids.clone(), ROWS) for _ in range(5)]

    assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_the_one_hot_matrix_is_made_in_pieces_that_add_up(rows, monkeypatch):
    monkeypatch.setitem(small.ONE_HOT_ELEMENTS, "cpu", 1_000)
    ids = torch.randint(0, rows, (5_003,), generator=torch.Generator().manual_seed(0))
    grad = random_grad(5_003, 2)

    with Operators() as operators:
        summed = sum_one_hot(grad, ids, rows)

    assert operators.largest <= max(1_000, rows * rows)
    torch.testing.assert_close(
        summed.double(), summed_id_by_id(grad, ids, rows), rtol=1e-5, atol=1e-4
    )


def test_a_backward_under_autocast_rounds_no_gradient(ids):
    table = make_table("one-hot")
    grad = random_grad(30, 20, DIM)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        table(ids).backward(grad)

    torch.testing.assert_close(
        table.weight.grad.double(), summed_id_by_id(grad, ids, ROWS), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backward", [*WAYS, "auto"])
def test_no_id_gives_no_value_a_gradient_of_zeros_and_no_measurement(backward, cache):
    table = make_table(backward)

    values = table(torch.zeros(0, 5, dtype=torch.int64))
    values.sum().backward()

    assert values.shape == (0, 5, DIM)
    assert torch.equal(table.weight.grad, torch.zeros(ROWS, DIM))
    assert not cache.exists()


def test_a_frozen_table_is_read_without_operator_and_without_graph(ids):
    table = make_table("auto").requires_grad_(False)

    with Operators() as operators:
        values = table(ids)

    assert not values.requires_grad
    assert torch.equal(values, table.weight[ids])
    assert "thawline::small_table" not in operators.names


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("outside", [ROWS, -1])
def test_an_id_outside_the_table_is_named(outside, trains):
    table = make_table("auto").requires_grad_(trains)

    with pytest.raises(TrainingError, match=rf"row {outside} is outside a table of {ROWS} rows"):
        table(torch.tensor([[3, outside]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backward", [*WAYS, "auto"])
def test_on_cuda_sums_repeat_bit_by_bit_and_an_anomaly_check_names_an_id(backward, ids):
    table = make_table(backward).cuda()
    grad = random_grad(30, 20, DIM)
    sums = []
    for _ in range(3):
        table.zero_grad()
        table(ids.cuda()).backward(grad.cuda())
        sums.append(table.weight.grad.cpu())

    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    torch.testing.assert_close(
        sums[0].double(), summed_id_by_id(grad, ids, ROWS), rtol=1e-5, atol=1e-5
    )
    with torch.autograd.detect_anomaly(), pytest.raises(TrainingError, match=f"row {ROWS} is"):
        table(torch.tensor([ROWS], device="cuda"))


def test_an_unknown_backward_is_refused():
    with pytest.raises(ConfigError, match=r"'onehot' is no backward.*\n.*auto, one-hot, scatter"):
        SmallTable(4, 2, backward="onehot")


def test_the_operators_keep_the_contract_of_torch_library(ids):
    weight, grad = torch.randn(ROWS, DIM), torch.randn(30, 20, DIM)
    operators = torch.ops.thawline

    for backward in WAYS:
        for leaf in (weight, weight.clone().requires_grad_()):
            torch.library.opcheck(operators.small_table.default, (leaf, ids, backward))
        for leaf in (grad, grad.clone().requires_grad_()):
            torch.library.opcheck(
                operators.small_table_backward.default, (leaf, ids, ROWS, backward)
            )


def trained(network, ids):
    """Values and gradients of a layer after the table."""
    network.zero_grad()
    values = network(ids)
    values.square().sum().backward()
    return [values.detach(), *(parameter.grad for parameter in network.parameters())]


def make_network(backward):
    return nn.Sequential(make_table(backward), nn.Linear(DIM, 3), nn.Tanh())


@pytest.mark.parametrize("backward", [*WAYS, "auto"])
def test_compiled_in_one_graph_it_trains_alike_on_batches_of_several_lengths(backward, ids):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    network = make_network(backward)
    compiled = torch.compile(network, fullgraph=True, backend=counter, dynamic=True)

    for length in (30, 17, 9):
        some = ids[:length].clone()
        ours, theirs = trained(compiled, some), trained(network, some)
        torch.testing.assert_close(ours, theirs)

    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_by_inductor_it_trains_alike(ids):
    torch.compiler.reset()
    network = make_network("auto")

    ours = trained(torch.compile(network, fullgraph=True), ids)

    torch.testing.assert_close(ours, trained(network, ids))


class Clock:
    """Time that passes only when a way runs."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def way(self, *seconds):
        """Takes so long, run by run; the last number counts for the runs after it."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(choices, "time", clock)
    return clock


def no_wait():
    pass


def test_the_quickest_way_is_the_one_with_the_shortest_run_after_the_first(clock):
    ways = {
        "warm from the start": clock.way(0.003),
        "slow to warm up": clock.way(5.0, 0.009, 0.002),
        "once interrupted": clock.way(0.001, 0.004),
    }

    assert quickest(ways, no_wait) == "slow to warm up"


def test_a_measurement_of_slow_ways_ends_early(clock):
    assert quickest({"slow": clock.way(50.0), "slower": clock.way(60.0)}, no_wait) == "slow"
    assert clock.now == 220.0


@pytest.fixture
def measured(monkeypatch):
    """Counts the backwards of each way, and says which way a measurement finds."""
    calls = {"one-hot": 0, "scatter": 0, "measurements": 0, "winner": "one-hot"}

    def counted(name, way):
        def run(*args):
            calls[name] += 1
            return way(*args)

        return run

    def measure(ways, wait):
        calls["measurements"] += 1
        return calls["winner"]

    monkeypatch.setattr(
        small, "WAYS", {name: counted(name, way) for name, way in small.WAYS.items()}
    )
    monkeypatch.setattr(choices, "quickest", measure)
    return calls


def run_backward(ids, **options):
    table = make_table("auto", **options)
    table(ids).sum().backward()


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(small, "CHOICES", Choices("small_tables.json"))


@pytest.mark.parametrize("winner", WAYS)
def test_auto_takes_the_way_that_was_measured_quicker(ids, measured, winner):
    measured["winner"] = winner

    run_backward(ids)

    assert {way: measured[way] for way in WAYS} == {way: int(way == winner) for way in WAYS}


@pytest.mark.parametrize("backward", WAYS)
def test_a_way_that_is_named_is_taken_without_a_measurement(ids, measured, backward, cache):
    make_table(backward)(ids).sum().backward()

    assert measured[backward] == 1
    assert measured["measurements"] == 0
    assert not cache.exists()


def test_a_shape_is_measured_once_and_the_next_process_makes_the_same_choice(
    ids, measured, monkeypatch
):
    run_backward(ids)
    run_backward(ids)
    assert measured["measurements"] == 1

    forget(monkeypatch)
    measured["winner"] = "scatter"
    run_backward(ids)

    assert measured["measurements"] == 1
    assert measured["one-hot"] == 3
    assert measured["scatter"] == 0


def test_a_choice_is_kept_by_device_versions_threads_dtype_and_shape(ids, measured, cache):
    before = torch.get_num_threads()
    run_backward(ids)
    run_backward(ids[:16])  # 320 ids: up to 512, another power of two
    run_backward(ids[:29])  # 580 ids: up to 1,024, as 600
    run_backward(ids, rows=ROWS + 1)
    run_backward(ids, dim=DIM + 1)
    run_backward(ids, dtype=torch.float64)
    try:
        torch.set_num_threads(before + 1)
        run_backward(ids)
    finally:
        torch.set_num_threads(before)

    known = json.loads(cache.read_text())
    place = f"{choices.device_name(torch.device('cpu'))}, torch {torch.__version__}"
    assert set(known) == {
        f"{place}, {before} threads: 12 x 16 float32, 1024 ids",
        f"{place}, {before} threads: 12 x 16 float32, 512 ids",
        f"{place}, {before} threads: 13 x 16 float32, 1024 ids",
        f"{place}, {before} threads: 12 x 17 float32, 1024 ids",
        f"{place}, {before} threads: 12 x 16 float64, 1024 ids",
        f"{place}, {before + 1} threads: 12 x 16 float32, 1024 ids",
    }
    assert set(known.values()) == {"one-hot"}
    assert measured["measurements"] == 6


def test_a_table_of_many_rows_scatters_without_a_measurement(measured):
    run_backward(torch.arange(300), rows=300)

    assert measured["measurements"] == 0
    assert measured["scatter"] == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", "\x00\xff", '{"KEY": "by hand"}', '{"KEY": ["one-hot"]}']
)
def test_a_damaged_file_is_ignored_and_written_anew(ids, measured, cache, text, monkeypatch):
    run_backward(ids)
    (key,) = json.loads(cache.read_text())
    cache.write_bytes(text.replace("KEY", key).encode("latin-1"))
    forget(monkeypatch)

    run_backward(ids)

    assert measured["measurements"] == 2
    assert json.loads(cache.read_text()) == {key: "one-hot"}


def test_of_two_processes_that_measure_at_once_the_first_to_store_decides_for_both(
    ids, measured, cache, monkeypatch
):
    run_backward(ids)
    (key,) = json.loads(cache.read_text())
    cache.unlink()
    forget(monkeypatch)

    def beaten(ways, wait):
        cache.write_text(json.dumps({key: "one-hot", "other": "scatter"}))
        return "scatter"

    monkeypatch.setattr(choices, "quickest", beaten)
    run_backward(ids)

    assert measured["one-hot"] == 2
    assert measured["scatter"] == 0
    assert json.loads(cache.read_text()) == {key: "one-hot", "other": "scatter"}


def test_the_file_appears_whole_and_leaves_nothing_temporary(ids, measured, cache, monkeypatch):
    run_backward(ids)
    whole = cache.read_text()

    def full_disk(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(choices.Path, "replace", full_disk)
    run_backward(ids, rows=ROWS + 1)

    assert cache.read_text() == whole
    assert measured["one-hot"] == 2


@pytest.mark.parametrize("trouble", ["a file in the way", "no home", "relative"])
def test_without_a_place_for_the_file_choices_last_as_long_as_the_process(
    ids, measured, tmp_path, monkeypatch, trouble
):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    if trouble == "a file in the way":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "here" if trouble == "relative" else "")
        monkeypatch.setattr(choices.Path, "home", homeless)
    monkeypatch.chdir(tmp_path)

    run_backward(ids)
    run_backward(ids)
    assert measured["measurements"] == 1

    forget(monkeypatch)
    run_backward(ids)
    assert measured["measurements"] == 2
    assert not os.path.exists("here")


def test_without_a_cache_folder_of_its_own_the_file_lies_under_the_home(
    ids, measured, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))

    run_backward(ids)

    assert (tmp_path / ".cache" / "thawline" / "small_tables.json").exists()


def test_a_real_measurement_ends_in_one_of_the_ways_and_is_kept(ids, cache):
    run_backward(ids)

    assert set(json.loads(cache.read_text()).values()) <= set(WAYS)
