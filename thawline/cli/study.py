"""`thawline study`: configs against each other over several seeds, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich import box
from rich.table import Table

from thawline.cli.common import (
    ConfigOption,
    SetOption,
    console,
    escape,
    input_folder,
    read,
    say,
)
from thawline.cli.study_table import progress
from thawline.config import Config, parse_config
from thawline.errors import ConfigError

if TYPE_CHECKING:
    from thawline.stages.study_report import Outcome

DASH = "\N{EN DASH}"


def study(
    config: ConfigOption = None,
    overrides: SetOption = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "-g",
            metavar="KEY=VALUE,VALUE",
            help="A config key and its values; repeatable: every combination is an arm.",
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="E.g. `0,1,2`.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="What arms are compared with, e.g. `co-train`.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time; they divide the cores.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Shown first, e.g. `user_auc`.")] = None,
    pretrain: Annotated[
        str | None, typer.Option(help="`once`, or rows for `each-seed` of its own.")
    ] = None,
    share_prefix: Annotated[
        bool | None,
        typer.Option(
            "--share-prefix/--no-share-prefix",
            help="Train epochs in which trials freeze their tables alike once. Default: once.",
        ),
    ] = None,
    halving: Annotated[
        str | None,
        typer.Option(
            metavar="EPOCHS,...",
            help="Rounds of fewer epochs first, whose best arms go on, e.g. `1,2`.",
        ),
    ] = None,
    eta: Annotated[
        int | None, typer.Option(min=2, help="With --halving: one arm in so many goes on.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A dataset folder or URL. Default: one is built.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The study's folder. Default: `<workdir>/study`.")
    ] = None,
    report_only: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run nothing; make the report of a study's folder again."),
    ] = None,
) -> None:
    """Run recipes, or any values of config keys, with several seeds, and pair them by seed.

    The same command goes on where it was stopped; what is finished is not run again. All of it can
    be said in the config's `study` section as well.
    """
    if report_only is not None:
        from thawline.stages.study_report import report_only as report_again

        outcome = report_again(report_only)
    else:
        from thawline.stages import study as stage

        settings = with_study(
            read(config, overrides),
            grid or [],
            seeds,
            baseline=baseline,
            jobs=jobs,
            metric=metric,
            pretrain=pretrain,
            share_prefix=share_prefix,
            halving=halving,
            eta=eta,
        )
        found = input_folder(settings, dataset, "dataset") if dataset is not None else None
        with progress(settings.study.metric) as show:
            outcome = stage.run(
                settings, out or Path(settings.workdir) / "study", dataset=found, show=show
            )
    show_outcome(outcome)
    if outcome.failed:
        say(f"{len(outcome.failed)} trials failed; the same command tries them again")
        raise typer.Exit(1)


def with_study(
    settings: Config,
    grid: list[str],
    seeds: str | None,
    *,
    halving: str | None,
    eta: int | None,
    **options: Any,
) -> Config:
    """The config with its study as the options say."""
    from thawline.stages.study_tasks import parse_seed
    from thawline.study.grid import parse_grid, split_values

    own = settings.study.model_dump(mode="json")
    own |= {name: value for name, value in options.items() if value is not None}
    if grid:
        own["grid"] = parse_grid(grid)
    if seeds is not None:
        own["seeds"] = [parse_seed(part) for part in split_values(seeds)]
    if halving is not None:
        try:
            own["halving"] = {"epochs": [int(part) for part in halving.split(",")]}
        except ValueError as error:
            raise ConfigError(
                f"--halving {halving!r} holds no numbers of epochs", "write e.g. --halving 1,2"
            ) from error
    if eta is not None:
        if own["halving"] is None:
            raise ConfigError("--eta without --halving", "say the rounds with --halving 1,2")
        own["halving"]["eta"] = eta
    tree = settings.model_dump(mode="json") | {"study": own}
    return parse_config(yaml.safe_dump(tree, sort_keys=False), source="the study")


def show_outcome(outcome: Outcome, failed: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Prints what a study found, what failed, and where its files are.

    Args:
        outcome: Of the study.
        failed: Trials that are to be shown as failed; None: all that are.
    """
    facts = outcome.facts
    if "measured" in facts:
        for sentence in facts["words"]:
            say(sentence)
        say(f"report: {outcome.folder / 'study.html'}")
        return
    title = f"{facts['holdout']}: {facts['action']} {facts['metric']}, paired by seed"
    console().print(_table(title, outcome.main()))
    for trial in outcome.failed if failed is None else failed:
        say(f"failed: {trial['arm']}, seed {trial['seed']}: {trial['error']}")
    say(f"report: {outcome.folder / 'study.html'}")
    say(f"figures: {outcome.folder / 'trials.parquet'}")


def _table(title: str, rows: list[Any]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("arm or contrast" if any(row["contrast"] for row in rows) else "arm")
    for heading in ("mean", "sd", "against\nbaseline", "p", "need"):
        table.add_column(heading, justify="right")
    table.add_column("in words")
    for row in rows:
        compared = row["baseline"] is not None or row["contrast"]
        table.add_row(
            escape(row["arm"]),
            DASH if row["contrast"] else _number(row["mean"]),
            _number(row["sd"]),
            _number(row["difference"], "+.4f") if compared else "baseline",
            _number(row.get("p_value"), ".3f"),
            _number(row.get("pairs_needed"), ",d"),
            row.get("words") or "",
        )
    return table


def _number(value: float | None, form: str = ".4f") -> str:
    return DASH if value is None else format(value, form)
