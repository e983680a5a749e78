"""What can be checked before hours of work, without loading what does the work."""

from __future__ import annotations

from thawline.config import Config
from thawline.tracking import runs
from thawline.training.schedule import make_schedule


def check(config: Config) -> None:
    """Fails now over what would otherwise fail late: the recipe, MLflow, the model's name.

    Raises:
        ThawlineError: Something cannot work.
    """
    make_schedule(config.finetune.recipe, config.finetune.epochs)
    runs.check(config)
