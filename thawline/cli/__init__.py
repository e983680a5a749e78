"""The `thawline` command: one subcommand a stage, and `run` for all of them.

Heavy imports stand inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from thawline import __version__, logs
from thawline.cli import compare, doctor, experiment, explore, figures, registry, stages, study
from thawline.errors import ThawlineError

app = typer.Typer(
    help="Train recommenders whose ID embedding tables survive more than one epoch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Pipeline": {
        "run": stages.run,
        "simulate": stages.simulate,
        "windows": stages.windows,
        "audit": stages.audit,
        "pretrain": stages.pretrain,
        "finetune": stages.finetune,
        "evaluate": stages.evaluate,
        "register": stages.register,
    },
    "Study": {
        "study": study.study,
        "explore": explore.explore,
    },
    "Models": {
        "compare": compare.compare,
        "versions": registry.versions,
        "promote": registry.promote,
        "rollback": registry.rollback,
        "fetch": registry.fetch,
        "table": registry.table,
        "score": registry.score,
    },
    "Config and figures": {
        "doctor": doctor.doctor,
        "config": figures.show_config,
        "recipes": figures.recipes,
        "theory": figures.theory,
        "plan": figures.plan,
    },
}
"""The commands, as `--help` shows them."""


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(experiment.app, name="experiment", rich_help_panel="Study")
for _point in entry_points(group="thawline.commands"):
    app.command(_point.name, rich_help_panel="Kubeflow")(_point.load())


def main() -> None:
    """Runs the command; errors that a user can act on are printed without a traceback."""
    try:
        app()
    except ThawlineError as error:
        logs.fail(error)
        sys.exit(2)
