"""The fine-tuning stage with sharded tables, in one process and under torchrun."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import TINY_FEED, built

from thawline.config import Config, parse_config
from thawline.errors import ConfigError
from thawline.model.bundle import Bundle, save_table
from thawline.stages import finetune


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    tree = {
        **TINY_FEED,
        "workdir": str(tmp_path_factory.mktemp("work")),
        "model": {"dim": 8, "ffn": 16, "mlp": [16], "context_dim": 4, "layers": 1},
        "tables": {"user": {"column": "user_id", "rows": 50, "dim": 4, "optimizer": "adagrad"}},
        "finetune": {"epochs": 2, "batch_size": 64},
        "evaluation": {"epoch_requests": 100},
    }
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def dataset(config, tmp_path_factory):
    return built(config, tmp_path_factory.mktemp("data") / "feed")


@pytest.fixture(scope="module")
def table(config, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(dataset.catalog.num_rows, config.model.dim, generator=generator)
    save_table(folder / "item.safetensors", rows)
    return folder


def train(config, dataset, table, out, *overrides):
    changed = parse_config(json.dumps(config.model_dump(mode="json")), overrides)
    return finetune.run(changed, dataset.root, table, out), Bundle.load(out)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_process_with_sharded_tables_makes_the_model_of_local_ones(
    config, dataset, table, tmp_path
):
    first, local = train(config, dataset, table, tmp_path / "a")
    second, sharded = train(config, dataset, table, tmp_path / "b", "tables.engine=sharded")

    assert not dist.is_initialized()
    assert files(tmp_path / "a") == files(tmp_path / "b")
    for name in ("item", "user"):
        torch.testing.assert_close(
            sharded.weights[name], local.weights[name], rtol=0, atol=1e-4, msg=name
        )
    for name, parameter in local.ranker.named_parameters():
        torch.testing.assert_close(
            sharded.ranker.get_parameter(name), parameter, rtol=0, atol=1e-3, msg=name
        )
    for one, two in zip(first, second, strict=True):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
        assert two["drift"]["item"] == pytest.approx(one["drift"]["item"], rel=1e-3)
        assert two["metrics"].keys() == one["metrics"].keys() != set()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "tables.engine=torchrec tables.item.optimizer=lazy-adam",
            "tables.item.optimizer is lazy-adam",
        ),
        ("tables.user.pull=0.1", "tables.user.pull"),
        ("tables.item.dtype=bfloat16", "tables.item.dtype"),
        ("finetune.cross_fit=true", "finetune.cross_fit"),
    ],
)
def test_a_setting_that_sharded_tables_do_not_have_is_refused(
    config, dataset, table, tmp_path, override, named
):
    with pytest.raises(ConfigError, match=named):
        overrides = ["tables.engine=sharded", *override.split()]
        train(config, dataset, table, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()
    assert not dist.is_initialized()


def torchrun(config, dataset, table, out, tmp_path, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "thawline", "finetune", "--config", str(path)]
    command += ["--dataset", str(dataset.root), "--table", str(table), "--model", str(out)]
    command += [part for each in overrides for part in ("--set", each)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=250)
        finally:
            with suppress(ProcessLookupError):  # All of them have ended, as they should.
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.mark.slow
def test_two_processes_of_torchrun_train_one_model(config, dataset, table, tmp_path):
    done = torchrun(config, dataset, table, tmp_path / "model", tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model:") == 1
    train(config, dataset, table, tmp_path / "local")
    assert files(tmp_path / "model") == files(tmp_path / "local")
    epochs, expected = (
        json.loads((tmp_path / name / "epochs.json").read_text()) for name in ("model", "local")
    )
    assert [epoch["steps"] for epoch in epochs] == [-(-epoch["steps"] // 2) for epoch in expected]
    assert [epoch["requests"] for epoch in epochs] == [epoch["requests"] for epoch in expected]
    assert epochs[0]["drift"]["item"]["head"] == 0 < epochs[1]["drift"]["item"]["head"]
    model = Bundle.load(tmp_path / "model")
    assert all(torch.isfinite(rows).all() for rows in model.weights.values())
    assert not model.weights["item"][0].any()


@pytest.mark.slow
def test_processes_with_a_table_each_are_refused(config, dataset, table, tmp_path):
    done = torchrun(config, dataset, table, tmp_path / "model", tmp_path, "tables.engine=local")

    assert done.returncode != 0
    assert "tables.engine is local, and 2 processes train together" in " ".join(done.stderr.split())
