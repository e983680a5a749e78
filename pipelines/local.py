"""Runs a compiled pipeline on this machine through kfp's local runner, one process a task.

What is executed is the file that is uploaded to Kubeflow, so a laptop proves what a cluster runs.
What the local runner cannot do is listed, and asserted, in `tests/test_local_runner.py`.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.commands import COMPILED
from pipelines.stage_log import StageLog
from thawline.config import Config, dump_config
from thawline.errors import ThawlineError
from thawline.tracking import pipeline as tracked

if TYPE_CHECKING:
    from thawline.stages.pipeline import RunResult

RETRAIN = COMPILED / "retrain.yaml"


class StageError(ThawlineError):
    """A stage failed; the message holds its own error, or the last lines that it wrote."""

    def __init__(self, stage: str, what: str, remedy: str) -> None:
        """Names the stage and carries its error."""
        super().__init__(f"the stage {stage} failed: {what}", remedy)
        self.stage = stage


def run(config: Config, package: Path = RETRAIN, cache: Path | None = None) -> RunResult:
    """Executes a compiled retraining pipeline and streams what its stages print.

    Everything goes to a new folder under the config's `workdir`, with `pipeline.log` in it. Paths
    in the config are taken from the current directory. kfp allows one such run at a time in a
    process.

    Args:
        config: The config; the pipeline's other inputs stay as they are.
        package: A compiled retraining pipeline.
        cache: A folder in which the results of windows, pretrain and finetune are remembered and
            looked for. None: everything is computed.

    Raises:
        StageError: A stage failed. The MLflow runs are closed.
        ThawlineError: The local runner cannot work here.
    """
    config = with_absolute_paths(config)
    run_id = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    root = Path(config.workdir) / run_id
    with _environment({tracked.RUN_ID_VARIABLE: run_id}):
        try:
            cached = execute(package, root, {"config": dump_config(config)}, cache)
        except ThawlineError:
            raise
        except BaseException:
            # Ctrl-C ends the runner as well, which then never comes to the exit task.
            tracked.close_parent(config, "CANCELLED")
            raise
    return _result(root, cached)


def execute(
    package: Path, root: Path, arguments: Mapping[str, Any], cache: Path | None = None
) -> dict[str, Path]:
    """Executes any compiled pipeline, with its tasks' folders under the new folder `root`.

    Args:
        package: The compiled pipeline.
        root: A folder that does not exist yet.
        arguments: The pipeline's inputs.
        cache: A folder in which results are remembered and looked for, of the tasks whose results
            the pipeline lets be cached. None: everything is computed.

    Returns:
        The artifacts that came from the cache, by name.

    Raises:
        StageError: A task failed; the first one that did is named.
        ThawlineError: The local runner cannot work here.
    """
    _check_runner(package, root, arguments)
    root.mkdir(parents=True)
    with (
        StageLog(root / "pipeline.log", sys.stdout) as log,
        redirect_stdout(log),
        # Unbuffered, so that a task's lines arrive as they are printed; safe path, so that no file
        # of the current directory is imported in place of a package.
        _environment({"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*non-Python base image")
        from kfp import components, local
        from kfp.local.cache import get_local_cache

        local.init(
            local.SubprocessRunner(use_venv=False),
            pipeline_root=str(root),
            enable_caching=cache is not None,
            cache_root=None if cache is None else str(cache),
        )
        cached = _watched(get_local_cache())
        try:
            components.load_component_from_file(str(package))(**arguments)
        except RuntimeError as error:
            if log.failed is None:
                raise
            raise _stage_error(log) from error
    return cached


def _watched(cache: Any) -> dict[str, Path]:
    """The artifacts that a cache of kfp gives from now on, by name; there is no other trace."""
    given: dict[str, Path] = {}
    if cache is None:
        return given
    find = cache.get

    def get(key: str) -> Any:
        outputs = find(key)
        for name, value in (outputs or {}).items():
            if hasattr(value, "uri"):
                given[name] = Path(value.uri)
        return outputs

    cache.get = get
    return given


def with_absolute_paths(config: Config) -> Config:
    """The config with each local path made absolute: the tasks may run in another directory."""
    events = config.events
    path = events.path
    paths: str | list[str] | None = (
        [_absolute(each) for each in path] if isinstance(path, list) else path and _absolute(path)
    )
    return config.model_copy(
        update={
            "workdir": _absolute(config.workdir),
            "events": events.model_copy(
                update={"path": paths, "truth": events.truth and _absolute(events.truth)}
            ),
        }
    )


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _check_runner(package: Path, root: Path, arguments: Mapping[str, Any]) -> None:
    if not package.exists():
        raise ThawlineError(f"there is no compiled pipeline {package}", "run `thawline compile`")
    # kfp replaces each `python3` in a task's command line, which holds its inputs and every path.
    if "python3" in f"{root}{arguments}":
        raise ThawlineError(
            f"kfp's local runner cannot take `python3` in a path or in the config: {root}",
            "set workdir and events.path to paths without `python3`, or use --runner process",
        )
    if shlex.quote(sys.executable) != sys.executable:
        raise ThawlineError(
            f"kfp's local runner cannot start {sys.executable}: a shell would split the path",
            "make the virtual environment at a path without spaces, or use --runner process",
        )


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    # kfp gives its tasks this process's environment and nothing else.
    before = {key: os.environ.get(key) for key in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _stage_error(log: StageLog) -> StageError:
    stage = log.failed or ""
    own = log.own_error()
    if own:
        return StageError(stage, *own)
    lines = "\n".join(f"    {line}" for line in log.last_lines())
    return StageError(stage, f"its last lines are\n{lines}", f"see {log.path}")


def _result(root: Path, cached: Mapping[str, Path]) -> RunResult:
    from thawline.stages.pipeline import RunResult

    passed = bool(_outputs(root, "evaluate")["parameterValues"]["Output"])
    evaluation = _artifact(root, "evaluate", "evaluation")
    facts = json.loads((evaluation / "evaluation.json").read_text(encoding="utf-8"))
    return RunResult(
        dataset=cached.get("dataset") or _artifact(root, "windows", "dataset"),
        table=cached.get("table") or _artifact(root, "pretrain", "table"),
        model=cached.get("model") or _artifact(root, "finetune", "model"),
        evaluation=evaluation,
        registration=_artifact(root, "register", "registration") if passed else None,
        passed=passed,
        reasons=facts["reasons"],
        parent_run_id=_outputs(root, "start")["parameterValues"]["parent_run_id"],
    )


def _artifact(root: Path, task: str, name: str) -> Path:
    return Path(_outputs(root, task)["artifacts"][name]["artifacts"][0]["uri"])


def _outputs(root: Path, task: str) -> Any:
    # The runner makes one folder a run under the root, with one folder a task.
    (path,) = root.glob(f"*/{task}/executor_output.json")
    return json.loads(path.read_text(encoding="utf-8"))
