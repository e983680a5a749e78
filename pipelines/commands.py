"""Commands that `thawline` shows where the `kubeflow` extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thawline.errors import ThawlineError

COMPILED = Path(__file__).parent / "compiled"
"""Where the compiled pipelines of this package are."""


def compile_pipelines(
    profile: Annotated[
        str | None,
        typer.Option(
            help="local, cpu, gpu, gpu-multinode, or the path of a YAML file of your own. Without "
            "it, every one of these four is compiled."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to. Without it, the files of this package are written; those of "
            "a profile of your own come to the current folder."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image of every stage, e.g. registry.example/thawline:1.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a file is out of date.")
    ] = False,
) -> None:
    """Compile the Kubeflow pipelines to YAML, ready to upload.

    Without --output and --profile, the READMEs of the components are written as well.
    """
    files = generated_files(output, image, profile)
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


def generated_files(
    output: Path | None = None, image: str | None = None, profile: str | None = None
) -> dict[Path, str]:
    """Every generated file and what it should hold.

    Args:
        output: Folder of the compiled pipelines. None: this package's, and the components' READMEs
            are among the files.
        image: Image of every stage. None: the profile's.
        profile: Of the pipelines. None: each one of this package's.

    Raises:
        ThawlineError: kfp is not installed, a profile that cannot be used, an image that is not
            pinned, or a pipeline's references dangle.
    """
    try:
        from components import COMPONENTS
        from components.readme import readme, readme_path
        from pipelines.compile import PIPELINES, compile_text
        from pipelines.profiles import BUILT_IN, load_profile
    except ModuleNotFoundError as error:
        raise ThawlineError(
            f"Kubeflow's SDK is not installed: {error}", "pip install 'thawline[kubeflow]'"
        ) from error
    folder = output or (COMPILED if profile in (None, *BUILT_IN) else Path())
    files = {}
    for name in (profile,) if profile else BUILT_IN:
        chosen = load_profile(name)
        if image:
            chosen = chosen.with_image(image)
        for pipeline in PIPELINES:
            files[folder / compiled_name(chosen.name, pipeline)] = compile_text(chosen, pipeline)
    if output is None and profile is None:
        files |= {readme_path(component): readme(component) for component in COMPONENTS}
    return files


def compiled_name(profile: str, pipeline: str = "retrain") -> str:
    """The file name of a pipeline for a profile."""
    return f"{pipeline}.yaml" if profile == "local" else f"{pipeline}.{profile}.yaml"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
