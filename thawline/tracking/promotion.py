"""Which version is in use: the aliases `challenger` and `tracking.alias`, set and set back."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.tracking.fetch import ABSENT, find_version
from thawline.tracking.server import CHALLENGER, check_names, connect, explained

PREVIOUS_TAG = "thawline.previous_champion"
"""Which version had the alias before this one."""
PROMOTED_TAG = "thawline.promoted_at"


@dataclass(frozen=True)
class Promotion:
    """A version that has the alias."""

    name: str
    version: str
    alias: str
    previous: str
    """The version that had the alias before; empty where none had."""
    moved: bool
    """False where it had the alias already."""


def promote(config: Config, version: str = "", alias: str = CHALLENGER) -> Promotion:
    """Gives a version of `tracking.model_name` the alias `tracking.alias`.

    The version remembers which one had it before, for `rollback`. Once it has the alias, nothing
    changes any more.

    Args:
        config: Names model and alias.
        version: Its number; empty: the version that `alias` names.
        alias: Of the version to promote.

    Raises:
        TrackingError: No such version or alias, a version that is not ready, the server's refusal.
    """
    check_names(config)
    name = config.tracking.model_name
    uri = f"models:/{name}/{version}" if version else f"models:/{name}@{alias}"
    found = find_version(config, uri)
    if found is None:
        raise TrackingError(
            f"no version of {name} has the alias {alias!r}",
            "see `thawline versions`, and name one by --version",
        )
    if found.status != "READY":
        raise TrackingError(
            f"{name} version {found.version} is {found.status}", "promote a version that is READY"
        )
    return give_alias(config, connect(config), found)


def put(write: Callable[..., None], *values: str) -> None:
    """Sets a tag or an alias, a second time where the first fails.

    Where two processes set a new one at one instant, MLflow's database refuses the later of them;
    by then it is there, so that it can be set.
    """
    try:
        write(*values)
    except MlflowException:
        write(*values)


def give_alias(config: Config, client: MlflowClient, version: ModelVersion) -> Promotion:
    """Gives a version the alias `tracking.alias`, and tags it with the one that had it before.

    Raises:
        TrackingError: The server's refusal.
    """
    name, number, alias = version.name, str(version.version), config.tracking.alias
    with explained(config, f"giving {name} version {number} the alias {alias}"):
        before = holder(client, name, alias)
        if before == number:
            return Promotion(name, number, alias, version.tags.get(PREVIOUS_TAG, ""), moved=False)
        # The tags first: without them, a version that has the alias could not be rolled back.
        if before:
            put(client.set_model_version_tag, name, number, PREVIOUS_TAG, before)
        put(client.set_model_version_tag, name, number, PROMOTED_TAG, _now())
        put(client.set_registered_model_alias, name, alias, number)
    return Promotion(name, number, alias, before, moved=True)


def rollback(config: Config) -> Promotion:
    """Gives the alias back to the version that had it before the present one.

    Called again, it goes one further back, as far as promotions go.

    Raises:
        TrackingError: No version has the alias, none had it before, that one is gone, or the
            server's refusal.
    """
    check_names(config)
    name, alias = config.tracking.model_name, config.tracking.alias
    client = connect(config)
    present = find_version(config, f"models:/{name}@{alias}")
    if present is None:
        raise TrackingError(
            f"no version of {name} has the alias {alias!r}",
            "name the version to use: `thawline promote --version N`",
        )
    before, number = present.tags.get(PREVIOUS_TAG, ""), str(present.version)
    if not before:
        raise TrackingError(
            f"no version of {name} had the alias {alias!r} before version {number}",
            "name the version to use: `thawline promote --version N`",
        )
    with explained(config, f"giving the alias {alias} back to {name} version {before}"):
        try:
            client.get_model_version(name, before)
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            raise TrackingError(
                f"{name} version {before}, which had the alias {alias!r} before version {number}, "
                "is deleted",
                "name the version to use: `thawline promote --version N`",
            ) from error
        client.set_registered_model_alias(name, alias, before)
    return Promotion(name, before, alias, number, moved=True)


def holder(client: MlflowClient, name: str, alias: str) -> str:
    """The version that has an alias; empty where none has it."""
    try:
        return str(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return ""


def list_versions(config: Config) -> list[ModelVersion]:
    """The versions of `tracking.model_name`, the newest first, with their aliases.

    Raises:
        TrackingError: There are none, or the server's refusal.
    """
    check_names(config)
    name = config.tracking.model_name
    client = connect(config)
    with explained(config, f"listing the versions of {name}"):
        found = list(client.search_model_versions(f"name = '{name}'", max_results=1_000))
        if not found:
            raise TrackingError(
                f"there is no version of {name}",
                "register one: `thawline run`, or set tracking.model_name to a model that exists",
            )
        aliases: dict[str, list[str]] = {}
        for alias, number in client.get_registered_model(name).aliases.items():
            aliases.setdefault(str(number), []).append(alias)
    for version in found:
        version.aliases = sorted(aliases.get(str(version.version), []))
    return sorted(found, key=lambda version: -int(version.version))


def auc_of(version: ModelVersion, holdout: str, tier: str = "") -> str:
    """The AUC of the primary action that a version was registered with; empty where it has none."""
    tag = re.compile(rf"thawline\.auc\.[^.]+\.{holdout}{tier and rf'[.]{tier}'}")
    found = next((value for key, value in version.tags.items() if tag.fullmatch(key)), "")
    return f"{float(found):.4f}" if found else ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
