"""The training loss within an epoch, part by part."""

import pytest
import torch
from tensors import ListReader, make_batch, make_ranker, make_weight

from thawline.tables import LocalTable
from thawline.training import course
from thawline.training.components import TrainedTable
from thawline.training.loop import Trainer
from thawline.training.schedule import Plan, Schedule, TrainingWindow


def test_a_course_holds_the_mean_of_each_part_of_the_steps():
    found = course.begun(torch.tensor(0.0))
    for step in range(40):
        found = course.added(found, torch.tensor(float(step)), step, 40)
    # Two steps to each of 20 parts.
    assert course.means(found) == [2 * part + 0.5 for part in range(20)]


def test_fewer_steps_than_parts_leave_parts_without_a_loss():
    found = course.begun(torch.tensor(0.0))
    for step, loss in enumerate((4.0, 3.0)):
        found = course.added(found, torch.tensor(loss), step, 2)
    expected = [None] * 20
    expected[0], expected[10] = 4.0, 3.0
    assert course.means(found) == expected
    # A run that goes on with longer steps may have counted more of them.
    assert course.means(course.added(found, torch.tensor(1.0), 2, 2))[-1] == 1.0


def test_an_epoch_says_how_its_head_loss_went():
    table = LocalTable(make_weight(), learning_rate=0.05, trainable=False)
    trainer = Trainer(
        make_ranker(),
        {"item": TrainedTable(table)},
        ListReader([make_batch(seed=number) for number in range(5)]),
        Schedule(2, {"item": Plan((TrainingWindow(0, 2),))}),
        learning_rate=1e-3,
    )
    for summary in trainer.epochs():
        # Of 20 parts, every fourth holds one of the five steps.
        assert [loss is not None for loss in summary.course] == [True, False, False, False] * 5
        seen = [loss for loss in summary.course if loss is not None]
        assert sum(seen) / 5 == pytest.approx(summary.losses["head"], rel=1e-6)
