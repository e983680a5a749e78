"""Runs one trial of a study: fine-tunes an arm with a seed and evaluates it on the hold-outs."""

from kfp import dsl

from components.factory import component


@component
def trial(
    config: str,
    which: str,
    data_version: str,
    code_version: str,
    dataset: dsl.Input[dsl.Dataset],
    table: dsl.Input[dsl.Model],
    result: dsl.Output[dsl.Artifact],
) -> None:
    """Runs one trial of a study: fine-tunes an arm with a seed and evaluates it on the hold-outs.

    A trial that its config or the data lets fail (a loss that is not finite, for one) is a result
    too: the task succeeds, so that the other trials go on, and the report names the error.

    Args:
        config: The resolved config, as YAML text.
        which: The trial: one of what `arms` lists.
        data_version: Version of the dataset.
        code_version: What the stages run; not read, it is part of the cache's key.
        dataset: The dataset folder of `windows`.
        table: The table folder of `pretrain`.

    Returns:
        result: A folder with `trial.json`, the evaluation's page and, with `study.keep_models`, the
            model.
    """
    from thawline.stages import study_tasks

    found = study_tasks.trial(config, which, dataset.path, table.path, result.path, data_version)
    for name in ("trial", "arm", "seed", "status"):
        result.metadata[name] = found[name]
