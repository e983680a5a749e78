"""Commands around the model registry: which versions there are, which one is in use, fetching."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from thawline.cli.common import ConfigOption, SetOption, console, output_folder, read, say
from thawline.config import Config

SourceOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="`models:/<name>@<alias>`, `models:/<name>/<version>` or a model folder. Default: "
        "the version in use.",
    ),
]


def _source(settings: Config, model: str | None) -> str:
    return model or f"models:/{settings.tracking.model_name}@{settings.tracking.alias}"


def versions(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """List the registered versions, with their AUC on the days after the fine-tune window."""
    settings = read(config, overrides)
    from thawline.tracking.promotion import auc_of, list_versions
    from thawline.tracking.server import check

    check(settings)
    found = list_versions(settings)
    listed = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("#", "aliases", "recipe", "data", "before", "AUC", "cold"):
        listed.add_column(heading, no_wrap=True)
    for each in found:
        listed.add_row(
            str(each.version),
            ", ".join(each.aliases),
            each.tags.get("thawline.recipe", ""),
            each.tags.get("thawline.data_version", "")[:8],
            each.tags.get("thawline.previous_champion", ""),
            auc_of(each, "next"),
            auc_of(each, "next", "cold"),
        )
    console().print(listed)


def promote(
    config: ConfigOption = None,
    overrides: SetOption = None,
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="The version to promote.")
    ] = None,
    alias: Annotated[
        str, typer.Option("--alias", help="The version to promote, by an alias that it has.")
    ] = "challenger",
) -> None:
    """Give a registered version the alias of the one in use (`tracking.alias`)."""
    settings = read(config, overrides)
    from thawline.tracking import promotion
    from thawline.tracking.server import check

    check(settings)
    promoted = promotion.promote(settings, str(version or ""), alias)
    before = f", before: version {promoted.previous}" if promoted.previous else ""
    already = "" if promoted.moved else " already"
    say(f"{promoted.name} version {promoted.version} is{already} @{promoted.alias}{before}")


def rollback(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Give the alias back to the version that had it before."""
    settings = read(config, overrides)
    from thawline.tracking import promotion
    from thawline.tracking.server import check

    check(settings)
    back = promotion.rollback(settings)
    say(f"{back.name} version {back.version} is @{back.alias} again, not version {back.previous}")


def fetch(
    output: Annotated[
        str, typer.Option("--output", "-o", help="The folder to make, local or remote.")
    ],
    model: SourceOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Fetch a registered model as a model folder."""
    settings = read(config, overrides)
    from thawline.stages import fetch as stage

    source = _source(settings, model)
    with output_folder(settings, output, "model") as out:
        stage.model(settings, source, out)
    say(f"fetched: {source} to {output}")


def table(
    output: Annotated[Path, typer.Option("--output", "-o", help="The Parquet file to write.")],
    model: SourceOption = None,
    name: Annotated[
        str, typer.Option("--name", help="`item`, or another table with a vocabulary.")
    ] = "item",
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Write the vectors of a model's ID table as Parquet: item_id, vector."""
    settings = read(config, overrides)
    from thawline.stages import fetch as stage

    stage.table(settings, _source(settings, model), name, output)
    say(f"written: {output}")


def score(
    source: Annotated[
        Path, typer.Option("--input", "-i", help="Requests: a Parquet file, or a folder of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The Parquet file to write.")],
    model: SourceOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Score the candidates of requests in Parquet."""
    settings = read(config, overrides)
    from thawline.stages import score as stage

    summary = stage.run(settings, _source(settings, model), source, output)
    counts = summary.counts
    say(f"scored: {counts['requests']:,} requests, {counts['candidates']:,} candidates: {output}")
    for name in sorted(counts):
        if name.startswith("unknown_") and counts[name]:
            say(f"{name}: {counts[name]:,}")
    for column, number in summary.rejected.items():
        say(f"rejected: {number:,} by {column}, such as {summary.first[column]}")
