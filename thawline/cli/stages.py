"""One command a stage, and `run` for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thawline.cli.common import (
    ConfigOption,
    DatasetOption,
    EvaluationOption,
    ModelOption,
    RegistrationOption,
    SetOption,
    TableOption,
    console,
    escape,
    input_folder,
    leads,
    output_folder,
    plugin,
    print_lines,
    read,
    say,
)
from thawline.config import Config
from thawline.errors import ConfigError
from thawline.terminal import epoch_table, figures_table, metrics_table


def run(
    config: ConfigOption = None,
    overrides: SetOption = None,
    runner: Annotated[
        str,
        typer.Option(
            help="`process` runs the stages here; `kubeflow` runs the compiled pipeline with "
            "Kubeflow's local runner."
        ),
    ] = "process",
) -> None:
    """Run all five stages: windows, pretrain, finetune, evaluate, register."""
    settings = read(config, overrides)
    from thawline.stages import pipeline

    if runner == "process":
        result = pipeline.run(settings)
    else:
        result = plugin("thawline.runners", runner, "--runner")(settings)
    _show_result(settings, result)


def simulate(
    out: Annotated[Path, typer.Argument(help="Folder to write the events to.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write a simulated home feed: events, items and the true probabilities."""
    settings = read(config, overrides)
    if settings.simulate is None:
        raise ConfigError("the config has no simulate section", "add `simulate: {}`")
    from thawline.data.simulate import simulate as simulate_feed

    simulate_feed(settings.simulate, out)
    say(f"events: {out}")


def windows(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    engine: Annotated[
        str | None, typer.Option(help="`duckdb` or `spark`: short for `--set windows.engine=...`.")
    ] = None,
) -> None:
    """Build the dataset: events to requests by day, sequences, catalog, hold-outs."""
    chosen = [f"windows.engine={engine}"] if engine else []
    settings = read(config, [*(overrides or ()), *chosen])
    from thawline.stages import windows as stage

    with output_folder(settings, dataset, "dataset") as out:
        manifest = stage.run(settings, out)
    counts = ", ".join(f"{name} {count:,}" for name, count in manifest.requests.items())
    say(f"dataset: {out} ({manifest.num_items:,} items; requests: {counts})")
    rows = manifest.rows
    if rows.buckets:
        say(
            f"buckets: {rows.bucketed:,} rare items share {rows.buckets:,} rows, "
            f"{rows.collision_rate or 0:.1%} of them with another"
        )
    if rows.evicted:
        say(f"evicted: {rows.evicted:,} items; {out / 'moved.parquet'} says which rows moved")
    for day, late in manifest.late.items():
        say(
            f"late: {day} was built from {late.built:,} events, the log holds {late.now:,} now; "
            "--set windows.late=rebuild builds it anew"
        )


def audit(
    config: ConfigOption = None, overrides: SetOption = None, dataset: DatasetOption = None
) -> None:
    """Look a dataset through for what would make a model's figures untrue: leaks, drift, sizes."""
    settings = read(config, overrides)
    from thawline.data.audit import audit as look_through
    from thawline.data.manifest import Dataset

    report = look_through(settings, Dataset.open(input_folder(settings, dataset, "dataset")))
    table = Table(title=f"audit of {report.data_version[:12]}", title_justify="left", box=None)
    for heading in ("finding", "severity", "what is the case"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        severity = finding.severity + (", waived" if finding.waived else "")
        table.add_row(finding.name, severity, escape(finding.text))
    console().print(table)
    report.require()


def pretrain(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    table: TableOption = None,
) -> None:
    """Pretrain the item table on the sequences of a dataset."""
    settings = read(config, overrides)
    from thawline.stages import pretrain as stage

    folder = input_folder(settings, dataset, "dataset")
    with output_folder(settings, table, "table") as out:
        stage.run(settings, folder, out)
    say(f"table: {out}")


def finetune(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    table: TableOption = None,
    model: ModelOption = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A folder for Chrome traces of some steps of each epoch."),
    ] = None,
) -> None:
    """Fine-tune the ranker and the table by a recipe."""
    settings = read(config, overrides)
    from thawline.data.manifest import Dataset
    from thawline.stages import finetune as stage
    from thawline.training.recipes import make_schedule
    from thawline.training.timeline import lines

    folders = input_folder(settings, dataset, "dataset"), input_folder(settings, table, "table")
    with output_folder(settings, model, "model") as out:
        epochs = stage.run(settings, *folders, out, profile=profile)
    if not leads():
        return
    context = list(Dataset.open(folders[0]).manifest.context)
    print_lines(lines(make_schedule(settings, context), ["item", *settings.tables.others]))
    console().print(epoch_table(settings, epochs))
    say(f"model: {out}")


def evaluate(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    model: ModelOption = None,
    evaluation: EvaluationOption = None,
) -> None:
    """Score a model on both hold-outs, write the report and decide the gate."""
    settings = read(config, overrides)
    from thawline.stages import evaluate as stage

    folders = input_folder(settings, dataset, "dataset"), input_folder(settings, model, "model")
    with output_folder(settings, evaluation, "evaluation") as out:
        verdict = stage.run(settings, *folders, out)
    console().print(metrics_table(verdict.metrics))
    console().print(figures_table(verdict.metrics))
    say(f"gate: {'passed' if verdict.passed else 'refused'}")
    for reason in verdict.reasons:
        say(f"  {reason}")
    say(f"report: {out / 'report.html'}")


def register(
    config: ConfigOption = None,
    overrides: SetOption = None,
    model: ModelOption = None,
    evaluation: EvaluationOption = None,
    registration: RegistrationOption = None,
) -> None:
    """Register an evaluated model that passed the gate in the MLflow registry."""
    settings = read(config, overrides)
    from thawline.stages import register as stage

    folders = (
        input_folder(settings, model, "model"),
        input_folder(settings, evaluation, "evaluation"),
    )
    with output_folder(settings, registration, "registration") as out:
        registered = stage.run(settings, *folders, out)
    say(f"registered: {registered.name} version {registered.version} @{registered.alias}")


def _show_result(settings: Config, result: Any) -> None:
    from thawline.tracking.runs import tracking_uri

    evaluation = json.loads((result.evaluation / "evaluation.json").read_text(encoding="utf-8"))
    model = evaluation["model"]
    out = console()
    out.print(metrics_table(evaluation["metrics"]))
    out.print(figures_table(evaluation["metrics"]))
    lines = {
        "recipe": f"{model['recipe']}, {model['epochs']} epochs",
        "gate": "\n        ".join(["passed" if result.passed else "refused", *result.reasons]),
    }
    if result.registration is not None:
        registered = json.loads(
            (result.registration / "registration.json").read_text(encoding="utf-8")
        )
        uri = f"models:/{registered['name']}@{registered['alias']}"
        lines["model"] = f"{uri} (version {registered['version']})"
    lines["report"] = str((result.evaluation / "report.html").absolute())
    lines["runs"] = f"mlflow ui --backend-store-uri {tracking_uri(settings)}"
    for name, text in lines.items():
        say(f"{name:8}{text}")
