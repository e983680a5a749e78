"""`thawline submit`: uploads a pipeline where it is new, and starts a run of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.connection import EndpointOption, NamespaceOption, TokenFileOption, connect
from pipelines.package import Package, config_text, find, package, upload
from thawline.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.kfp_client import Kfp

EXPERIMENT = "thawline"
SERVICE_ACCOUNT = "thawline-runner"


def submit(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML config file, whose text the run gets."),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="local, cpu, gpu, gpu-multinode, or a YAML file of your own.")
    ] = "cpu",
    pipeline: Annotated[
        str, typer.Option(help="retrain, study, or a compiled file, whose profile is its own.")
    ] = "retrain",
    image: Annotated[str | None, typer.Option(help="Image of every stage.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=VALUE",
            help="An input of the pipeline, e.g. `step3_finetune_epochs=3`.",
        ),
    ] = None,
    experiment: Annotated[str, typer.Option(help="Of Kubeflow; made where it is new.")] = (
        EXPERIMENT
    ),
    name: Annotated[str | None, typer.Option(help="Of the run.")] = None,
    service_account: Annotated[
        str, typer.Option(help="Whose rights the tasks have; '' leaves it to the cluster.")
    ] = SERVICE_ACCOUNT,
    cache: Annotated[
        bool, typer.Option(help="Whether tasks may come from the cache, as they are compiled.")
    ] = True,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run; exit 1 where it does not succeed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")
    ] = False,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Start a run on Kubeflow Pipelines, and print its address.

    The pipeline is compiled and uploaded as a version that is named by its content, so that an
    unchanged one is uploaded once.
    """
    chosen = package(pipeline, profile, image, cache=cache)
    given = read_inputs(inputs or ())
    if config is not None:
        if "config" in given:
            raise ConfigError("--config and --input config=...", "give one of them")
        given = {"config": config_text(config), **given}
    values = chosen.inputs(given, "--input")
    kfp = connect(endpoint, namespace, token_file)
    title = name or f"{chosen.name} {chosen.label} {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    if dry_run:
        for line in _intentions(kfp, chosen, experiment, title, values, service_account):
            typer.echo(line)
        return
    body: dict[str, Any] = {
        "display_name": title,
        "pipeline_version_reference": upload(kfp, chosen),
        "experiment_id": experiment_id(kfp, experiment),
        "runtime_config": {"parameters": values},
    }
    if service_account:
        body["service_account"] = service_account
    run_id = str(kfp.create_run(body)["run_id"])
    typer.echo(f"version: {chosen.version}")
    typer.echo(f"run: {run_id}")
    typer.echo(kfp.connection.link(run_id))
    if wait:
        from pipelines.run_status import exit_code, follow

        raise typer.Exit(exit_code(follow(kfp, run_id)))


def read_inputs(pairs: Iterable[str]) -> dict[str, str]:
    """The values of `NAME=VALUE` options.

    Raises:
        ConfigError: An option without `=`, or a name that comes twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--input {pair!r} has no '='", "write --input NAME=VALUE")
        if name in values:
            raise ConfigError(f"--input {name} comes twice", "give it once")
        values[name] = value
    return values


def experiment_id(kfp: Kfp, name: str) -> str:
    """Id of an experiment, which is made where it is new."""
    return kfp.experiment(name) or kfp.create_experiment(name)


def _intentions(
    kfp: Kfp,
    chosen: Package,
    experiment: str,
    title: str,
    values: dict[str, Any],
    service_account: str,
) -> list[str]:
    pipeline_id, version_id = find(kfp, chosen)
    lines = []
    if pipeline_id is None:
        lines.append(f"would create the pipeline {chosen.name}")
    if version_id is None:
        size = len(chosen.text.encode()) / 1024
        lines.append(f"would upload the version {chosen.version} ({size:.0f} KiB)")
    else:
        lines.append(f"the version {chosen.version} is there already")
    if kfp.experiment(experiment) is None:
        lines.append(f"would create the experiment {experiment}")
    account = f" as {service_account}" if service_account else ""
    lines.append(f"would start the run {title!r}{account}, with")
    lines += [f"  {name} = {_short(value)}" for name, value in values.items()]
    return lines if values else [*lines, "  the pipeline's own inputs"]


def _short(value: Any) -> str:
    text = str(value)
    return f"{len(text)} characters" if len(text) > 60 or "\n" in text else text
