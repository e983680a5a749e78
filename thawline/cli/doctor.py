"""`thawline doctor`: whether everything is there that a run needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from thawline.cli.common import ConfigOption, SetOption, console, escape, read
from thawline.errors import ConfigError

if TYPE_CHECKING:
    from thawline.stages.doctor.cluster import Needs
    from thawline.stages.doctor.findings import Finding

COLOURS = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def doctor(
    config: ConfigOption = None,
    overrides: SetOption = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Also look for the secrets, config maps and claims that a profile names "
            "(`cpu`, `gpu`, ..., or a YAML file), in the cluster of the kubeconfig or the pod."
        ),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option(envvar="KFP_NAMESPACE", help="Of the runs; default: the current context's."),
    ] = "",
    write: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A folder or URL that stages will write to; repeatable."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")
    ] = False,
) -> None:
    """Look whether everything is there that a run needs, and say what to do about what is not.

    The exit code is 1 where something failed.
    """
    settings = read(config, overrides)
    needs = _needs(profile) if profile else None
    from thawline.stages.doctor.findings import examine
    from thawline.stages.doctor.looks import looks

    todo = looks(settings, needs, namespace=namespace, written=write or ())
    if as_json:
        findings = examine(todo)
    else:
        with Console(stderr=True).status("doctor") as status:
            findings = examine(todo, lambda name: status.update(f"doctor: {name}"))
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if as_json:
        told = {"passed": not failed, "checks": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        console().print(_table(findings))
    if failed:
        raise typer.Exit(1)


def _needs(profile: str) -> Needs:
    """What a profile names in a cluster, by whatever package knows profiles."""
    points = list(entry_points(group="thawline.needs"))
    if not points:
        raise ConfigError(
            "--profile: nothing that is installed knows profiles", "pip install thawline again"
        )
    found: Needs = points[0].load()(profile)
    return found


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("check", "status"):
        table.add_column(heading, no_wrap=heading == "status", overflow="fold")
    table.add_column("what was found", overflow="fold", ratio=1)
    for finding in findings:
        text = finding.detail + (f"\nWhat to do: {finding.remedy}" if finding.remedy else "")
        status = f"[{COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(finding.check, status, escape(text))
    return table
