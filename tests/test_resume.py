"""Fine-tuning that is stopped and called again: the stage, and the command in a process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from conftest import TINY_FEED
from fake_gcs import FakeGcs
from pydantic import ValidationError

from thawline.config import Config
from thawline.data import storage
from thawline.errors import BusyError, DataError, TrainingError
from thawline.folders import locked_folder
from thawline.model.bundle import read_meta, save_table
from thawline.stages import finetune, resume
from thawline.stages.resume import inputs_key
from thawline.tracking.runs import Terminated

STEPS = 5
"""Of an epoch."""


@pytest.fixture(scope="module")
def table(tiny_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tiny_dataset.catalog.num_rows, 8, generator=generator)
    save_table(folder / "item.safetensors", rows)
    return folder


def configured(workdir, *, checkpoint=None, evaluation=None, **options):
    tree = {
        **TINY_FEED,
        "workdir": str(workdir),
        "model": {"dim": 8, "ffn": 16, "mlp": [16], "layers": 1, "dropout": 0.1},
        "finetune": {
            "epochs": 2,
            "batch_size": 64,
            "checkpoint": {"every_steps": 2, **(checkpoint or {})},
            **options,
        },
        "evaluation": {"epoch_requests": 100, **(evaluation or {})},
    }
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """With the runs' database."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def run(tiny_dataset, table, workdir, tmp_path):
    def run(name, **options):
        config = configured(workdir, **options)
        epochs = finetune.run(config, tiny_dataset.root, table, tmp_path / name)
        return tmp_path / name, epochs

    return run


@pytest.fixture
def at_step(monkeypatch):
    """Calls something when training has come to a step, before its checkpoint."""

    def at_step(number, act):
        @contextmanager
        def bar(description, total):
            yield lambda done: act() if (description, done) == ("finetune", number) else None

        monkeypatch.setattr(finetune, "progress_bar", bar)

    return at_step


@pytest.fixture(scope="module")
def unbroken(tiny_dataset, table, workdir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    epochs = finetune.run(configured(workdir), tiny_dataset.root, table, folder / "m")
    return folder / "m", epochs


def kill():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def weights(model):
    names = ("ranker.safetensors", "tables/item.safetensors", "model.json")
    return {name: (model / name).read_bytes() for name in names}


def untimed(epochs):
    timed = {"seconds", "waiting", "phases"}
    return [{name: own for name, own in each.items() if name not in timed} for each in epochs]


def require_same(made, expected):
    (model, epochs), (other, other_epochs) = made, expected
    assert weights(model) == weights(other)
    assert untimed(epochs) == untimed(other_epochs)
    assert not model.with_name(f"{model.name}.checkpoints").exists()


@pytest.mark.parametrize(
    ("killed", "goes_on"), [(3, 2), (STEPS, 4), (STEPS + 1, STEPS), (2 * STEPS, 8)]
)
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_model(
    run, at_step, unbroken, capfd, killed, goes_on
):
    at_step(killed, kill)
    with pytest.raises(KeyboardInterrupt):
        run("m")
    at_step(-1, kill)

    made = run("m")

    require_same(made, unbroken)
    assert f"goes on after step {goes_on}, from" in capfd.readouterr().err


def test_sigterm_saves_after_the_present_step_and_ends_with_143(
    run, at_step, unbroken, tmp_path, capfd
):
    at_step(3, terminate)
    with pytest.raises(Terminated) as caught:
        run("m")
    assert caught.value.code == 143
    assert sorted(path.name for path in tmp_path.glob("m.checkpoints/*/epoch-*")) == [
        "epoch-000.40000000",
        "epoch-000.60000000",
    ]
    at_step(-1, kill)

    require_same(run("m"), unbroken)
    assert "goes on after step 3" in capfd.readouterr().err


def test_a_run_that_is_killed_in_an_evaluation_repeats_it(run, unbroken, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "epoch_metrics", lambda *arguments: terminate())
        with pytest.raises(Terminated):
            run("m")

    require_same(run("m"), unbroken)


def test_another_config_starts_anew_and_leaves_no_checkpoint_behind(run, at_step, tmp_path, capfd):
    at_step(3, kill)
    with pytest.raises(KeyboardInterrupt):
        run("m", learning_rate=0.002)
    assert list(tmp_path.glob("m.checkpoints/*/epoch-*"))
    at_step(-1, kill)

    run("m", learning_rate=0.003)

    assert "goes on" not in capfd.readouterr().err
    assert not (tmp_path / "m.checkpoints").exists()


def test_what_decides_the_bits_decides_the_key(tiny_dataset, table, tmp_path, monkeypatch):
    def key(folder=table, **options):
        return inputs_key(configured(tmp_path, **options), tiny_dataset, folder)

    same = [{}, {"checkpoint": {"every_steps": 7}}, {"export": "best"}, {"prefetch_batches": 1}]
    others = [{"staleness": 0}, {"batch_size": 32}, {"recipe": "co-train"}, {"epochs": 3}]
    assert len({key(**options) for options in same}) == 1
    assert len({key(**options) for options in [{}, *others]}) == 5
    rows = torch.zeros(tiny_dataset.catalog.num_rows, 8)
    save_table(tmp_path / "item.safetensors", rows)
    assert key(tmp_path) != key()
    before = key()
    monkeypatch.setattr(resume, "__version__", "another")
    assert key() != before


def test_a_folder_of_choice_is_shared_by_runs(run, at_step, unbroken, tmp_path, capfd):
    shared = {"folder": str(tmp_path / "shared")}
    for name, rate in (("a", 0.001), ("b", 0.002)):
        at_step(3, kill)
        with pytest.raises(KeyboardInterrupt):
            run(name, checkpoint=shared, learning_rate=rate)
    at_step(-1, kill)

    require_same(run("elsewhere", checkpoint=shared), unbroken)

    assert "goes on after step 2" in capfd.readouterr().err
    (left,) = (tmp_path / "shared").iterdir()
    assert [path.name for path in left.iterdir()] == ["epoch-000.40000000"]


def test_two_runs_with_the_same_checkpoints_do_not_mix(run, tiny_dataset, table, tmp_path):
    key = inputs_key(configured(tmp_path), tiny_dataset, table)
    with locked_folder(tmp_path / "m.checkpoints" / key), pytest.raises(BusyError):
        run("m")


def test_a_run_with_another_config_that_is_under_way_keeps_its_checkpoints(run, tmp_path):
    with locked_folder(tmp_path / "m.checkpoints" / "another"):
        (tmp_path / "m.checkpoints" / "another" / "epoch-001.00000000").mkdir()
        run("m")
        assert [path.name for path in tmp_path.glob("m.checkpoints/*/*")] == ["epoch-001.00000000"]


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(run, tmp_path):
    with pytest.raises(TrainingError) as caught:
        run("m", learning_rate=1e12, recipe="frozen", checkpoint={"every_steps": 1})

    (named,) = re.findall(r"the last good checkpoint is (.*)", caught.value.what)
    steps = sorted(tmp_path.glob("m.checkpoints/*/epoch-*"))
    assert named == str(steps[-1])


def test_the_best_epoch_is_exported_where_that_is_asked_for(run, unbroken, monkeypatch, tmp_path):
    aucs = iter([0.7, 0.6])

    def scored(*arguments):
        return {"next": {"pooled": {"save": {"auc": next(aucs)}}}}

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "epoch_metrics", scored)
        best, _ = run("best", export="best", checkpoint={"every_steps": 1, "keep": 1})
    whole, _ = run("first", epochs=1, recipe="frozen")

    meta = read_meta(best / "model.json")
    assert (meta.export, meta.exported_epoch, meta.epochs) == ("best", 1, 2)
    for name in ("ranker.safetensors", "tables/item.safetensors"):
        assert (best / name).read_bytes() == (whole / name).read_bytes()
    last = read_meta(unbroken[0] / "model.json")
    assert (last.export, last.exported_epoch) == ("last", 2)


def test_the_best_epoch_needs_a_score(run, tmp_path, monkeypatch):
    with pytest.raises(ValidationError, match=r"evaluation\.epoch_requests is 0"):
        configured(tmp_path, export="best", evaluation={"epoch_requests": 0})
    none = {"next": {"pooled": {"save": {"auc": None}}}}
    monkeypatch.setattr(finetune, "epoch_metrics", lambda *arguments: none)
    with pytest.raises(DataError, match="next has no AUC of save"):
        run("m", export="best")


def test_checkpoints_at_a_url_outlive_the_machine(
    run, at_step, unbroken, tmp_path, monkeypatch, capfd
):
    with FakeGcs() as server:
        (tmp_path / "secret").write_text(server.credentials(), encoding="utf-8")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "secret"))
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", server.url)
        monkeypatch.setattr(storage, "GOOGLE_SECONDS", 2)
        remote = {"folder": "gs://volume/runs", "keep": 1}
        at_step(STEPS + 2, kill)
        with pytest.raises(KeyboardInterrupt):
            run("first machine", checkpoint=remote)
        names = {name.rsplit("/", 1)[0][-18:] for _, name in server.objects}
        assert names == {
            "epoch-001.20000000",
            "epoch-001.00000000",
        }  # The last, and the best epoch's.
        at_step(-1, kill)

        require_same(run("second machine", checkpoint=remote), unbroken)

        assert "goes on after step 6, from gs://volume/runs/" in capfd.readouterr().err
        assert not server.objects
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["replay", "fresh"])
def test_a_run_whose_epochs_show_a_part_goes_on_within_it(run, at_step, tiny_dataset, examples):
    expected = run("unbroken", examples=examples, batch_size=32)
    part = tiny_dataset.manifest.requests["train"] // 2
    assert [epoch["requests"] for epoch in expected[1]] == [part, part]
    steps = -(-part // 32)
    at_step(steps + 3, kill)
    with pytest.raises(KeyboardInterrupt):
        run("m", examples=examples, batch_size=32)
    at_step(-1, kill)

    require_same(run("m", examples=examples, batch_size=32), expected)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_gets_a_signal_goes_on_when_the_command_is_called_again(
    tiny_dataset, table, tmp_path, sign
):
    config = configured(tmp_path, epochs=12, batch_size=16, evaluation={"epoch_requests": 0})
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))

    def start(name):
        arguments = ("finetune", "--config", tmp_path / "config.json")
        folders = ("--dataset", tiny_dataset.root, "--table", table, "--model", tmp_path / name)
        return subprocess.Popen(
            [sys.executable, "-m", "thawline", *arguments, *folders],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    broken = start("broken")
    while not list(tmp_path.glob("broken.checkpoints/*/epoch-*")):
        assert broken.poll() is None, broken.stderr.read()
        time.sleep(0.01)
    broken.send_signal(sign)
    broken.communicate(timeout=120)
    assert broken.returncode == (143 if sign == signal.SIGTERM else -signal.SIGKILL)
    assert not (tmp_path / "broken").exists()
    assert list(tmp_path.glob("broken.checkpoints/*/epoch-*"))

    again, whole = start("broken"), start("whole")
    _, said = again.communicate(timeout=300)
    whole.communicate(timeout=300)

    assert (again.returncode, whole.returncode) == (0, 0)
    assert "goes on after step" in said
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
