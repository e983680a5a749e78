"""Where a pipeline runs: what each stage gets of a cluster, decided when a pipeline is compiled.

Nothing here is an input of a pipeline: kfp 2.17 compiles a resource that is taken from an input
inside a condition or an exit handler to a reference that leads nowhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipelines.profiles.models import Profile
from thawline.errors import ConfigError

FOLDER = Path(__file__).parent
BUILT_IN = ("local", "cpu", "gpu", "gpu-multinode")

__all__ = ["BUILT_IN", "Profile", "load_profile"]


def load_profile(name: str) -> Profile:
    """Reads a profile.

    Args:
        name: One of `BUILT_IN`, or the path of a YAML file, whose stem becomes the profile's name.
            A file may start from another profile: `extends: gpu`. Mappings are merged then, null
            takes a value of the other profile away, and any other value replaces it.

    Raises:
        ConfigError: No such profile or file, or one that cannot be used; the message names the key.
    """
    tree = _read(name, ()) | {"name": name if name in BUILT_IN else Path(name).stem}
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, item['loc'])) or 'profile'}: "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError(
            f"the profile {name} cannot be used:\n" + "\n".join(lines),
            "docs/kubeflow.md lists the keys of a profile",
        ) from error


def _read(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    path = FOLDER / f"{name}.yaml" if name in BUILT_IN else Path(name)
    if name in above:
        raise ConfigError(f"the profile {name} extends itself", "drop one `extends`")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"there is no profile {name}: {error.strerror}",
            f"choose {', '.join(BUILT_IN)}, or the path of a YAML file",
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the profile {name} is not YAML: {error}", "fix the syntax") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the profile {name} holds no keys", "write keys and values")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if str(base) not in BUILT_IN:
        # Another file is looked for beside this one.
        base = path.parent / str(base)
    return _merged(_read(str(base), (*above, name)), tree)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in own.items():
        before = both.get(key)
        if value is None:
            both.pop(key, None)
        elif isinstance(before, dict) and isinstance(value, dict):
            both[key] = _merged(before, value)
        else:
            both[key] = value
    return both
