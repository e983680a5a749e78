"""Capacity in closed form, against counts, simulations, PyTorch and TorchRec's planner."""

import doctest

import numpy as np
import pytest
import torch
from conftest import TINY_FEED, built
from tensors import make_batch, make_ranker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from thawline import cli
from thawline.config import Config, IdTableSettings, Model
from thawline.errors import ConfigError
from thawline.model.cost import Shape, ranker_cost
from thawline.tables import make_optimizer
from thawline.theory import Popularity, capacity

USER = IdTableSettings(column="user_id", rows=9, dim=5)
MODELS = {
    "default": (Model(dim=16, ffn=24, mlp=(20, 12)), Shape(32, 24, 5, 2, 2)),
    "wide": (Model(dim=32, heads=4, layers=1, ffn=16, mlp=()), Shape(16, 8, 7, 1, 2)),
    "with users": (Model(dim=16, cross_layers=1, mlp=(8,)), Shape(16, 16, 4, 2, 2, (5,))),
    "recomputing": (Model(dim=16, checkpoint_activations=True), Shape(64, 24, 5, 2, 2)),
}


def attention_flops(model, shape):
    """Of the forward: PyTorch counts none for its fused attention on a CPU."""
    tokens = shape.history + 1
    queries = model.layers * tokens + shape.candidates
    return shape.batch * 4 * queries * tokens * model.dim


def measured(model, shape):
    """What PyTorch counts on tensors without data: parameters, FLOP forward, bytes kept."""
    tables = {"user": USER} if shape.side else {}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    batch = make_batch(
        shape.batch, history=shape.history, candidates=shape.candidates, actions=shape.actions
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        ranker = make_ranker(
            settings=model, actions=shape.actions, history=shape.history, tables=tables
        )
        rows = {"item": torch.zeros(len(batch.rows), model.dim, requires_grad=True)}
        if shape.side:
            rows["user"] = torch.zeros(shape.batch, USER.dim, requires_grad=True)
        own = {id(parameter) for parameter in ranker.parameters()}
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ranker.loss(batch, rows)
        small = {id(table.weight) for table in (ranker.action, *ranker.context.values())}
        for parameter in ranker.parameters():
            kept.pop(parameter.untyped_storage()._cdata, None)
        parameters = sum(p.numel() for p in ranker.parameters() if id(p) in own - small)
    return parameters, counter.get_total_flops(), sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_ranker_costs_what_pytorch_counts(name):
    model, shape = MODELS[name]
    parameters, flops, kept = measured(model, shape)

    cost = ranker_cost(model, shape)

    assert cost.parameters == parameters
    assert cost.forward - attention_flops(model, shape) == pytest.approx(flops, rel=1e-6)
    if not model.checkpoint_activations:
        assert cost.kept == pytest.approx(kept, rel=0.15)
        assert cost.backward == 2 * cost.forward


def test_activations_that_are_computed_again_take_less_memory_and_more_time():
    model, shape = MODELS["default"]
    plain = ranker_cost(model, shape)
    again = ranker_cost(model.model_copy(update={"checkpoint_activations": True}), shape)

    assert again.kept < plain.kept
    assert 2 * plain.forward < again.backward <= 3 * plain.forward


@pytest.mark.parametrize("optimizer", capacity.STATE_FLOATS)
@pytest.mark.parametrize("gpus", [1, 3, 4])
def test_rows_and_state_are_those_of_the_fullest_gpu(optimizer, gpus):
    table = capacity.Table(Popularity.zipf(10, 1.1), dim=6, optimizer=optimizer)
    rows = max(len(part) for part in np.array_split(np.arange(10), gpus))
    state = make_optimizer(optimizer, rows, 6).state_dict()

    assert table.weight_bytes(gpus) == rows * 6 * 4
    assert table.state_bytes(gpus) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("alpha", [0, 0.8, 1.2])
def test_distinct_rows_are_those_of_simulated_batches(alpha):
    popularity = Popularity.zipf(500, alpha)
    drawn = np.random.default_rng(0).choice(500, size=(400, 300), p=popularity.share)
    simulated = np.mean([len(np.unique(batch)) for batch in drawn])

    assert capacity.distinct_rows(popularity, 300) == pytest.approx(simulated, rel=0.01)


def test_one_row_is_one_distinct_row():
    assert capacity.distinct_rows(Popularity.zipf(1, 1), 50) == 1


MACHINE = capacity.Machine(
    4, flops=1e9, bandwidth=1e6, memory_rate=1e12, utilisation=0.5, network_share=0.5, latency=0.01
)
NETWORK = capacity.Network(parameters=0, forward=1e8, backward=2e8, kept=1000.0)
"""0.2 s of forward, 0.4 s of backward."""


def plan(*, machine=MACHINE, lookups=1, staleness=1, dim=8, optimizer="sgd", rows=8):
    table = capacity.Table(Popularity.zipf(rows, 0), dim, optimizer)
    return capacity.make_plan(table, NETWORK, machine, lookups=lookups, staleness=staleness)


def test_bytes_and_times_are_those_counted_by_hand():
    made = plan()

    # One id a GPU, elsewhere three times in four: 8 bytes, then a row of 32.
    assert (made.traffic.ids, made.traffic.rows) == (pytest.approx(6), pytest.approx(24))
    assert made.traffic.gradients == made.traffic.rows
    assert made.times.lookup == pytest.approx(0.02 + 30 / 0.5e6, rel=1e-6)
    assert (made.times.forward, made.times.backward) == (pytest.approx(0.2), pytest.approx(0.4))
    # Rows [1, 8] of two batches and a gradient, and three times one distinct row.
    assert made.memory.buffers == pytest.approx((2 + 1) * 32 + 3 * 32)
    assert made.memory.total == pytest.approx(2 * 8 * 4 + 192 + 1000)


@pytest.mark.parametrize(("latency", "exposed"), [(0.1, 0.0), (0.2, 0.0), (0.3, 0.2)])
def test_prefetch_hides_a_lookup_behind_the_backward(latency, exposed):
    machine = capacity.Machine(
        4, flops=1e9, bandwidth=1e30, memory_rate=1e30, utilisation=0.5, latency=latency
    )
    times = plan(machine=machine).times

    assert times.lookup == pytest.approx(2 * latency)
    assert times.exposed(0) == times.lookup
    assert times.exposed(1) == pytest.approx(exposed)
    assert times.step(0, trains=False) - times.step(1, trains=False) == pytest.approx(
        times.lookup - exposed
    )
    update = times.step(1, trains=True) - times.step(1, trains=False)
    assert update == pytest.approx(times.update)


def test_a_single_gpu_sends_nothing():
    machine = capacity.Machine(1, flops=1e9, bandwidth=1.0, memory_rate=1e30)
    made = plan(machine=machine)

    assert made.traffic == capacity.Traffic(0, 0, 0, 0)
    assert made.times.lookup == pytest.approx(0, abs=1e-20)


def test_lookups_of_all_gpus_make_each_other_stale():
    one, four = (plan(machine=capacity.Machine(gpus, 1e9, 1e9, 1e9)).stale for gpus in (1, 4))

    assert one == pytest.approx(1 / 8)
    assert four == pytest.approx(1 - (7 / 8) ** 4)
    assert plan(staleness=0).stale == 0


@pytest.mark.parametrize(
    "wrong",
    [{"gpus": 0}, {"bandwidth": 0}, {"utilisation": 1.5}, {"network_share": 0}, {"latency": -1}],
)
def test_machines_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        capacity.Machine(**{"gpus": 2, "flops": 1.0, "bandwidth": 1.0, "memory_rate": 1.0, **wrong})


def test_the_examples_in_the_docs_run():
    assert doctest.testmod(capacity).failed == 0


def printed(*arguments):
    result = CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return result.stdout


def test_the_command_plans_a_billion_rows_over_64_gpus():
    out = printed("--rows", "1e9", "--gpus", 64, "--batch", 4096, "--requests", "1e9")

    assert "1,000,000,000 rows x 64 over 64 h100" in out
    assert " 4.000 " in out  # GB of rows: 1e9 / 64 x 64 x 4 bytes.
    assert "frozen" in out
    assert "do not fit" not in out


def test_the_command_says_what_does_not_fit_and_what_it_does_not_know():
    assert "GB do not fit into a h100's 80 GB" in printed("--rows", "1e9", "--gpus", 1)
    with pytest.raises(ConfigError, match="no 'ether'"):
        printed("--interconnect", "ether")
    assert "tables.item.dtype=bfloat16" in printed("--rows", "1e9", "--gpus", 1)
    assert "bfloat16" not in printed("--rows", "1e12", "--gpus", 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--optimizer", "adamw"], "tables.item.optimizer"),
        (["--dim", 0], "model.dim"),
        (["--dim", 63], r"dim \(63\) must be a multiple of heads"),
        (["--rows", "inf"], "--rows or --requests is inf"),
        (["--requests", "inf"], "--rows or --requests is inf"),
        (["--gpus", 2, "--set", "tables.item.dtype=bfloat16"], "do not have tables.item.dtype"),
    ],
)
def test_a_plan_for_what_cannot_be_trained_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        printed(*wrong)


def test_the_command_reads_items_counts_and_requests_of_a_dataset(tmp_path):
    config = Config.model_validate({**TINY_FEED, "workdir": str(tmp_path)})
    dataset = built(config, tmp_path / "feed")

    out = printed("--dataset", dataset.root, "--gpus", 2)

    assert f"{dataset.manifest.num_items:,} rows x 64 over 2 h100" in out
    assert "unknown" not in out
    with pytest.raises(ConfigError, match="brings its own rows"):
        printed("--dataset", dataset.root, "--rows", 10)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["row-wise-adagrad", "adagrad", "sgd"])
def test_rows_and_state_agree_with_torchrec_s_planner(optimizer):
    pytest.importorskip("torchrec")
    from torch.distributed.optim import _apply_optimizer_in_backward as fuse
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    rows, dim, gpus = 1_000_000, 64, 4
    config = EmbeddingConfig(
        name="item", embedding_dim=dim, num_embeddings=rows, feature_names=["rows"]
    )
    kinds = {
        "row-wise-adagrad": RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    fuse(kinds[optimizer], tables.parameters(), {"lr": 0.1})
    options = EmbeddingEnumerator(Topology(gpus, "cuda"), batch_size=1).enumerate(
        tables, [EmbeddingCollectionSharder()]
    )
    (found,) = {
        shard.storage.hbm
        for option in options
        if option.sharding_type == "row_wise" and option.compute_kernel == "fused"
        for shard in option.shards
    }

    table = capacity.Table(Popularity.zipf(rows, 1.1), dim, optimizer)
    ours = table.weight_bytes(gpus) + table.state_bytes(gpus)
    assert found == pytest.approx(ours, rel=0.01)
