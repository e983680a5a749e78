"""Chrome traces of training steps."""

import json

import pytest
from test_training import make_trainer

from thawline.training.clock import PHASES
from thawline.training.profile import profiled


def traced(folder, **options):
    """Steps of each phase in the trace of each epoch."""
    trainer = make_trainer(**options)
    with profiled(folder, trainer.schedule.epochs, trainer.steps_per_epoch) as after_step:
        trainer.on_step = lambda step, steps: after_step(step)
        for _ in trainer.epochs():
            pass
    return {file.name: ranges(file) for file in folder.iterdir()}


def ranges(file):
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {phase: names.count(phase) for phase in PHASES}


@pytest.mark.parametrize(("batches", "recorded"), [(1, 1), (3, 3), (5, 2), (10, 5)])
def test_a_trace_of_each_epoch_names_the_phases_of_its_recorded_steps(tmp_path, batches, recorded):
    found = traced(tmp_path, epochs=2, batches=batches, recipe="freeze-until-last")

    assert sorted(found) == ["epoch-1.json", "epoch-2.json"]
    for steps in found.values():
        for phase in ("backward", "update", "optimizer", "rows"):
            assert steps[phase] == recorded
        assert min(steps.values()) > 0


def test_nothing_is_recorded_without_a_folder(tmp_path):
    with profiled(None, 2, 4) as after_step:
        after_step(1)

    assert list(tmp_path.iterdir()) == []
