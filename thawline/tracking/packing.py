"""From a model folder to an MLflow model: packed, tried out, uploaded."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pyarrow as pa
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType, Array

import thawline
from thawline.config import Config
from thawline.errors import TrackingError
from thawline.model.bundle import Bundle
from thawline.tracking.run import Run
from thawline.tracking.server import explained

SERVED = Path(__file__).with_name("served.py")
ELSEWHERE = """

import sys
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
for _finder in sys.meta_path if "." not in __name__ else ():
    _spec = _finder.find_spec(__name__, None)
    _places = _spec.submodule_search_locations if _spec else None
    __path__ += [place for place in _places or () if place not in __path__]
"""
"""At the end of a package: where Thawline is installed, what was not copied is found there, and
where it is installed as editable too, which no path shows."""
REQUIREMENTS = (
    "mlflow",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "safetensors",
    "torch",
)


def signature(bundle: Bundle) -> ModelSignature:
    """Names and types of the columns; lists may have any length, optional columns may miss."""
    whole = pa.types.is_integer(bundle.catalog.item_id.type)
    ids = Array(DataType.long if whole else DataType.string)
    optional: dict[str, Array | AnyType] = {
        "history_action": Array(DataType.long),
        "history_age": Array(DataType.double),
        **{name: AnyType() for name in [*bundle.meta.context, *_id_columns(bundle)]},
    }
    inputs: list[ColSpec | TensorSpec] = [ColSpec(ids, "history"), ColSpec(ids, "candidates")]
    inputs += [ColSpec(kind, name, required=False) for name, kind in optional.items()]
    return ModelSignature(
        inputs=Schema(inputs),
        outputs=Schema([ColSpec(Array(DataType.double), name) for name in bundle.meta.actions]),
        params=ParamSchema([ParamSpec("counts", DataType.boolean, default=False)]),
    )


def input_example(bundle: Bundle) -> pd.DataFrame:
    """Two requests with different lengths, of ids that the catalog holds."""
    ids = bundle.catalog.item_id.drop_null().slice(0, 5).to_pylist()
    actions, ages = [1, 1, 1], [48.0, 5.5, 0.25]
    example: dict[str, Any] = {
        "history": [ids[:3], ids[:1]],
        "candidates": [ids[-2:], ids],
        "history_action": [actions[: len(ids)], actions[:1]],
        "history_age": [ages[: len(ids)], ages[:1]],
    }
    for name, vocabulary in bundle.meta.context.items():
        example[name] = [vocabulary[0], vocabulary[-1]] if vocabulary else ["", ""]
    example |= {name: ["1", "2"] for name in _id_columns(bundle) if name not in example}
    return pd.DataFrame(example)


def pack(config: Config, packed: Path, model_dir: Path, bundle: Bundle) -> None:
    """Makes the folder of an MLflow model, loads it and asks it for scores.

    Args:
        config: Names the server in messages.
        packed: The folder to make.
        model_dir: A model folder.
        bundle: What it holds.

    Raises:
        TrackingError: It cannot be packed, does not load, or does not score its example.
    """
    with (
        explained(config, "packing the model"),
        tempfile.TemporaryDirectory(prefix="thawline-code-") as code,
    ):
        mlflow.pyfunc.save_model(
            packed,
            python_model=str(SERVED),
            artifacts={"model": str(model_dir.absolute())},
            # The model then loads where Thawline is not installed, and with the code that made it.
            code_paths=[str(copy_code(Path(code)))],
            signature=signature(bundle),
            input_example=input_example(bundle),
            pip_requirements=[
                # A local part as in 2.13.0+cpu is in no registry.
                f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
                for package in REQUIREMENTS
            ],
            metadata={"actions": bundle.meta.actions, "data_version": bundle.meta.data_version},
        )
    _try_out(packed, bundle)


def upload(config: Config, packed: Path, run: Run) -> LoggedModel:
    """Logs a packed model as the output of a run.

    Raises:
        TrackingError: The server's refusal; the logged model is FAILED then.
    """
    with explained(config, "uploading the model"):
        experiment = run.client.get_run(run.run_id).info.experiment_id
        logged = run.client.create_logged_model(experiment, name="ranker", source_run_id=run.run_id)
        try:
            described = Model.load(str(packed))
            described.artifact_path = logged.artifact_location
            described.model_id = logged.model_id
            described.run_id = run.run_id
            described.save(str(packed / "MLmodel"))
            run.client.log_model_artifacts(logged.model_id, str(packed))
            run.client.log_outputs(run.run_id, [LoggedModelOutput(logged.model_id, step=0)])
        except BaseException:
            # Where the server is down, what it refused first must not be hidden by this.
            with contextlib.suppress(Exception):
                run.client.finalize_logged_model(logged.model_id, "FAILED")
            raise
        run.client.finalize_logged_model(logged.model_id, "READY")
    return logged


def copy_code(folder: Path) -> Path:
    """Copies what of this package the served model imports, and no more: each file is a request."""
    root = Path(thawline.__file__).parent
    todo, done = [SERVED], set()
    while todo:
        file = todo.pop()
        done.add(file)
        packages = [each / "__init__.py" for each in file.parents if each.is_relative_to(root)]
        imported = [place for name in _imports(file) for place in _places(root.parent, name)]
        todo += {*packages, *imported} - done
    for file in done:
        copy = folder / file.relative_to(root.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8")
        copy.write_text(text + ELSEWHERE * (file.name == "__init__.py"), encoding="utf-8")
    return folder / root.name


def _imports(file: Path) -> Iterator[str]:
    """The dotted names that a module imports; those that a package only offers are left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body if file.name == "__init__.py" else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _places(folder: Path, name: str) -> list[Path]:
    """The file of a module or package, if it is one of ours."""
    place = folder.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return [file for file in files if name.split(".")[0] == thawline.__name__ and file.exists()]


def _id_columns(bundle: Bundle) -> list[str]:
    """The columns of requests from which further ID tables are read."""
    return [table.column for table in bundle.meta.tables.values() if table.of == "request"]


def _try_out(packed: Path, bundle: Bundle) -> None:
    example = input_example(bundle)
    try:
        with _same_import_path():
            scores = mlflow.pyfunc.load_model(str(packed)).predict(example)
    except Exception as error:
        raise TrackingError(
            f"the packed model does not load and score: {error}",
            "fine-tune again with this Thawline; nothing was registered",
        ) from error
    for action in bundle.meta.actions:
        for row, candidates in enumerate(example["candidates"]):
            values = np.asarray(scores[action][row], float)
            if len(values) != len(candidates) or not np.isfinite(values).all():
                raise TrackingError(
                    f"the packed model scores {action} of its example as {values.tolist()}",
                    "the model has diverged: fine-tune with lower learning rates; nothing was "
                    "registered",
                )


@contextmanager
def _same_import_path() -> Iterator[None]:
    # MLflow leaves the packed model's code folder on the path, which is about to be removed.
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before
