"""`thawline schedule`: makes Kubeflow's recurring runs what a file says.

Kubeflow changes no recurring run: another spec takes a new one. Those that are made here carry
their set, name and spec in the description; all others are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipelines.connection import EndpointOption, NamespaceOption, TokenFileOption, connect

if TYPE_CHECKING:
    from pipelines.kfp_client import Kfp
    from pipelines.schedule_spec import Wanted

SHOWN = 3
"""Next runs that are shown."""

Kind = Literal["create", "replace", "enable", "disable", "clean", "keep"]
WORDS: dict[Kind, tuple[str, str]] = {
    "create": ("created", "would be created"),
    "replace": ("replaced", "would be replaced"),
    "enable": ("enabled", "would be enabled"),
    "disable": ("disabled", "would be disabled"),
    "clean": ("cleared of doubles", "would be cleared of doubles"),
    "keep": ("unchanged", "unchanged"),
}


@dataclass(frozen=True)
class Found:
    """A recurring run that was made from a file."""

    id: str
    set: str
    name: str
    spec: str
    enabled: bool
    body: dict[str, Any]
    """As Kubeflow tells of it."""


@dataclass(frozen=True)
class Change:
    """What becomes of one schedule."""

    kind: Kind
    name: str
    wanted: Wanted | None = None
    """None: it is in the file no more."""
    switched: tuple[str, ...] = ()
    """Ids of those to enable or to disable."""
    deleted: tuple[str, ...] = ()
    """Ids of those to delete once the new one is there."""
    differences: tuple[str, ...] = ()
    """Names of what is not as before, where it is replaced."""


def schedule(
    file: Annotated[Path, typer.Argument(help="YAML file of schedules.")] = Path(
        "k8s/schedule.yaml"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")
    ] = False,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Make Kubeflow's recurring runs what a file says.

    A schedule that is new is created, a changed one is replaced, one that was taken out of the file
    is disabled, and an unchanged one is not touched; nor is any that was made in the UI. Hours are
    UTC.
    """
    from pipelines.schedule_spec import read_schedules

    owner, wanted = read_schedules(file)
    kfp = connect(endpoint, namespace, token_file)
    changes = plan(wanted, ours(kfp.recurring_runs()), owner.set)
    now = datetime.now(UTC)
    for change in changes:
        if not dry_run:
            apply(kfp, change)
        typer.echo(_told(change, dry_run, now))
    if not changes:
        typer.echo("no schedule")


def ours(recurring_runs: Iterable[dict[str, Any]]) -> list[Found]:
    """Those that were made from a file."""
    from pipelines.schedule_spec import MARK

    found = []
    for each in recurring_runs:
        mark = MARK.search(each.get("description") or "")
        if mark:
            enabled = each.get("status", "ENABLED") == "ENABLED"
            own_id = str(each["recurring_run_id"])
            found.append(Found(own_id, mark[1], mark[2], mark[3], enabled, each))
    return found


def plan(wanted: Sequence[Wanted], found: Sequence[Found], own_set: str) -> list[Change]:
    """What has to be done, schedule by schedule.

    Args:
        wanted: What the file says.
        found: What is there, of any file.
        own_set: Of this file: nothing of other sets is changed.
    """
    mine = [each for each in found if each.set == own_set]
    changes = [_change(each, [one for one in mine if one.name == each.name]) for each in wanted]
    names = {each.name for each in wanted}
    for name in dict.fromkeys(each.name for each in mine if each.name not in names):
        enabled = tuple(each.id for each in mine if each.name == name and each.enabled)
        if enabled:
            changes.append(Change("disable", name, switched=enabled))
    return changes


def apply(kfp: Kfp, change: Change) -> None:
    """Does it. What fails half-way is put right by the next time."""
    from pipelines.package import upload
    from pipelines.submit import experiment_id

    wanted = change.wanted
    if wanted is not None and change.kind in ("create", "replace"):
        version = upload(kfp, wanted.package)
        experiment = experiment_id(kfp, wanted.owner.experiment)
        kfp.create_recurring_run(wanted.body(version, experiment))
    for each in change.switched:
        kfp.enable_recurring_run(each, change.kind == "enable")
    for each in change.deleted:
        kfp.delete_recurring_run(each)


def _change(wanted: Wanted, there: Sequence[Found]) -> Change:
    same = [each for each in there if each.spec == wanted.spec]
    kept = same[0].id if same else None
    others = tuple(each.id for each in there if each.id != kept)
    if not there:
        return Change("create", wanted.name, wanted)
    if not same:
        names = _differences(there[-1].body, wanted.body({}, ""))
        return Change("replace", wanted.name, wanted, deleted=others, differences=names)
    if same[0].enabled != wanted.entry.enabled:
        kind: Kind = "enable" if wanted.entry.enabled else "disable"
        return Change(kind, wanted.name, wanted, switched=(same[0].id,), deleted=others)
    return Change("clean" if others else "keep", wanted.name, wanted, deleted=others)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
    before, after = _parts(old), _parts(new)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    # What a recurring run does not show by itself: its version's content, or its experiment.
    return tuple(names) or ("pipeline or experiment",)


def _parts(body: dict[str, Any]) -> dict[str, Any]:
    from pipelines.schedule_spec import MARK

    cron = (body.get("trigger") or {}).get("cron_schedule") or {}
    return {
        "about": MARK.sub("", body.get("description") or "").strip(),
        "cron": cron.get("cron"),
        "start": cron.get("start_time"),
        "end": cron.get("end_time"),
        "max_concurrency": str(body.get("max_concurrency")),
        "catchup": not body.get("no_catchup"),
        "service_account": body.get("service_account") or "",
        **((body.get("runtime_config") or {}).get("parameters") or {}),
    }


def _told(change: Change, dry_run: bool, now: datetime) -> str:
    line = f"{change.name}: {WORDS[change.kind][dry_run]}"
    if change.differences:
        line += f" ({', '.join(change.differences)})"
    if change.wanted is None:
        return f"{line} (no longer in the file)"
    if not change.wanted.entry.enabled:
        return f"{line}; disabled"
    moments = [f"{moment:%a %Y-%m-%d %H:%M:%S}" for moment in change.wanted.next_runs(SHOWN, now)]
    return f"{line}; next (UTC): {', '.join(moments) or 'never again'}"
