"""Compiles the pipelines to the YAML that Kubeflow takes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp import compiler

from pipelines import retrain, study
from pipelines.ir import Compiled, dangling
from pipelines.profiles import Profile
from thawline.errors import ThawlineError

PIPELINES: dict[str, Callable[[Profile], Any]] = {"retrain": retrain.build, "study": study.build}


def compile_text(profile: Profile, pipeline: str = "retrain") -> str:
    """A compiled pipeline for a profile.

    Args:
        profile: Bound to its tasks.
        pipeline: One of `PIPELINES`.

    Raises:
        ThawlineError: kfp compiled it to a file with a reference that leads nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(PIPELINES[pipeline](profile), str(path))
        text = path.read_text(encoding="utf-8")
    problems = dangling(Compiled.parse(text))
    if problems:
        raise ThawlineError(
            "the compiled pipeline has references that lead nowhere:\n  " + "\n  ".join(problems),
            "take resources from a constant and not from a pipeline input",
        )
    return text
