"""Registers a model that passed the gate."""

from kfp import dsl

from components.factory import component


@component
def register(
    config: str,
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
) -> None:
    """Registers a model that passed the gate.

    Args:
        config: The resolved config, as YAML text.
        model: The model folder of `finetune`.
        evaluation: The evaluation folder of `evaluate`.

    Returns:
        registration: A folder with `registration.json`: name, version and alias in the registry.
    """
    from thawline.config import parse_config
    from thawline.stages import register as stage
    from thawline.tracking import pipeline

    parsed = parse_config(config)
    registered = stage.run(
        parsed,
        model.path,
        evaluation.path,
        registration.path,
        parent_run_id=pipeline.find_parent(parsed),
    )
    registration.metadata["name"] = registered.name
    registration.metadata["version"] = str(registered.version)
    registration.metadata["alias"] = registered.alias
