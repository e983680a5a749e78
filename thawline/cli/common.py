"""What the commands share: options, the config, folders in and out, the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from thawline.config import Config, load_config, parse_config
from thawline.errors import ConfigError

EMBEDDED_DEFAULT = "simulate: {}\n"
"""What runs where no config file is given: the simulated feed."""

_T = TypeVar("_T")

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


def read(config: Path | None, overrides: Sequence[str] | None) -> Config:
    """The config that a command runs with."""
    if config is None:
        return parse_config(EMBEDDED_DEFAULT, overrides or (), source="the embedded default")
    return load_config(config, overrides or ())


def input_folder(settings: Config, given: str | None, name: str) -> Path:
    """A folder of an earlier stage, fetched into the workdir where it is remote."""
    from thawline.data.storage import fetch_folder, is_remote

    if given is not None and is_remote(given):
        return fetch_folder(given, Path(settings.workdir))
    return Path(given or Path(settings.workdir) / name)


@contextmanager
def output_folder(settings: Config, given: str | None, name: str) -> Iterator[Path]:
    """The folder that a stage makes; where it is remote, it is put there once it is complete."""
    from thawline.data.storage import is_remote, publish_folder

    remote = given if given is not None and is_remote(given) else None
    local = Path(settings.workdir) / name if remote or not given else Path(given)
    _require_replaceable(local, name)
    yield local
    if remote is not None and leads():
        publish_folder(local, remote)
        say(f"published: {remote}")


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


def leads() -> bool:
    """Whether this is the first process of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def plugin(group: str, name: str, option: str) -> Any:
    """What an installed package offers in a group of entry points, by name."""
    known = {point.name: point for point in entry_points(group=group)}
    if name not in known:
        raise ConfigError(f"{option}: no runner {name!r}", f"choose process, {', '.join(known)}")
    return known[name].load()


def console() -> Console:
    """Standard output."""
    return Console()


def say(text: str) -> None:
    """Prints a line as it stands."""
    console().print(escape(text), highlight=False, soft_wrap=True)


def escape(text: str) -> str:
    """Keeps rich from taking brackets for markup."""
    return text.replace("[", r"\[")


def print_lines(pictures: Iterable[tuple[str, str]]) -> None:
    """Timelines with their names behind them."""
    console = Console(highlight=False, soft_wrap=True)
    for name, line in pictures:
        console.print(f"  {line}  {name}")
    console.print()


def named(known: Mapping[str, _T], name: str, option: str) -> _T:
    """What an option names.

    Raises:
        ConfigError: It names nothing.
    """
    if name not in known:
        raise ConfigError(f"{option}: there is no {name!r}", f"choose one of {', '.join(known)}")
    return known[name]
