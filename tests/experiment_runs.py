"""Experiments that run on the tiny feed, each trial in this process."""

import yaml
from conftest import TINY_FEED

from thawline.config import parse_config
from thawline.stages import study_trial
from thawline.stages.study_files import read_result, write_result, write_task

SMALL = {
    "model": {"dim": 8, "layers": 1, "ffn": 16, "mlp": [16], "cross_layers": 1},
    "pretrain": {"epochs": 1},
    "finetune": {"epochs": 2, "batch_size": 64},
    "evaluation": {"epoch_requests": 20},
    "study": {"seeds": [0], "share_prefix": False},
}


def in_process(job, stop):
    """Runs a trial here, as its own process would."""
    write_task(job.folder, job.task, job.config)
    study_trial.main(job.folder)
    return read_result(job.folder)


def made_up(job, stop):
    """Runs nothing: the trial has found an AUC of 0.7."""
    figures = {"click": {"auc": 0.7}}
    tree = {"next": {"requests": 5, "pooled": figures, "tiers": {}}}
    result = job.task.result(
        "finished",
        seconds=1.0,
        exported_epoch=1,
        actions=["click"],
        data_version="v",
        schedule=None,
        epochs=[tree],
        metrics=tree,
    )
    job.folder.mkdir(parents=True, exist_ok=True)
    write_result(job.folder, result)
    return result


def small_config(workdir, **sections):
    """A config with which a trial takes a second or two."""
    tree = TINY_FEED | SMALL | {"workdir": str(workdir)} | sections
    return parse_config(yaml.safe_dump(tree))
