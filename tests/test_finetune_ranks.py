"""The fine-tuning stage with sharded tables, in one process and under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import TINY_FEED, built

from thawline.config import Config, parse_config
from thawline.errors import ConfigError, TrainingError
from thawline.model.bundle import Bundle, save_table
from thawline.stages import finetune, finetune_ranks


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
    overrides = ["tables.engine=sharded", *override.split()]
    with pytest.raises(ConfigError, match=named):
        train(config, dataset, table, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()
    assert not dist.is_initialized()


@pytest.fixture
def at_step(monkeypatch):
    """Calls something when training has come to a step, before its checkpoint."""

    def at_step(number, act):
        @contextmanager
        def bar(description, total):
            yield lambda done: act() if (description, done) == ("finetune", number) else None

        monkeypatch.setattr(finetune_ranks, "progress_bar", bar)

    return at_step


def kill():
    raise KeyboardInterrupt


def weights(model):
    names = ("ranker.safetensors", "tables/item.safetensors", "tables/user.safetensors")
    return {name: (model / name).read_bytes() for name in names}


def test_a_killed_run_with_sharded_tables_goes_on_to_the_same_model(
    config, dataset, table, tmp_path, at_step, monkeypatch, capfd
):
    aucs = iter([0.7, 0.6] * 2)

    def scored(*arguments):
        return {"next": {"pooled": {"save": {"auc": next(aucs)}}}}

    monkeypatch.setattr(finetune_ranks, "epoch_metrics", scored)
    changes = ["tables.engine=sharded", "finetune.export=best", "finetune.recipe=co-train"]
    changes += ["finetune.checkpoint.every_steps=1", "finetune.checkpoint.keep=1"]
    _, whole = train(config, dataset, table, tmp_path / "whole", *changes)
    per_epoch = json.loads((tmp_path / "whole" / "epochs.json").read_text())[0]["steps"]
    at_step(per_epoch + 2, kill)
    with pytest.raises(KeyboardInterrupt):
        train(config, dataset, table, tmp_path / "broken", *changes)
    left = [path.name for path in sorted(tmp_path.glob("broken.checkpoints/*/epoch-*"))]
    # The best epoch's, and the last.
    assert left == ["epoch-001.00000000", f"epoch-{1 + 1 / per_epoch:012.8f}"]
    at_step(-1, kill)

    epochs, again = train(config, dataset, table, tmp_path / "broken", *changes)

    assert f"goes on after step {per_epoch + 1}, from" in capfd.readouterr().err
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert [each["steps"] for each in epochs] == [per_epoch] * 2
    assert (again.meta.export, again.meta.exported_epoch) == ("best", 1)
    assert whole.meta == again.meta
    assert not (tmp_path / "broken.checkpoints").exists()


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(config, dataset, table, tmp_path):
    changes = ["finetune.learning_rate=1e12", "finetune.checkpoint.every_steps=1"]
    with pytest.raises(
        TrainingError, match=r"at step \d+ \(epoch 0\).* request ids: \d+"
    ) as caught:
        train(config, dataset, table, tmp_path / "m", "tables.engine=sharded", *changes)
    last = max(tmp_path.glob("m.checkpoints/*/epoch-*"))
    assert caught.value.what.endswith(f"the last good checkpoint is {last}")


def start_torchrun(config, dataset, table, out, tmp_path, *overrides, restarts=0):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "--max-restarts", str(restarts)]
    command += ["-m", "thawline", "finetune", "--config", str(path)]
    command += ["--dataset", str(dataset.root), "--table", str(table), "--model", str(out)]
    command += [part for each in overrides for part in ("--set", each)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def ended(process):
    """Waits for a job; nothing of it is left then."""
    with process:
        try:
            output, errors = process.communicate(timeout=250)
        finally:
            with suppress(ProcessLookupError):  # All of them have ended, as they should.
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def torchrun(*arguments):
    return ended(start_torchrun(*arguments))


SMALL_STEPS = "finetune.batch_size=16"
EXPORTED = ("finetune.export=best", "finetune.checkpoint.every_steps=1", SMALL_STEPS)


@pytest.fixture(scope="module")
def together(config, dataset, table, tmp_path_factory):
    """What two processes made, and what they said."""
    folder = tmp_path_factory.mktemp("together")
    return folder / "model", torchrun(config, dataset, table, folder / "model", folder, *EXPORTED)


@pytest.mark.slow
def test_two_processes_of_torchrun_train_one_model(config, dataset, table, tmp_path, together):
    path, done = together

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model:") == 1
    train(config, dataset, table, tmp_path / "local", SMALL_STEPS)
    assert files(path) == files(tmp_path / "local")
    epochs, expected = (
        json.loads((folder / "epochs.json").read_text()) for folder in (path, tmp_path / "local")
    )
    assert [epoch["steps"] for epoch in epochs] == [-(-epoch["steps"] // 2) for epoch in expected]
    assert [epoch["requests"] for epoch in epochs] == [epoch["requests"] for epoch in expected]
    assert epochs[0]["drift"]["item"]["head"] == 0 < epochs[1]["drift"]["item"]["head"]
    model = Bundle.load(path)
    assert all(torch.isfinite(rows).all() for rows in model.weights.values())
    assert not model.weights["item"][0].any()
    aucs = [epoch["metrics"]["next"]["pooled"]["save"]["auc"] for epoch in epochs]
    assert model.meta.exported_epoch == 1 + aucs.index(max(aucs))


def await_checkpoint(job, folder, after=0.0):
    """How many epochs were done at a checkpoint later than `after`."""
    while True:
        assert job.poll() is None, job.stderr.read()
        found = [float(path.name[6:]) for path in folder.glob("model.checkpoints/*/epoch-*")]
        if max(found, default=0) > after:
            return max(found)
        time.sleep(0.01)


def kill_a_worker(job):
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.slow
def test_a_job_goes_on_after_sigterm_when_called_again_and_by_itself_after_a_kill(
    config, dataset, table, tmp_path, together
):
    path, _ = together
    arguments = (config, dataset, table, tmp_path / "model", tmp_path, *EXPORTED)
    job = start_torchrun(*arguments)
    await_checkpoint(job, tmp_path)
    job.send_signal(signal.SIGTERM)
    # torchrun's own answer to a signal.
    assert ended(job).returncode == 1
    assert not (tmp_path / "model").exists()
    (last, *_) = sorted(tmp_path.glob("model.checkpoints/*/epoch-*"), reverse=True)

    job = start_torchrun(*arguments, restarts=1)
    await_checkpoint(job, tmp_path, after=float(last.name[6:]))
    kill_a_worker(job)
    done = ended(job)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("goes on after step") == 2
    assert weights(tmp_path / "model") == weights(path)


@pytest.mark.slow
def test_processes_with_a_table_each_are_refused(config, dataset, table, tmp_path):
    done = torchrun(config, dataset, table, tmp_path / "model", tmp_path, "tables.engine=local")

    assert done.returncode != 0
    assert "tables.engine is local, and 2 processes train together" in " ".join(done.stderr.split())
