"""Resolves the config, checks the tracking server and opens the pipeline's MLflow run."""

from typing import NamedTuple

from components.factory import component


@component
def start(
    config: str,
    seed: int = -1,
    start_from_champion: bool = False,
    windows_finetune_days: int = -1,
    windows_pretrain_days: int = -1,
    pretrain_epochs: int = -1,
    finetune_recipe: str = "",
    finetune_epochs: int = -1,
    gate_min_auc: float = -1.0,
    register_model_name: str = "",
) -> NamedTuple(  # type: ignore[valid-type]
    "Started",
    [
        ("config", str),
        ("parent_run_id", str),
        ("source_version", str),
        ("code_version", str),
        ("windows_config", str),
        ("pretrain_config", str),
        ("finetune_config", str),
    ],
):
    """Resolves the config, checks the tracking server and opens the pipeline's MLflow run.

    Whatever can be refused before hours of training is refused here: an unknown key, a value out
    of range, a tracking server that does not answer, a model name that MLflow cannot store.

    Args:
        config: The config, as YAML text.
        seed: `seed`; -1 leaves it as in the config.
        start_from_champion: Sets `windows.previous` and `pretrain.start_from` to the registered
            champion, where there is one; false leaves them as in the config.
        windows_finetune_days: `windows.finetune_days`; -1 leaves it as in the config.
        windows_pretrain_days: `windows.pretrain_days`; -1 leaves it as in the config.
        pretrain_epochs: `pretrain.epochs`; -1 leaves it as in the config.
        finetune_recipe: `finetune.recipe`; empty leaves it as in the config.
        finetune_epochs: `finetune.epochs`; -1 leaves it as in the config.
        gate_min_auc: `gate.min_auc`; -1 leaves it as in the config.
        register_model_name: `tracking.model_name`; empty leaves it as in the config.

    Returns:
        config: The whole resolved config, as YAML text. A registered model is named by its version
            and no longer by an alias, so that a cached result of another champion is not taken.
        parent_run_id: The MLflow run that the stages' runs are children of.
        source_version: Changes with the log, so that a cached dataset of an older log is not taken.
        code_version: Changes with the code, so that a cached result of other code is not taken.
        windows_config: The config with what `windows` does not read at its default, so that its
            cached dataset is taken though other keys have changed.
        pretrain_config: The same for `pretrain`.
        finetune_config: The same for `finetune`.
    """
    from thawline.stages import start as stage

    started = stage.run(
        config,
        {
            "seed": seed,
            "windows.finetune_days": windows_finetune_days,
            "windows.pretrain_days": windows_pretrain_days,
            "pretrain.epochs": pretrain_epochs,
            "finetune.recipe": finetune_recipe,
            "finetune.epochs": finetune_epochs,
            "gate.min_auc": gate_min_auc,
            "tracking.model_name": register_model_name,
        },
        start_from_champion=start_from_champion,
    )
    return (
        started.config,
        started.parent_run_id,
        started.source_version,
        started.code_version,
        started.windows_config,
        started.pretrain_config,
        started.finetune_config,
    )
