"""What a run over several processes may not ask for."""

from __future__ import annotations

from thawline.config.tree import Config
from thawline.errors import ConfigError


def require_shardable(config: Config) -> None:
    """Sees to it that nothing is set that sharded tables do not have.

    Raises:
        ConfigError: Something is; the message names it.
    """
    unset = {"dtype": "float32", "weight_decay": 0, "pull": 0, "drift_cap": None}
    unset["frequency_scaling"] = 0
    wrong = [
        f"tables.{name}.{key}"
        for name, own in {"item": config.tables.item, **config.tables.others}.items()
        for key, value in unset.items()
        if getattr(own, key) != value
    ]
    if config.finetune.cross_fit:
        wrong.append("finetune.cross_fit")
    if wrong:
        raise ConfigError(
            f"sharded tables do not have {', '.join(wrong)}",
            "leave it out, or train in one process with tables.engine=local",
        )
