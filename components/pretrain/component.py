"""Pretrains the item table on the users' sequences."""

from kfp import dsl

from components.factory import component


@component
def pretrain(
    config: str,
    data_version: str,
    code_version: str,
    dataset: dsl.Input[dsl.Dataset],
    table: dsl.Output[dsl.Model],
) -> None:
    """Pretrains the item table on the users' sequences.

    Args:
        config: The resolved config, as YAML text: `pretrain_config` of `start`.
        data_version: Version of the dataset; not read, it is part of the cache's key, which holds
            an artifact's name and not what is in it.
        code_version: What the stages run; not read, it is part of the cache's key.
        dataset: The dataset folder of `windows`.

    Returns:
        table: The table folder: the pretrained rows and `table.json`.
    """
    from thawline.stages import pretrain as stage
    from thawline.stages.facts import size_of
    from thawline.stages.task import read_config
    from thawline.tracking import pipeline

    parsed = read_config(config)
    facts = stage.run(parsed, dataset.path, table.path, parent_run_id=pipeline.find_parent(parsed))
    table.metadata["data_version"] = data_version
    table.metadata["rows"] = facts["num_rows"]
    table.metadata["dim"] = facts["dim"]
    table.metadata["epochs"] = len(facts["epochs"])
    recall = f"recall@{parsed.pretrain.recall_at}"
    if facts["epochs"] and facts["epochs"][-1][recall] is not None:
        table.metadata[recall] = facts["epochs"][-1][recall]
    table.metadata.update(size_of(table.path))
