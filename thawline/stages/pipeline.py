"""The whole pipeline in one process: what `thawline run` does without Kubeflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from thawline.config import Config
from thawline.stages import evaluate, finetune, pretrain, register, windows
from thawline.stages.check import check
from thawline.tracking import runs


@dataclass(frozen=True)
class RunResult:
    """Where a pipeline run left its outputs."""

    dataset: Path
    table: Path
    model: Path
    evaluation: Path
    registration: Path | None
    """None where the gate refused the model."""
    passed: bool
    reasons: list[str] = field(default_factory=list)
    parent_run_id: str = ""


def run(config: Config) -> RunResult:
    """Runs the five stages in this process, into folders under the config's `workdir`."""
    check(config)
    workdir = Path(config.workdir)
    paths = {
        name: workdir / name for name in ("dataset", "table", "model", "evaluation", "registration")
    }
    parent = runs.start_parent(config, "retrain")
    status = "FAILED"
    try:
        windows.run(config, paths["dataset"], parent_run_id=parent)
        pretrain.run(config, paths["dataset"], paths["table"], parent_run_id=parent)
        finetune.run(config, paths["dataset"], paths["table"], paths["model"], parent_run_id=parent)
        verdict = evaluate.run(
            config, paths["dataset"], paths["model"], paths["evaluation"], parent_run_id=parent
        )
        if verdict.passed:
            register.run(
                config,
                paths["model"],
                paths["evaluation"],
                paths["registration"],
                parent_run_id=parent,
            )
        status = "FINISHED"
    except (KeyboardInterrupt, runs.Terminated):
        status = "KILLED"
        raise
    finally:
        runs.finish_parent(config, parent, status)
    return RunResult(
        dataset=paths["dataset"],
        table=paths["table"],
        model=paths["model"],
        evaluation=paths["evaluation"],
        registration=paths["registration"] if verdict.passed else None,
        passed=verdict.passed,
        reasons=verdict.reasons,
        parent_run_id=parent,
    )
