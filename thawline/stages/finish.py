"""The last stage of a pipeline, whatever became of the others: the MLflow runs closed."""

from __future__ import annotations

from thawline.config import parse_config
from thawline.tracking import pipeline


def run(text: str, state: str) -> str:
    """Closes the parent run and what the stages left open.

    Args:
        text: The config as YAML, as the pipeline was given it.
        state: How the stages ended, in Kubeflow's words.

    Returns:
        The id of the parent run; empty where the pipeline failed before it had one.

    Raises:
        ThawlineError: The config or the tracking server cannot be used.
    """
    return pipeline.close_parent(parse_config(text), state)
