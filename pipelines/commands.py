"""Commands that `thawline` shows where the `kubeflow` extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thawline.errors import ThawlineError

COMPILED = Path(__file__).parent / "compiled"
"""Where the compiled pipelines of this package are."""


def compile_pipelines(
    output: Annotated[
        Path | None,
        typer.Option(help="Folder to write to. Without it, the files of this package are written."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of every stage, e.g. registry.example/thawline:1.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a file is out of date.")
    ] = False,
) -> None:
    """Compile the Kubeflow pipelines to YAML, ready to upload.

    Without --output, the READMEs of the components are written as well.
    """
    files = generated_files(output, image)
    if check:
        stale = [path for path, text in files.items() if _read(path) != text]
        if stale:
            raise ThawlineError(
                f"out of date: {', '.join(str(path) for path in stale)}",
                "run `thawline compile` and commit what it writes",
            )
        typer.echo(f"{len(files)} files are up to date")
        return
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        typer.echo(path)


def generated_files(output: Path | None = None, image: str | None = None) -> dict[Path, str]:
    """Every generated file and what it should hold.

    Args:
        output: Folder of the compiled pipelines. None: this package's, and the components' READMEs
            are among the files.
        image: Image of every stage. None: the default one.

    Raises:
        ThawlineError: kfp is not installed, or a pipeline's references dangle.
    """
    try:
        from components import COMPONENTS
        from components.factory import IMAGE
        from components.readme import readme, readme_path
        from pipelines.compile import compile_text
    except ModuleNotFoundError as error:
        raise ThawlineError(
            f"Kubeflow's SDK is not installed: {error}", "pip install 'thawline[kubeflow]'"
        ) from error
    files = {(output or COMPILED) / "retrain.yaml": compile_text(image or IMAGE)}
    if output is None:
        files |= {readme_path(component): readme(component) for component in COMPONENTS}
    return files


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
