"""Commands that compute nothing but figures: the config, recipes, closed forms, plans."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thawline.cli.common import (
    ConfigOption,
    SetOption,
    console,
    named,
    print_lines,
    read,
    say,
)
from thawline.config import Config, dump_config
from thawline.config.shardable import require_shardable
from thawline.errors import ConfigError


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
    settings = read(config, [*(overrides or ()), *chosen])
    count = settings.finetune.epochs
    console = Console(highlight=False)
    console.print(f"Recipes in a run of {count} epochs ({TRAINS} trains, {RENEWED} starts anew):\n")
    for recipe in known.RECIPES.values():
        console.print(f"[bold]{recipe.usage}[/]: {recipe.about}")
        print_lines(draw(recipe.plan(count, *recipe.example), count).items())
    components = known.components_of(settings, list(settings.events.context))
    schedule = known.make_schedule(settings, list(settings.events.context))
    console.print("[bold]The schedule of this config[/]")
    print_lines(lines(schedule, components))


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
        typer.echo(dump_config(read(config, overrides)), nl=False)


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
        console().print(table)


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
    if math.inf in (rows, requests):
        raise ConfigError("--rows or --requests is inf", "give a number, such as 1e9")
    asked = {"model.dim": dim, "tables.item.optimizer": optimizer}
    wanted = [f"{key}={value}" for key, value in asked.items() if value is not None]
    settings = read(config, [*(overrides or ()), *wanted])
    from thawline.model.cost import Shape, ranker_cost
    from thawline.theory import Popularity, capacity, figures

    card = named(capacity.GPUS, gpu, "--gpu")
    rate = named(capacity.INTERCONNECTS, interconnect, "--interconnect")
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
    cost = ranker_cost(settings.model, shape)
    late = settings.finetune.staleness if staleness is None else staleness
    if gpus > 1:
        require_shardable(settings)
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
            popularity, settings.model.dim, item.optimizer, 2 if item.dtype == "bfloat16" else 4
        ),
        capacity.Network(cost.parameters, cost.forward, cost.backward, cost.kept),
        machine,
        lookups=size * (shape.history + shape.candidates),
        staleness=late,
    )
    say(
        f"{popularity.rows:,} rows x {settings.model.dim} over {gpus} {gpu}; "
        f"{size:,} requests a GPU, {shape.history} items of history, "
        f"{shape.candidates} candidates, {cost.forward / size / 1e6:,.1f} MFLOP a request forward"
    )
    steps = None if requests is None else -(-int(requests) // (size * gpus))
    for table in figures.plan_tables(made, machine, late, steps):
        console().print(table)
    if made.memory.total > card.memory:
        narrow = "tables.item.dtype=bfloat16, " if gpus == 1 else ""
        say(
            f"{made.memory.total / 1e9:,.1f} GB do not fit into a {gpu}'s {card.memory / 1e9:,.0f} "
            f"GB: take more GPUs, a narrower dim, {narrow}or model.checkpoint_activations=true"
        )
