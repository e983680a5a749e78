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
    trainjob: str = "",
) -> None:
    """Fine-tunes the ranker and the table by the recipe.

    Args:
        config: The resolved config, as YAML text: `finetune_config` of `start`.
        data_version: Version of the dataset; not read, it is part of the cache's key, which holds
            an artifact's name and not what is in it.
        code_version: What the stages run; not read, it is part of the cache's key.
        dataset: The dataset folder of `windows`.
        table: The table folder of `pretrain`.
        trainjob: A TrainJob that does it on several nodes, as JSON made from the profile; empty: it
            is done in this task.

    Returns:
        model: The model folder: the network, its table, the catalog and `epochs.json`.
    """
    from thawline.stages.facts import model_facts
    from thawline.stages.finetune import run
    from thawline.stages.task import read_config
    from thawline.tracking import pipeline

    parsed = read_config(config)
    parent = pipeline.find_parent(parsed)
    if trainjob:
        from thawline.stages.trainjob.stage import run_on_nodes

        epochs = run_on_nodes(
            parsed, dataset.path, table.path, model.path, trainjob, parent_run_id=parent
        )
    else:
        epochs = run(parsed, dataset.path, table.path, model.path, parent_run_id=parent)
    model.metadata.update(model_facts(parsed, model.path, epochs))
