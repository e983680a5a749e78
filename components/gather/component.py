"""Gathers what the trials of one pretrained table found, without their models."""

from kfp import dsl

from components.factory import component


@component
def gather(results: dsl.Input[list[dsl.Artifact]], gathered: dsl.Output[dsl.Artifact]) -> None:
    """Gathers what the trials of one pretrained table found, without their models.

    Kubeflow collects the results of one loop alone, and the trials are in a loop within a loop.

    Args:
        results: The folders of `trial`.

    Returns:
        gathered: A folder with one of each trial.
    """
    from thawline.stages.study_files import gather as copy

    count = copy([result.path for result in results], gathered.path)
    gathered.metadata["trials"] = count
