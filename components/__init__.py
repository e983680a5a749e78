"""One Kubeflow component a stage: thin wrappers around `thawline.stages`.

Only a component's function travels to the cluster, as text, so its imports sit inside it.
"""

from components.arms import arms
from components.design import design
from components.evaluate import evaluate
from components.finetune import finetune
from components.finish import finish
from components.gather import gather
from components.pretrain import pretrain
from components.register import register
from components.start import start
from components.study import study
from components.trial import trial
from components.windows import windows

COMPONENTS = (
    *(start, windows, pretrain, finetune, evaluate, register, finish),
    *(design, arms, trial, gather, study),
)
"""Every component, in the order of the pipelines `retrain` and `study`."""

__all__ = [
    "COMPONENTS",
    "arms",
    "design",
    "evaluate",
    "finetune",
    "finish",
    "gather",
    "pretrain",
    "register",
    "start",
    "study",
    "trial",
    "windows",
]
