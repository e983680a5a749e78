"""The `thawline` command: one subcommand a stage, and `run` for all of them.

Heavy imports stand inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from thawline import __version__
from thawline.config import Config, dump_config, load_config, parse_config
from thawline.errors import ConfigError, ThawlineError
from thawline.terminal import epoch_table, metrics_table

EMBEDDED_DEFAULT = "simulate: {}\n"
"""What runs where no config file is given: the simulated feed."""

_T = TypeVar("_T")

app = typer.Typer(
    help="Train recommenders whose ID embedding tables survive more than one epoch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML config file. Without one, the simulated feed is used."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Override a key, e.g. `finetune.epochs=1`."
    ),
]


def _folder(name: str) -> Any:
    return typer.Option(
        f"--{name}",
        help=f"The {name} folder, local or `s3://`, `gs://`, `hdfs://`. "
        f"Default: `<workdir>/{name}`.",
    )


DatasetOption = Annotated[str | None, _folder("dataset")]
TableOption = Annotated[str | None, _folder("table")]
ModelOption = Annotated[str | None, _folder("model")]
EvaluationOption = Annotated[str | None, _folder("evaluation")]
RegistrationOption = Annotated[str | None, _folder("registration")]


@app.command()
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
    settings = _read(config, overrides)
    from thawline.stages import pipeline

    if runner == "process":
        result = pipeline.run(settings)
    else:
        result = _plugin("thawline.runners", runner, "--runner")(settings)
    _show_result(settings, result)


@app.command()
def simulate(
    out: Annotated[Path, typer.Argument(help="Folder to write the events to.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write a simulated home feed: events, items and the true probabilities."""
    settings = _read(config, overrides)
    if settings.simulate is None:
        raise ConfigError("the config has no simulate section", "add `simulate: {}`")
    from thawline.data.simulate import simulate as simulate_feed

    simulate_feed(settings.simulate, out)
    _say(f"events: {out}")


@app.command()
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
    settings = _read(config, [*(overrides or ()), *chosen])
    from thawline.stages import windows as stage

    with _output(settings, dataset, "dataset") as out:
        manifest = stage.run(settings, out)
    counts = ", ".join(f"{name} {count:,}" for name, count in manifest.requests.items())
    _say(f"dataset: {out} ({manifest.num_items:,} items; requests: {counts})")
    rows = manifest.rows
    if rows.buckets:
        _say(
            f"buckets: {rows.bucketed:,} rare items share {rows.buckets:,} rows, "
            f"{rows.collision_rate or 0:.1%} of them with another"
        )
    if rows.evicted:
        _say(f"evicted: {rows.evicted:,} items; {out / 'moved.parquet'} says which rows moved")
    for day, late in manifest.late.items():
        _say(
            f"late: {day} was built from {late.built:,} events, the log holds {late.now:,} now; "
            "--set windows.late=rebuild builds it anew"
        )


@app.command()
def recipes(
    config: ConfigOption = None,
    overrides: SetOption = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of the run. Default: the config's.")
    ] = None,
) -> None:
    """List the recipes with a timeline of each, and draw the schedule of the config."""
    from thawline.training import recipes as known
    from thawline.training.timeline import RENEWED, TRAINS, draw, lines

    chosen = [f"finetune.epochs={epochs}"] if epochs else []
    settings = _read(config, [*(overrides or ()), *chosen])
    count = settings.finetune.epochs
    console = Console(highlight=False)
    console.print(f"Recipes in a run of {count} epochs ({TRAINS} trains, {RENEWED} starts anew):\n")
    for recipe in known.RECIPES.values():
        console.print(f"[bold]{recipe.usage}[/]: {recipe.about}")
        _print_lines(draw(recipe.plan(count, *recipe.example), count).items())
    components = known.components_of(settings, list(settings.events.context))
    schedule = known.make_schedule(settings, list(settings.events.context))
    console.print("[bold]The schedule of this config[/]")
    _print_lines(lines(schedule, components))


def _print_lines(pictures: Iterable[tuple[str, str]]) -> None:
    """Timelines with their names behind them."""
    console = Console(highlight=False, soft_wrap=True)
    for name, line in pictures:
        console.print(f"  {line}  {name}")
    console.print()


@app.command()
def audit(
    config: ConfigOption = None, overrides: SetOption = None, dataset: DatasetOption = None
) -> None:
    """Look a dataset through for what would make a model's figures untrue: leaks, drift, sizes."""
    settings = _read(config, overrides)
    from thawline.data.audit import audit as look_through
    from thawline.data.manifest import Dataset

    report = look_through(settings, Dataset.open(_input(settings, dataset, "dataset")))
    table = Table(title=f"audit of {report.data_version[:12]}", title_justify="left", box=None)
    for heading in ("finding", "severity", "what is the case"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        severity = finding.severity + (", waived" if finding.waived else "")
        table.add_row(finding.name, severity, _escape(finding.text))
    _console().print(table)
    report.require()


@app.command()
def pretrain(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    table: TableOption = None,
) -> None:
    """Pretrain the item table on the sequences of a dataset."""
    settings = _read(config, overrides)
    from thawline.stages import pretrain as stage

    folder = _input(settings, dataset, "dataset")
    with _output(settings, table, "table") as out:
        stage.run(settings, folder, out)
    _say(f"table: {out}")


@app.command()
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
    settings = _read(config, overrides)
    from thawline.data.manifest import Dataset
    from thawline.stages import finetune as stage
    from thawline.training.recipes import make_schedule
    from thawline.training.timeline import lines

    folders = _input(settings, dataset, "dataset"), _input(settings, table, "table")
    with _output(settings, model, "model") as out:
        epochs = stage.run(settings, *folders, out, profile=profile)
    if not _leads():
        return
    context = list(Dataset.open(folders[0]).manifest.context)
    _print_lines(lines(make_schedule(settings, context), ["item", *settings.tables.others]))
    _console().print(epoch_table(settings, epochs))
    _say(f"model: {out}")


@app.command()
def evaluate(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    model: ModelOption = None,
    evaluation: EvaluationOption = None,
) -> None:
    """Score a model on both hold-outs, write the report and decide the gate."""
    settings = _read(config, overrides)
    from thawline.stages import evaluate as stage

    folders = _input(settings, dataset, "dataset"), _input(settings, model, "model")
    with _output(settings, evaluation, "evaluation") as out:
        verdict = stage.run(settings, *folders, out)
    _console().print(metrics_table(verdict.metrics))
    _say(f"gate: {'passed' if verdict.passed else 'refused'} ({'; '.join(verdict.reasons)})")
    _say(f"report: {out / 'report.html'}")


@app.command()
def register(
    config: ConfigOption = None,
    overrides: SetOption = None,
    model: ModelOption = None,
    evaluation: EvaluationOption = None,
    registration: RegistrationOption = None,
) -> None:
    """Register an evaluated model that passed the gate in the MLflow registry."""
    settings = _read(config, overrides)
    from thawline.stages import register as stage

    folders = _input(settings, model, "model"), _input(settings, evaluation, "evaluation")
    with _output(settings, registration, "registration") as out:
        registered = stage.run(settings, *folders, out)
    _say(f"registered: {registered.name} version {registered.version} @{registered.alias}")


@app.command(name="config")
def show_config(
    config: ConfigOption = None,
    overrides: SetOption = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of every key instead.")
    ] = False,
) -> None:
    """Print the whole config with its defaults, after checking it."""
    if schema:
        typer.echo(json.dumps(Config.model_json_schema(), indent=2))
    else:
        typer.echo(dump_config(_read(config, overrides)), nl=False)


@app.command()
def theory(
    rows: Annotated[
        int | None, typer.Option(help="Rows of a Zipf table. Default: 1,000,000,000.")
    ] = None,
    zipf: Annotated[float | None, typer.Option(help="Its exponent. Default: 1.1.")] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="A dataset's or model's folder: its catalog's counts in place of Zipf."),
    ] = None,
    lookups: Annotated[int, typer.Option(help="Lookups a batch, histories included.")] = 28_160,
    staleness: Annotated[
        list[int] | None,
        typer.Option(help="Updates that a lookup misses; repeatable. Default: 0, 1, 2, 4."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of the run.")] = 2,
) -> None:
    """Print closed forms: stale lookups, stability, idle rows, the timing of a thaw."""
    from thawline.theory import Popularity, figures

    alpha = None
    if dataset is None:
        alpha = 1.1 if zipf is None else zipf
        popularity = Popularity.zipf(1_000_000_000 if rows is None else rows, alpha)
    elif rows is not None or zipf is not None:
        raise ConfigError(
            "--dataset brings its own rows and popularity", "leave out --rows and --zipf"
        )
    else:
        from thawline.data.manifest import Catalog

        catalog = Catalog.read(dataset / "catalog.parquet")
        popularity = Popularity.from_counts(catalog.pretrain_count + catalog.support)
    for table in (
        figures.popularity_table(popularity, alpha),
        figures.staleness_table(popularity, lookups, staleness or [0, 1, 2, 4]),
        figures.displacement_table(),
        figures.timing_table(epochs),
    ):
        _console().print(table)


@app.command()
def plan(
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="A dataset's folder: its items, their counts, its requests."),
    ] = None,
    rows: Annotated[
        float | None, typer.Option(min=1, help="Rows of a Zipf table, e.g. 1e9 (the default).")
    ] = None,
    zipf: Annotated[float | None, typer.Option(help="Its exponent. Default: 1.1.")] = None,
    dim: Annotated[int | None, typer.Option(help="Default: model.dim.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Of the rows. Default: tables.item.optimizer.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests a GPU. Default: finetune.batch_size.")
    ] = None,
    history: Annotated[
        int | None, typer.Option(min=1, help="Default: windows.history_length.")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="A request. Default: 1 + negatives.per_positive.")
    ] = None,
    staleness: Annotated[int | None, typer.Option(help="Default: finetune.staleness.")] = None,
    requests: Annotated[
        float | None, typer.Option(min=1, help="Of an epoch, e.g. 1e9. Default: the dataset's.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs over which the table is split.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100 or l4.")] = "h100",
    interconnect: Annotated[
        str,
        typer.Option(
            help="nvlink4, nvlink3, pcie5, pcie4, ib-ndr, ib-hdr, ethernet-100g, ethernet-25g or "
            "ethernet-10g: the slowest link between the GPUs."
        ),
    ] = "ib-ndr",
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s a GPU in one direction, in its place.")
    ] = None,
    utilisation: Annotated[
        float, typer.Option(help="Share of the GPU's FLOP/s that the network reaches.")
    ] = 0.3,
) -> None:
    """Estimate memory, traffic and time of fine-tuning a table split over many GPUs."""
    settings = _read(config, overrides)
    from thawline.model.cost import Shape, ranker_cost
    from thawline.theory import Popularity, capacity, figures

    card = _named(capacity.GPUS, gpu, "--gpu")
    rate = _named(capacity.INTERCONNECTS, interconnect, "--interconnect")
    model = settings.model if dim is None else settings.model.model_copy(update={"dim": dim})
    actions, context = len(settings.events.actions), len(settings.events.context)
    if dataset is None:
        popularity = Popularity.zipf(int(rows or 1e9), 1.1 if zipf is None else zipf)
    elif rows is not None or zipf is not None:
        raise ConfigError(
            "--dataset brings its own rows and popularity", "leave out --rows and --zipf"
        )
    else:
        from thawline.data.manifest import Dataset

        data = Dataset.open(dataset)
        popularity = Popularity.from_counts(data.catalog.pretrain_count + data.catalog.support)
        requests = data.manifest.requests["train"] if requests is None else requests
        actions, context = len(data.manifest.actions), len(data.manifest.context)
    size = batch or settings.finetune.batch_size
    shape = Shape(
        batch=size,
        history=history or settings.windows.history_length,
        candidates=candidates or 1 + settings.negatives.per_positive,
        actions=actions,
        context=context,
        side=[table.dim for table in settings.tables.others.values()],
    )
    cost = ranker_cost(model, shape)
    late = settings.finetune.staleness if staleness is None else staleness
    machine = capacity.Machine(
        gpus,
        flops=card.bfloat16 if settings.finetune.autocast == "bfloat16" else card.float32,
        bandwidth=rate if bandwidth is None else 1e9 * bandwidth,
        memory_rate=card.memory_rate,
        utilisation=utilisation,
    )
    item = settings.tables.item
    made = capacity.make_plan(
        capacity.Table(
            popularity, model.dim, optimizer or item.optimizer, 2 if item.dtype == "bfloat16" else 4
        ),
        capacity.Network(cost.parameters, cost.forward, cost.backward, cost.kept),
        machine,
        lookups=size * (shape.history + shape.candidates),
        staleness=late,
    )
    _say(
        f"{popularity.rows:,} rows x {model.dim} over {gpus} {gpu}; {size:,} requests a GPU, "
        f"{shape.history} items of history, {shape.candidates} candidates, "
        f"{cost.forward / size / 1e6:,.1f} MFLOP a request forward"
    )
    steps = None if requests is None else -(-int(requests) // (size * gpus))
    for table in figures.plan_tables(made, machine, late, steps):
        _console().print(table)
    if made.memory.total > card.memory:
        _say(
            f"{made.memory.total / 1e9:,.1f} GB do not fit into a {gpu}'s {card.memory / 1e9:,.0f} "
            "GB: take more GPUs, a narrower dim, tables.item.dtype=bfloat16, or "
            "model.checkpoint_activations=true"
        )


def _named(known: Mapping[str, _T], name: str, option: str) -> _T:
    if name not in known:
        raise ConfigError(f"{option}: there is no {name!r}", f"choose one of {', '.join(known)}")
    return known[name]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


for _command in entry_points(group="thawline.commands"):
    app.command(_command.name)(_command.load())


def main() -> None:
    """Runs the command; errors that a user can act on are printed without a traceback."""
    try:
        app()
    except ThawlineError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {_escape(str(error))}", highlight=False)
        sys.exit(2)


def _read(config: Path | None, overrides: Sequence[str] | None) -> Config:
    if config is None:
        return parse_config(EMBEDDED_DEFAULT, overrides or (), source="the embedded default")
    return load_config(config, overrides or ())


def _input(settings: Config, given: str | None, name: str) -> Path:
    """A folder of an earlier stage, fetched into the workdir where it is remote."""
    from thawline.data.storage import fetch_folder, is_remote

    if given is not None and is_remote(given):
        return fetch_folder(given, Path(settings.workdir))
    return Path(given or Path(settings.workdir) / name)


@contextmanager
def _output(settings: Config, given: str | None, name: str) -> Iterator[Path]:
    """The folder that a stage makes; where it is remote, it is put there once it is complete."""
    from thawline.data.storage import is_remote, publish_folder

    remote = given if given is not None and is_remote(given) else None
    local = Path(settings.workdir) / name if remote or not given else Path(given)
    _require_replaceable(local, name)
    yield local
    if remote is not None and _leads():
        publish_folder(local, remote)
        _say(f"published: {remote}")


def _require_replaceable(out: Path, name: str) -> None:
    """Sees to it, before any work, that a stage's folder takes the place of its like alone.

    Raises:
        ConfigError: It would remove something else.
    """
    mark = "manifest.json" if name == "dataset" else f"{name}.json"
    if out.is_dir() and ((out / mark).exists() or not any(out.iterdir())):
        return
    if out.exists():
        raise ConfigError(
            f"--{name} {out} holds something else than a {name} (no {mark}), which would be lost",
            "name a folder that is new",
        )


def _leads() -> bool:
    """Whether this is the first process of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _plugin(group: str, name: str, option: str) -> Any:
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        raise ConfigError(f"{option}: no runner {name!r}", f"choose process, {', '.join(known)}")
    return known[name].load()


def _console() -> Console:
    return Console()


def _say(text: str) -> None:
    _console().print(_escape(text), highlight=False, soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _show_result(settings: Config, result: Any) -> None:
    from thawline.tracking.runs import tracking_uri

    evaluation = json.loads((result.evaluation / "evaluation.json").read_text(encoding="utf-8"))
    model = evaluation["model"]
    console = _console()
    console.print(metrics_table(evaluation["metrics"]))
    lines = {
        "recipe": f"{model['recipe']}, {model['epochs']} epochs",
        "gate": ("passed: " if result.passed else "refused: ") + "; ".join(result.reasons),
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
        _say(f"{name:8}{text}")
