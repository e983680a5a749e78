"""Processes that are forked from one that has loaded what they need."""

import os
import signal
import subprocess
import sys
import time

import pytest

from thawline.config import parse_config
from thawline.stages import study_warm
from thawline.stages.study_warm import Warm, warmed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="trials are forked on Linux alone")

PROBE = """
import os, sys, time

LOADED_IN = os.getpid()

def main(folder):
    print("in", folder.name, "threads", os.environ["OMP_NUM_THREADS"], LOADED_IN, os.getpid())
    if folder.name == "exits":
        sys.exit(7)
    if folder.name == "fails":
        raise RuntimeError("out of luck")
    if folder.name == "waits":
        time.sleep(60)
"""


@pytest.fixture
def warm(tmp_path, monkeypatch):
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Warm(3, ["probe"])
    yield found
    found.close()


def started(warm, tmp_path, name):
    return warm.start("probe", tmp_path / name, tmp_path / f"{name}.log")


@pytest.mark.parametrize(("name", "code"), [("ends", 0), ("exits", 7), ("fails", 1)])
def test_a_forked_process_tells_how_it_ended_and_keeps_its_output(warm, tmp_path, name, code):
    (tmp_path / f"{name}.log").write_text("before\n")
    process = started(warm, tmp_path, name)
    assert process.wait(20) == process.poll() == process.returncode == code
    log = (tmp_path / f"{name}.log").read_text()
    assert log.startswith(f"before\nin {name} threads 3 ")
    assert ("RuntimeError: out of luck" in log) == (name == "fails")
    loaded_in, own = log.splitlines()[1].split()[-2:]
    assert loaded_in != own == str(process.pid)


def test_forked_processes_are_ended_one_by_one(warm, tmp_path):
    first, second = (started(warm, tmp_path, "waits") for _ in range(2))
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.05)
    assert first.poll() is None
    # In a session of its own, so that Ctrl-C does not come to it.
    assert os.getsid(first.pid) == first.pid != os.getsid(0)
    first.terminate()
    assert first.wait(20) == -signal.SIGTERM
    assert second.poll() is None
    # It outlives the process that forked it.
    warm.close()
    assert second.poll() is None
    second.kill()
    assert second.wait(20) == -signal.SIGKILL
    second.kill()


def test_a_forked_process_ends_with_the_one_that_asked_for_it(warm, tmp_path):
    process = started(warm, tmp_path, "waits")
    # As where that one is killed.
    process._connection.close()
    with pytest.raises(ProcessLookupError):  # noqa: PT012
        for _ in range(400):
            os.kill(process.pid, 0)
            time.sleep(0.05)


def test_where_nothing_can_be_forked_nothing_is_started(tmp_path):
    broken = Warm(1, ["no_such_module_at_all"])
    assert started(broken, tmp_path, "ends") is None
    broken.close()
    assert started(broken, tmp_path, "ends") is None
    assert not (tmp_path / "ends.log").exists()


def test_with_a_gpu_or_on_other_systems_nothing_is_forked(monkeypatch, tmp_path):
    cpu = parse_config("simulate: {}\nruntime: {device: cpu}")
    auto = parse_config("simulate: {}")
    with warmed(cpu, 1) as found:
        assert isinstance(found, Warm)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(study_warm, "DEVICES", tmp_path)
    with warmed(auto, 1) as found:
        assert found is None
    with warmed(cpu, 1) as found:
        assert isinstance(found, Warm)
    monkeypatch.setattr(study_warm.sys, "platform", "darwin")
    with warmed(cpu, 1) as found:
        assert found is None
