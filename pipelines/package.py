"""What is uploaded to Kubeflow: a compiled pipeline, named by its content, and its inputs."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipelines.connection import not_installed
from thawline.config import parse_config
from thawline.errors import ConfigError, ThawlineError

if TYPE_CHECKING:
    from pipelines.kfp_client import Kfp

WORKFLOW_BYTES = 1_572_864
"""What Kubernetes takes of one object: the workflow of a run holds the pipeline and its inputs."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NUMBERS = {"NUMBER_INTEGER": "a whole number", "NUMBER_DOUBLE": "a number"}
OTHERS: dict[str, tuple[type, str]] = {
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, "a list"),
    "STRUCT": (dict, "a mapping"),
}


@dataclass(frozen=True)
class Package:
    """A compiled pipeline."""

    name: str
    """Of the pipeline; its versions share it."""
    label: str
    """Of the profile, or of the file."""
    text: str
    types: Mapping[str, str]
    """Kubeflow's type of each input, in its order."""
    required: frozenset[str]
    """The inputs without a default."""

    @property
    def version(self) -> str:
        """A name that the same content always gets: an unchanged file is not uploaded twice."""
        return f"{self.label}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def inputs(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The values of a run, of the types that the pipeline takes.

        Args:
            given: Values by name; a text is read as the input's type.
            where: What names the place in an error.

        Raises:
            ConfigError: An unknown input, one that is missing, or a value of another type.
        """
        for name in given:
            if name not in self.types:
                close = difflib.get_close_matches(name, self.types, n=1)
                meant = f"did you mean {close[0]}? " if close else ""
                raise ConfigError(
                    f"{where}: the pipeline {self.name} has no input {name!r}",
                    f"{meant}its inputs are {', '.join(self.types)}",
                )
        missing = sorted(self.required - given.keys())
        if missing:
            raise ConfigError(
                f"{where}: the input {missing[0]!r} has no default", "give it a value"
            )
        values = {
            name: _typed(value, self.types[name], f"{where}: {name}")
            for name, value in given.items()
        }
        size = len(self.text.encode()) + len(json.dumps(values).encode())
        if size > WORKFLOW_BYTES:
            raise ThawlineError(
                f"{where}: the pipeline and its inputs take {size / 2**20:.2f} MiB, and a workflow "
                f"may hold {WORKFLOW_BYTES / 2**20:.1f} MiB",
                "make the config smaller: lists belong into files that it names",
            )
        return values


def package(
    pipeline: str, profile: str, image: str | None = None, *, cache: bool = True
) -> Package:
    """One of Thawline's pipelines, or one that was compiled to a file.

    Args:
        pipeline: Its name, or the path of a file.
        profile: One of Thawline's, or the path of a YAML file. A compiled file has its own.
        image: Of every stage. None: the profile's.
        cache: False: no task takes anything from the cache.

    Raises:
        ThawlineError: Kubeflow's packages are not installed.
        ConfigError: The file, the profile or the image cannot be used.
    """
    try:
        from pipelines.compile import PIPELINES, compile_text
        from pipelines.profiles import load_profile
    except ModuleNotFoundError as error:
        raise not_installed(error) from error
    if pipeline not in PIPELINES:
        if image:
            raise ConfigError(
                f"an image is given with the compiled pipeline {pipeline}",
                "compile it with that image",
            )
        return _package(_file_text(pipeline, PIPELINES), Path(pipeline).stem, pipeline, cache)
    chosen = load_profile(profile)
    if image:
        chosen = chosen.with_image(image)
    return _package(compile_text(chosen, pipeline), chosen.name, f"the profile {profile}", cache)


def _file_text(path: str, names: Iterable[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the pipeline {path}: {error}",
            f"name one of {', '.join(names)}, or a compiled file",
        ) from error


def config_text(path: Path) -> str:
    """The text of a config file, checked.

    Raises:
        ConfigError: It cannot be read or used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "check the path") from error
    parse_config(text, source=str(path))
    return text


def find(kfp: Kfp, package: Package) -> tuple[str | None, str | None]:
    """Ids of the pipeline and of this version of it, where they are there."""
    pipeline_id = kfp.pipeline(package.name)
    return pipeline_id, kfp.version(pipeline_id, package.version) if pipeline_id else None


def upload(kfp: Kfp, package: Package) -> dict[str, str]:
    """Uploads what is not there yet; the reference by which runs name the version."""
    pipeline_id, version_id = find(kfp, package)
    pipeline_id = pipeline_id or kfp.create_pipeline(package.name)
    if version_id is None:
        about = f"{package.label}, uploaded by thawline"
        version_id = kfp.upload_version(pipeline_id, package.version, package.text, about)
    return {"pipeline_id": pipeline_id, "pipeline_version_id": version_id}


def _package(text: str, label: str, source: str, cache: bool) -> Package:
    try:
        documents = list(yaml.load_all(text, Loader=LOADER))
        name = documents[0]["pipelineInfo"]["name"]
        root = documents[0]["root"]
    except (yaml.YAMLError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source} is no compiled pipeline", "compile one with `thawline compile`"
        ) from error
    if not cache:
        # A flag at the start of a run is lost where it names a stored version (KP#10352).
        for component in (root, *documents[0].get("components", {}).values()):
            for task in component.get("dag", {}).get("tasks", {}).values():
                task["cachingOptions"] = {}
        text = yaml.safe_dump_all(documents, sort_keys=True)
        label += "-uncached"
    declared = root.get("inputDefinitions", {}).get("parameters", {})
    required = (key for key, each in declared.items() if not each.get("isOptional"))
    return Package(
        name=name,
        label=re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-"),
        text=text,
        types={key: each.get("parameterType", "STRING") for key, each in declared.items()},
        required=frozenset(required),
    )


def _typed(value: Any, kind: str, where: str) -> Any:
    if kind in NUMBERS:
        number = _number(value)
        if number is None or (kind == "NUMBER_INTEGER" and not number.is_integer()):
            raise ConfigError(f"{where}: {value!r} is not {NUMBERS[kind]}", "correct the value")
        return int(number) if kind == "NUMBER_INTEGER" else number
    if kind in OTHERS:
        wanted, words = OTHERS[kind]
        try:
            value = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            value = None
        if not isinstance(value, wanted):
            raise ConfigError(f"{where}: the value is not {words}", "correct the value")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {value!r} is not a text", "put it into quotes")
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
