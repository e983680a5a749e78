"""Fine-tunes the ranker and the table by the recipe."""

from kfp import dsl

from components.factory import component


@component
def finetune(
    config: str,
    data_version: str,
    code_version: str,
    dataset: dsl.Input[dsl.Dataset],
    table: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
) -> None:
    """Fine-tunes the ranker and the table by the recipe.

    Args:
        config: The resolved config, as YAML text.
        data_version: Version of the dataset; not read, it is part of the cache's key, which holds
            an artifact's name and not what is in it.
        code_version: What the stages run; not read, it is part of the cache's key.
        dataset: The dataset folder of `windows`.
        table: The table folder of `pretrain`.

    Returns:
        model: The model folder: the network, its table, the catalog and `epochs.json`.
    """
    from thawline.config import parse_config
    from thawline.stages import finetune as stage
    from thawline.tracking import pipeline

    parsed = parse_config(config)
    epochs = stage.run(
        parsed,
        dataset.path,
        table.path,
        model.path,
        parent_run_id=pipeline.find_parent(parsed),
    )
    model.metadata["data_version"] = data_version
    model.metadata["recipe"] = parsed.finetune.recipe
    model.metadata["epochs"] = len(epochs)
    model.metadata["seed"] = parsed.seed
