"""Compiles the pipelines to the YAML that Kubeflow takes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kfp import compiler

from pipelines import retrain
from pipelines.ir import Compiled, dangling
from pipelines.profiles import Profile
from thawline.errors import ThawlineError


def compile_text(profile: Profile) -> str:
    """The compiled retraining pipeline for a profile.

    Raises:
        ThawlineError: kfp compiled it to a file with a reference that leads nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "retrain.yaml"
        compiler.Compiler().compile(retrain.build(profile), str(path))
        text = path.read_text(encoding="utf-8")
    problems = dangling(Compiled.parse(text))
    if problems:
        raise ThawlineError(
            "the compiled pipeline has references that lead nowhere:\n  " + "\n  ".join(problems),
            "take resources from a constant and not from a pipeline input",
        )
    return text
