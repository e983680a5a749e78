"""One Kubeflow component a stage: thin wrappers around `thawline.stages`.

Only a component's function travels to the cluster, as text, so its imports sit inside it.
"""

from components.evaluate import evaluate
from components.finetune import finetune
from components.finish import finish
from components.pretrain import pretrain
from components.register import register
from components.start import start
from components.windows import windows

COMPONENTS = (start, windows, pretrain, finetune, evaluate, register, finish)
"""Every component, in the order of the pipeline."""

__all__ = [
    "COMPONENTS",
    "evaluate",
    "finetune",
    "finish",
    "pretrain",
    "register",
    "start",
    "windows",
]
