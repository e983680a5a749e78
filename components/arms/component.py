"""Lists the trials of a study that start from one pretrained table."""

from components.factory import component


@component
def arms(config: str, table: str) -> list:
    """Lists the trials of a study that start from one pretrained table.

    Args:
        config: The resolved config, as YAML text.
        table: The config of the pretraining: one of the `tables` of `design`.

    Returns:
        Output: Each trial as JSON text: its arm and its seed.
    """
    from thawline.stages.study_tasks import arms_of

    return arms_of(config, table)
