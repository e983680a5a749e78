"""`thawline compare`: by how much models differ, and by how much they could by chance."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from thawline.cli.common import (
    ConfigOption,
    DatasetOption,
    SetOption,
    console,
    input_folder,
    read,
    say,
)
from thawline.errors import ConfigError

if TYPE_CHECKING:
    from thawline.stages.compare import Comparison

SHOWN = ("auc", "log_loss", "calibration")
"""Figures in the table and the plot where none are asked for."""
DASH = "\N{EN DASH}"


def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A B",
            help="Two evaluation folders, files of scores, model folders, `models:/` URIs or ids "
            "of MLflow runs; or several a side with `vs` between them, paired by seed.",
        ),
    ] = None,
    side_a: Annotated[
        list[str] | None, typer.Option("--a", help="A run of side A, or a glob; repeatable.")
    ] = None,
    side_b: Annotated[
        list[str] | None, typer.Option("--b", help="A run of side B, or a glob; repeatable.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    dataset: DatasetOption = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            "--figure",
            "-f",
            help=f"Show this figure, such as `user_auc`; repeatable. Default: {', '.join(SHOWN)}.",
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=100, help="Resamples of the users, for one model a side.")
    ] = 1_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the differences: a .svg, .png or .html file.")
    ] = None,
) -> None:
    """Compare models on the same requests, or recipes over seeds: B minus A with intervals.

    By users: `compare runs/a/evaluation runs/b/evaluation`. By seeds:
    `compare runs/a-*/evaluation vs runs/b-*/evaluation`.
    """
    settings = read(config, overrides)
    a, b = _sides(sides or [], side_a or [], side_b or [])
    from thawline.evaluation.compare_plot import SUFFIXES, write_plot
    from thawline.stages import compare as stage

    if plot is not None and plot.suffix not in SUFFIXES:
        raise ConfigError(
            f"--plot {plot}: no picture ends so", f"name a {', '.join(SUFFIXES)} file"
        )
    folder = input_folder(settings, dataset, "dataset")
    found = stage.run(settings, a, b, folder, resamples=resamples)
    chosen = {holdout: _chosen(rows, figure or SHOWN) for holdout, rows in found.rows.items()}
    if as_json:
        typer.echo(json.dumps(found.tree(), indent=2))
    else:
        for holdout, rows in chosen.items():
            _show(found, holdout, rows)
        for note in found.notes:
            say(f"note: {note}")
    if plot is not None:
        write_plot(plot, chosen, f"A: {_named(found.a)}   B: {_named(found.b)}")
        if not as_json:
            say(f"plot: {plot}")


def _sides(given: list[str], a: list[str], b: list[str]) -> tuple[list[str], list[str]]:
    if (a or b) and not given:
        return _expanded(a), _expanded(b)
    if not a and not b:
        if "vs" in given:
            place = given.index("vs")
            return given[:place], given[place + 1 :]
        if len(given) == 2:
            return given[:1], given[1:]
    raise ConfigError(
        f"compare got {len(given)} models{' beside --a and --b' if a or b else ''}",
        "name two, or several a side: `compare a1 a2 vs b1 b2`, or with --a and --b",
    )


def _expanded(names: list[str]) -> list[str]:
    """Globs as the files and folders that they match, in order."""
    found = []
    for name in names:
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not matches:
            raise ConfigError(f"nothing matches {name}", "check the glob")
        found += matches
    return found


def _chosen(
    rows: list[dict[str, Any]], figures: list[str] | tuple[str, ...]
) -> list[dict[str, Any]]:
    known = list(dict.fromkeys(row["figure"] for row in rows))
    for figure in figures:
        if figure not in known:
            raise ConfigError(f"--figure: there is no {figure!r}", f"choose of {', '.join(known)}")
    return [row for row in rows if row["figure"] in figures]


def _show(found: Comparison, holdout: str, rows: list[dict[str, Any]]) -> None:
    """A table a figure; a difference that is no chance stands bold."""
    size = ""
    if found.by == "users" and rows:
        size = f", {rows[0]['requests']:,} requests of {rows[0]['users']:,} users"
    say(f"{holdout}: B minus A with 95 % intervals{size}")
    say(f"A: {_named(found.a)}")
    say(f"B: {_named(found.b)}")
    for action, figure in dict.fromkeys((row["action"], row["figure"]) for row in rows):
        own = [row for row in rows if (row["action"], row["figure"]) == (action, figure)]
        console().print(_table(f"{action} {figure}", own, found.by == "seeds"))


def _table(title: str, rows: list[dict[str, Any]], seeds: bool) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("slice", min_width=6)
    for heading, width in (("A", 6), ("B", 6), ("B - A", 7), ("interval", 15), ("could\nshow", 6)):
        table.add_column(heading, justify="right", min_width=width)
    for heading in ("n", "agree", "p", "need") if seeds else ():
        table.add_column(heading, justify="right")
    for row in rows:
        certain = row["low"] is not None and not row["low"] <= 0 <= row["high"]
        interval = DASH
        if row["low"] is not None:
            interval = f"{row['low']:+.4f} {row['high']:+.4f}"
        cells = [
            row["slice"],
            _number(row["a"]),
            _number(row["b"]),
            _number(row["difference"], "+.4f"),
            interval,
            _number(row["smallest_effect"]),
        ]
        if seeds:
            cells += [
                str(row["n"]),
                _number(row["agreement"], ".0%"),
                _number(row["p_value"], ".3f"),
                _number(row["pairs_needed"], ",d"),
            ]
        table.add_row(*cells, style="bold" if certain else None)
    return table


def _number(value: float | None, form: str = ".4f") -> str:
    return DASH if value is None else format(value, form)


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} runs, {names[0]} to {names[-1]}"
