"""What can be checked before hours of work, without loading what does the work."""

from __future__ import annotations

from thawline.config import Config
from thawline.evaluation.gate import require_rules
from thawline.tracking import runs
from thawline.training.recipes import make_schedule


def check(config: Config) -> None:
    """Fails now over what would otherwise fail late: the schedule, the gate, MLflow, names.

    Raises:
        ThawlineError: Something cannot work.
    """
    make_schedule(config, list(config.events.context))
    require_rules(config.gate, list(config.events.actions))
    runs.check(config)
