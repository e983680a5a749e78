"""Closes the pipeline's MLflow runs, whatever happened to the stages."""

from kfp import dsl

from components.factory import component


@component
def finish(config: str, status: dsl.PipelineTaskFinalStatus) -> None:
    """Closes the pipeline's MLflow runs, whatever happened to the stages.

    Args:
        config: The config as it was given to the pipeline: an exit task cannot take the outputs
            of other tasks.
        status: How the stages ended, given by Kubeflow.
    """
    from thawline.stages import finish as stage

    stage.run(config, status.state)
