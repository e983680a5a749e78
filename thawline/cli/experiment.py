"""`thawline experiment`: designed experiments, each a subcommand; all of them; what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from typer.core import TyperGroup

from thawline.cli.common import (
    ConfigOption,
    SetOption,
    console,
    escape,
    input_folder,
    read,
    say,
)
from thawline.cli.study import show_outcome, with_study
from thawline.cli.study_table import DASH, progress
from thawline.config import Config

if TYPE_CHECKING:
    from thawline.stages.study import Show
    from thawline.study.experiments import Experiment

GridOption = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        "-g",
        metavar="KEY=VALUE,VALUE",
        help="Crosses every arm with values of a config key, e.g. "
        "`tables.item.learning_rate=0.02,0.2`; repeatable.",
    ),
]
SeedsOption = Annotated[
    str | None, typer.Option(help="E.g. `0,1,2`. Default: the config's `study.seeds`.")
]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Trials at a time; they divide the cores.")
]
MetricOption = Annotated[str | None, typer.Option(help="Shown first, e.g. `user_auc`.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of all experiments, whose trials they share. Default: `<workdir>/experiments`."
    ),
]
DatasetOption = Annotated[
    str | None, typer.Option(help="A dataset folder or URL. Default: what is needed is built.")
]


class _Experiments(TyperGroup):
    """Has a command for each experiment, made when it is asked for: they are slow to import."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The experiments in their order, and what concerns all of them."""
        from thawline.study.experiments import EXPERIMENTS

        return [*EXPERIMENTS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None where there is none."""
        from thawline.study.experiments import EXPERIMENTS

        if cmd_name in EXPERIMENTS:
            return _command(EXPERIMENTS[cmd_name])
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Experiments,
    help="Ask one question of your data: run a designed experiment and get a page that answers it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("all", rich_help_panel="All of them")
def run_all(
    config: ConfigOption = None,
    overrides: SetOption = None,
    grid: GridOption = None,
    seeds: SeedsOption = None,
    jobs: JobsOption = None,
    metric: MetricOption = None,
    dataset: DatasetOption = None,
    out: OutOption = None,
) -> None:
    """Run every experiment that the config can answer.

    Says which it leaves out and why; one that fails stops no other. The same command goes on where
    it was stopped.
    """
    from thawline.stages import experiment as stage

    settings = _settings(config, overrides, grid, seeds, jobs, metric)
    found = input_folder(settings, dataset, "dataset") if dataset is not None else None

    @contextmanager
    def told(experiment: Experiment) -> Iterator[Show]:
        say(f"{experiment.name}: {experiment.title}")
        with progress(settings.study.metric) as show:
            yield show

    ran = []
    for each in stage.run_all(settings, out, dataset=found, progress=told):
        ran.append(each)
        if each.outcome is not None:
            show_outcome(each.outcome, stage.failures_of(each.experiment, each.outcome))
        elif each.error is not None:
            say(f"{each.experiment.name} failed: {each.error}")
    _sum_up(ran)
    say(f"front page: {stage.folder_of(settings, out) / stage.INDEX}")
    if any(each.error is not None or each.failures for each in ran):
        say("the same command tries again what failed")
        raise typer.Exit(1)


@app.command("list", rich_help_panel="All of them")
def show_list(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Say what each experiment asks, how many trials it takes, and what the config lacks for it."""
    from thawline.stages import experiment as stage
    from thawline.study.design import Design
    from thawline.study.experiments import EXPERIMENTS

    settings = _settings(config, overrides)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("experiment", "asks", "trials"):
        table.add_column(heading, justify="right" if heading == "trials" else "left")
    for name, each in EXPERIMENTS.items():
        why = stage.why_not(settings, each)
        trials = DASH
        if not why and each.measure is None:
            trials = f"{len(Design.of(each.lay_out(settings)).trials()):,d}"
        text = escape(each.question) + (f"\n[yellow]cannot run: {escape(why)}[/]" if why else "")
        table.add_row(name, text, trials)
    console().print(table)


def _command(experiment: Experiment) -> Any:
    """The subcommand of an experiment."""
    own = typer.Typer(
        rich_markup_mode="markdown",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    reported = "\n\n".join(escape(sentence) for sentence in experiment.reported)
    own.command(
        experiment.name,
        help=f"{experiment.question}\n\nReported elsewhere:\n\n{reported}",
        short_help=experiment.title,
        rich_help_panel="Experiments",
    )(_runner(experiment.name))
    return typer.main.get_command(own)


def _runner(name: str) -> Callable[..., None]:
    def run(
        config: ConfigOption = None,
        overrides: SetOption = None,
        grid: GridOption = None,
        seeds: SeedsOption = None,
        jobs: JobsOption = None,
        metric: MetricOption = None,
        dataset: DatasetOption = None,
        out: OutOption = None,
    ) -> None:
        from thawline.stages import experiment as stage

        settings = _settings(config, overrides, grid, seeds, jobs, metric)
        found = input_folder(settings, dataset, "dataset") if dataset is not None else None
        with progress(settings.study.metric) as show:
            outcome = stage.run(settings, name, out, dataset=found, show=show)
        failed = stage.failures_of(stage.find(name), outcome)
        show_outcome(outcome, failed)
        say(f"front page: {stage.folder_of(settings, out) / stage.INDEX}")
        if failed:
            say(f"{len(failed)} trials failed; the same command tries them again")
            raise typer.Exit(1)

    return run


def _settings(
    config: Path | None,
    overrides: list[str] | None,
    grid: list[str] | None = None,
    seeds: str | None = None,
    jobs: int | None = None,
    metric: str | None = None,
) -> Config:
    """The config with the options; its own grid and arms are those of `thawline study`."""
    settings = read(config, overrides)
    own = settings.study.model_copy(update={"grid": {}, "arms": {}, "contrasts": {}})
    return with_study(
        settings.model_copy(update={"study": own}),
        grid or [],
        seeds,
        baseline=None,
        jobs=jobs,
        metric=metric,
        pretrain=None,
        halving=None,
        eta=None,
    )


def _sum_up(ran: list[Any]) -> None:
    done = [each.experiment.name for each in ran if each.outcome is not None]
    say(f"experiments run: {', '.join(done) or 'none'}")
    for each in ran:
        if each.left_out:
            say(f"left out: {each.experiment.name}: {each.left_out}")
        elif each.error is not None:
            say(f"failed: {each.experiment.name}")
        elif each.failures:
            say(f"with failed trials: {each.experiment.name}")
