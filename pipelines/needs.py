"""What a profile names in a cluster, for `thawline doctor`."""

from __future__ import annotations

from pipelines.profiles import load_profile
from thawline.stages.doctor.cluster import Needs


def needs(name: str) -> Needs:
    """The secrets, config maps and claims of a profile, with the keys that it takes of each.

    Raises:
        ConfigError: No such profile, or one that cannot be used.
    """
    profile = load_profile(name)
    claim = profile.work.claim if profile.work else None
    return Needs(
        secrets={name: list(keys) for name, keys in profile.secrets.items()},
        config_maps={name: list(keys) for name, keys in profile.config_maps.items()},
        image_pull_secrets=list(profile.image_pull_secrets),
        claims=[claim] if claim else [],
    )
