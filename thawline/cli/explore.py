"""`thawline explore`: one interactive page over the studies of several datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thawline.cli.common import say


def explore(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]FOLDER...",
            help="Folders of `thawline study` or `thawline experiment`; each is a dataset to "
            "choose, called by its label.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("explorer.html"),
) -> None:
    """Put the studies of several datasets on one interactive page.

    The page of each study has the same explorer for itself; this one adds the choice of the
    dataset, and keeps arm, figure and hold-out where both have them.
    """
    from thawline.stages import explore as stage

    count = stage.run(stage.labelled(folders), out)
    say(f"explorer: {out} ({count} {'study' if count == 1 else 'studies'})")
