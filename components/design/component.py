"""Lays a study out: resolves the config, checks every arm and opens the pipeline's MLflow run."""

from typing import NamedTuple

from components.factory import component


@component
def design(
    config: str,
    windows_finetune_days: int = -1,
    windows_pretrain_days: int = -1,
    pretrain_epochs: int = -1,
    pretrain: str = "",
    grid: str = "",
    seeds: str = "",
    baseline: str = "",
    finetune_epochs: int = -1,
) -> NamedTuple(  # type: ignore[valid-type]
    "Designed",
    [
        ("config", str),
        ("tables", list),
        ("source_version", str),
        ("code_version", str),
        ("windows_config", str),
    ],
):
    """Lays a study out: resolves the config, checks every arm and opens the pipeline's MLflow run.

    Whatever can be refused before hours of training is refused here, for every arm.

    Args:
        config: The config, as YAML text; its `study` section is laid out.
        windows_finetune_days: `windows.finetune_days`; -1 leaves it as in the config.
        windows_pretrain_days: `windows.pretrain_days`; -1 leaves it as in the config.
        pretrain_epochs: `pretrain.epochs`; -1 leaves it as in the config.
        pretrain: `study.pretrain`: once or each-seed; empty leaves it as in the config.
        grid: `study.grid`, as in `finetune.recipe=co-train,frozen; tables.item.learning_rate=0.02`;
            empty leaves it as in the config.
        seeds: `study.seeds`, as in `0,1,2`; empty leaves them as in the config.
        baseline: `study.baseline`; empty leaves it as in the config.
        finetune_epochs: `finetune.epochs`; -1 leaves it as in the config.

    Returns:
        config: The whole resolved config, as YAML text.
        tables: The config of each distinct pretraining, as JSON text.
        source_version: Changes with the log, so that a cached dataset of an older log is not taken.
        code_version: Changes with the code, so that a cached result of other code is not taken.
        windows_config: The config with what `windows` does not read at its default.
    """
    from thawline.stages.study_tasks import lay_out

    started = lay_out(
        config,
        {
            "windows.finetune_days": windows_finetune_days,
            "windows.pretrain_days": windows_pretrain_days,
            "pretrain.epochs": pretrain_epochs,
            "study.pretrain": pretrain,
            "study.baseline": baseline,
            "finetune.epochs": finetune_epochs,
        },
        grid=grid,
        seeds=seeds,
    )
    return (
        started.config,
        started.tables,
        started.source_version,
        started.code_version,
        started.windows_config,
    )
