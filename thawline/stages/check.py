"""What can be checked before hours of work, without loading what does the work."""

from __future__ import annotations

from thawline.config import Config
from thawline.tracking import runs
from thawline.training.recipes import make_schedule


def check(config: Config) -> None:
    """Fails now over what would otherwise fail late: the schedule, MLflow, the model's name.

    Raises:
        ThawlineError: Something cannot work.
    """
    make_schedule(config, list(config.events.context))
    runs.check(config)
