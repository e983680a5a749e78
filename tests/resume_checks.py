"""What holds for checkpoints of several processes; `test_resume_ranks` runs these."""

from __future__ import annotations

import io
import shutil
import tempfile
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_checks import alone, together
from fake_gcs import FakeGcs
from safetensors.torch import load_file, save_file
from torch import nn

from thawline.data import storage
from thawline.errors import ConfigError, DataError, TrainingError
from thawline.stages import resume
from thawline.tables.sharded import ShardedTables
from thawline.tracking.runs import Terminated
from thawline.training.checkpoint import Checkpoints
from thawline.training.distributed import Ranks
from thawline.training.loop import Accumulated
from thawline.training.mirror import Mirror

WINDOW = "window(0.5, 1)"
"""Frozen, thawed in mid-epoch and frozen in mid-epoch again."""


@contextmanager
def shared_folder(ranks):
    """A folder that all processes see; removed when all have left the block."""
    name = [tempfile.mkdtemp() if ranks.leads else ""]
    dist.broadcast_object_list(name, dist.get_global_rank(ranks.dense, 0), group=ranks.dense)
    yield Path(name[0])
    ranks.wait()
    if ranks.leads:
        shutil.rmtree(name[0])


def first_ones(ranks, count):
    """A job of the first `count` processes; None in the others."""
    dense, tables = (dist.new_group(list(range(count))) for _ in range(2))
    if ranks.rank >= count:
        return None
    return Ranks(ranks.rank, count, count, dense, tables, ranks.device)


def make(ranks, batches, **options):
    """A trainer with dropout; the first process has so many batches, the others one less."""
    torch.manual_seed(ranks.rank)
    trainer = together(ranks, [batches] + [batches - 1] * (ranks.size - 1), **options)
    for module in trainer.ranker.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return trainer


def checkpoints_of(folder, ranks, trainer, **options):
    rows = {f"table/{name}": table.own for name, table in trainer.tables.items()}
    return Checkpoints(folder, ranks=ranks, rows=rows, **options)


def require_same(first, second):
    """Rows, parameters, states of optimizers and generators."""
    assert first.parts.keys() == second.parts.keys()
    for part, named in first.parts.items():
        assert named.keys() == second.parts[part].keys()
        for name, tensor in named.items():
            assert torch.equal(tensor, second.parts[part][name]), f"{part}/{name}"


def killed_after_any_step_and_resumed_a_job_ends_with_the_same_bits(ranks):
    cases = {
        "prefetch": {"recipe": WINDOW, "staleness": 2},
        "torchrec": {"recipe": "freeze-until-last", "staleness": 1, "engine": ShardedTables},
        "fused": {"recipe": "co-train", "accumulated": Accumulated(2, fused=True)},
    }
    for options in cases.values():
        with shared_folder(ranks) as folder:
            unbroken = make(ranks, 3, **options)
            list(unbroken.epochs())
            end = unbroken.state_dict()
            checkpoints = checkpoints_of(folder, ranks, unbroken, keep=100)
            saving = make(ranks, 3, **options)
            saving.on_step = partial(save_now, saving, checkpoints)
            list(saving.epochs())
            require_same(saving.state_dict(), end)
            assert len(checkpoints.saved()) == 6
            for epochs in checkpoints.saved():
                resumed = make(ranks, 3, **options)
                torch.manual_seed(99)
                resumed.load_state_dict(checkpoints.load(epochs).state)
                list(resumed.epochs())
                require_same(resumed.state_dict(), end)


def save_now(trainer, checkpoints, step, steps):
    checkpoints.save(trainer.state_dict(), [])


def tables_of(trainer):
    """Rows, state and open rows of each table, whole, in every process of the trainer's job."""
    group, found = trainer.sums.ranks.dense, {}
    for name, table in trainer.tables.items():
        state = table.state_dict()
        found[name, "open"] = state["open"].clone()
        for key in ("weight", "optimizer.accumulator"):
            pieces = [None] * dist.get_world_size(group)
            dist.all_gather_object(pieces, state[key], group=group)
            found[name, key] = torch.cat(pieces)
    return found


def save_and_stop(trainer, checkpoints, after):
    """Trains up to a step, and saves then."""

    def on_step(step, steps):
        if step == after:
            checkpoints.save(trainer.state_dict(), [{"epoch": 0}])
            raise KeyboardInterrupt

    trainer.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        list(trainer.epochs())


def another_number_of_processes_goes_on_from_the_same_tables(ranks):
    half = first_ones(ranks, max(1, ranks.size // 2))
    options = {"recipe": "window(0.25, 1)", "staleness": 1}
    with shared_folder(ranks) as folder:
        for turn, (before, after) in enumerate([(ranks, half), (half, ranks)]):
            place, saved, other = folder / str(turn), None, None
            if before is not None:
                own = make(before, 4, **options)
                # After the thaw, in mid-epoch, with a lookup in flight.
                save_and_stop(own, checkpoints_of(place, before, own), after=2)
                saved = tables_of(own)
            ranks.wait()
            if after is not None:
                other = make(after, 7, **options)
                found = checkpoints_of(place, after, other).load_last()
                other.load_state_dict(found.state)
                loaded = tables_of(other)
                assert all(torch.equal(loaded[key], own) for key, own in (saved or {}).items())
                # Half an epoch, rounded up to a step.
                assert (other.step, other.epoch) == (4, 0)
                assert found.epochs == [{"epoch": 0}]
                assert [each.epoch for each in other.epochs()] == [0, 1]
                moved = tables_of(other)
                assert not torch.equal(moved["item", "weight"], loaded["item", "weight"])
                assert all(torch.isfinite(own).all() for own in moved.values())


def a_process_alone_and_a_job_read_each_other_s_checkpoints(ranks):
    with shared_folder(ranks) as folder:
        own = make(ranks, 4, recipe="co-train")
        save_and_stop(own, checkpoints_of(folder / "job", ranks, own), after=3)
        saved, local = tables_of(own), alone([4] * ranks.size, recipe="co-train")
        local.load_state_dict(Checkpoints(folder / "job").load_last().state)
        for name, table in local.tables.items():
            state = table.state_dict()
            assert torch.equal(state["weight"], saved[name, "weight"])
            assert torch.equal(state["optimizer.accumulator"], saved[name, "optimizer.accumulator"])
            assert table.trainable
        ranks.wait()
        if ranks.leads:
            save_and_stop(local, Checkpoints(folder / "alone"), after=4)
        ranks.wait()
        other = make(ranks, 4, recipe="co-train")
        # The generator that rounds bfloat16 has nothing to do in a job.
        other.load_state_dict(checkpoints_of(folder / "alone", ranks, other).load_last().state)
        loaded = tables_of(other)
        if ranks.leads:
            for name, table in local.tables.items():
                state = table.state_dict()
                for key in ("weight", "optimizer.accumulator"):
                    assert torch.equal(loaded[name, key], state[key])
        assert other.step == 4
        list(other.epochs())


def gradients_that_wait_are_summed_for_another_number_of_processes(ranks):
    with shared_folder(ranks) as folder:
        options = {"recipe": "co-train", "accumulated": Accumulated(3, fused=True)}
        own = make(ranks, 4, **options)
        save_and_stop(own, checkpoints_of(folder, ranks, own), after=2)
        waiting = {name: grad.clone() for name, grad in own.network.gradients().items()}
        for grad in waiting.values():
            dist.all_reduce(grad, group=ranks.dense)
        if ranks.size > 1:
            found = Checkpoints(folder).load_last().state
            assert waiting.keys() == found.parts["gradients"].keys() != set()
            for name, grad in found.parts["gradients"].items():
                torch.testing.assert_close(grad, waiting[name], rtol=0, atol=1e-6)
            assert not any(name.startswith("in_flight") for name in found.parts)


def rows_that_are_in_no_file_are_missed(ranks):
    with shared_folder(ranks) as folder:
        own = make(ranks, 2)
        save_and_stop(own, checkpoints_of(folder, ranks, own), after=1)
        if ranks.leads and ranks.size > 1:
            last = max(folder.rglob("*.safetensors"))
            tensors = load_file(last)
            # As of a file that another job left there: the rows before it are in none.
            tensors["table/item/start"] += 1
            save_file(tensors, last)
            rows = {"table/item": slice(0, own.tables["item"].num_rows)}
            with pytest.raises(DataError, match="of table/item are in no file of the checkpoint"):
                Checkpoints(folder, rows=rows).load_last()
            last.unlink()
            with pytest.raises(DataError, match="cannot be read"):
                Checkpoints(folder).load_last()


def sigterm_in_one_process_stops_all_after_the_same_step(ranks):
    with shared_folder(ranks) as folder:
        own = make(ranks, 4, staleness=1)
        checkpoints, termination = checkpoints_of(folder, ranks, own), resume.Termination()
        own.sums.asked_to_stop = lambda: termination.requested
        keeper = resume.Keeper(own, checkpoints, termination, every_steps=0, epochs=[])

        def after_step(step, steps):
            keeper.after_step()
            # Too late for this step's sums: the next step's tell the others.
            termination.requested = step == 2 and ranks.rank == ranks.size - 1

        own.on_step = after_step
        with pytest.raises(Terminated) as caught:
            list(own.epochs())
        assert caught.value.code == 143
        assert own.step == 3
        assert checkpoints.saved() == [0.75]


def a_loss_that_is_not_finite_stops_every_process_at_the_same_step(ranks):
    own, steps = make(ranks, 4, staleness=1), []
    own.on_step = lambda step, steps_of_run: steps.append(step)
    if not ranks.leads:
        # One process's request; the others see it in the sum of the losses.
        own.reader.reader.batches[1].candidate_log_q[:] = float("nan")
        own.reader.reader.batches[1].history_age[:] = float("nan")
    ids = own.reader.reader.batches[1].request_id[:5].tolist()
    words = rf"became nan at step 1 \(epoch 0\); the batch's first request ids: {ids}"
    with pytest.raises(TrainingError, match=words.replace("[", "").replace("]", "")):
        list(own.epochs())
    assert steps == [1]


def an_error_in_one_process_is_one_in_all(ranks):
    last, said = ranks.rank == ranks.size - 1, io.StringIO()
    failed = pytest.raises((ZeroDivisionError, TrainingError))
    with redirect_stderr(said), failed as caught, ranks.agreed():
        assert not last or 1 / 0
    # The others end without it, and may end this process before it has.
    expected = f"process {ranks.rank} of the job failed: division by zero" if last else ""
    assert said.getvalue().strip() == expected
    assert caught.type is (ZeroDivisionError if last else TrainingError)
    assert ranks.first(ranks.rank + 5) == 5

    with shared_folder(ranks) as folder:
        own = make(ranks, 2)
        if last:
            own.tables["item"].local[-1] = float("nan")
        words = "table/item holds NaN" if last else "another process of the job failed"
        with pytest.raises(TrainingError, match=words):
            checkpoints_of(folder, ranks, own).save(own.state_dict(), [])
        assert not list(folder.glob("*"))


def machines_without_a_common_folder_need_a_url(ranks):
    with shared_folder(ranks) as folder, pytest.MonkeyPatch.context() as patch:
        own = make(ranks, 2)
        here = folder / f"machine {ranks.rank}"
        apart = replace(ranks, local_size=1)
        if ranks.size > 1:
            with pytest.raises((DataError, TrainingError)) as caught:
                save_and_stop(own, checkpoints_of(here, apart, own), after=1)
            assert "into one" in str(caught.value) or not ranks.leads
            here.mkdir(exist_ok=True)
            with pytest.raises((ConfigError, TrainingError)):
                resume.require_shared(here, apart)
        patch.setattr(storage, "GOOGLE_SECONDS", 2)
        with FakeGcs() if ranks.leads else nullcontext() as server:
            place = [(server.url, server.credentials()) if ranks.leads else ()]
            dist.broadcast_object_list(place, group=ranks.dense)
            secret = folder / f"secret {ranks.rank}"
            secret.write_text(place[0][1])
            patch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", place[0][0])
            patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(secret))
            mirror = Mirror("gs://volume/runs")
            checkpoints = checkpoints_of(here, apart, own, mirror=mirror)
            checkpoints.save(own.state_dict(), [])
            assert checkpoints.name_of_last() == "gs://volume/runs/epoch-000.50000000"
            other = make(ranks, 2)
            other.load_state_dict(checkpoints.load_last().state)
            require_same(other.state_dict(), own.state_dict())
            ranks.wait()
