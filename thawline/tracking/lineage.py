"""What a version says of itself: its data, recipe, code, metrics and verdict, as tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.model.bundle import Meta
from thawline.tracking.fetch import read_origin
from thawline.tracking.origin import git_commit
from thawline.tracking.pipeline import RUN_ID_TAG, STAGE_TAG
from thawline.tracking.run import Run
from thawline.tracking.server import explained

PARENT_TAG = "thawline.parent_run_id"
MAX_TAG_LENGTH = 5_000
"""What every back end of MLflow stores of a version's tag."""
STAGES = ("windows", "pretrain", "finetune", "evaluate")
SHARED_STAGES = ("windows", "pretrain")
"""Those whose outputs a pipeline run may take from its cache, or a user from an earlier run."""


def read_evaluation(evaluation_dir: str | Path) -> dict[str, Any]:
    """Reads `evaluation.json`.

    Raises:
        TrackingError: A missing or damaged file.
    """
    path = Path(evaluation_dir) / "evaluation.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree["passed"], bool) or not isinstance(tree["metrics"], dict):
            raise TypeError("`passed` or `metrics` is of the wrong kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path} cannot be read: {error}", "evaluate the model again: `thawline evaluate`"
        ) from error
    return tree


def version_tags(
    config: Config, meta: Meta, evaluation: Mapping[str, Any], run: Run
) -> dict[str, str]:
    """The tags of a new version.

    Args:
        config: Says what the table and the catalog started from.
        meta: Of the model.
        evaluation: `evaluation.json`.
        run: The run that registers it.

    Raises:
        TrackingError: The server's refusal.
    """
    tags = {
        PARENT_TAG: run.pipeline_run_id,
        "thawline.data_version": meta.data_version,
        "thawline.recipe": meta.recipe,
        "thawline.version": meta.thawline_version,
        "thawline.git_commit": git_commit(),
        **_verdict(evaluation),
        **_figures(evaluation["metrics"], meta.actions[0]),
        **_origin(config),
        **_runs(config, run, meta.data_version),
    }
    return {key: _cut(value) for key, value in tags.items() if value}


def _verdict(evaluation: Mapping[str, Any]) -> dict[str, str]:
    champion = evaluation.get("champion") or {}
    compared = f"{champion['name']}/{champion['version']}" if champion.get("version") else ""
    return {
        "thawline.gate": "passed" if evaluation["passed"] else "failed",
        "thawline.gate.reasons": "; ".join(evaluation.get("reasons", [])),
        "thawline.compared_with": compared,
    }


def _figures(metrics: Mapping[str, Any], action: str) -> dict[str, str]:
    """AUC of the primary action by hold-out, pooled and by tier; of the whole, two more figures."""
    tags = {}
    for holdout, tree in metrics.items():
        pooled = tree.get("pooled", {}).get(action, {})
        for figure in ("auc", "log_loss", "calibration"):
            tags[f"thawline.{figure}.{action}.{holdout}"] = _figure(pooled.get(figure))
        for tier, actions in tree.get("tiers", {}).items():
            auc = actions.get(action, {}).get("auc")
            tags[f"thawline.auc.{action}.{holdout}.{tier}"] = _figure(auc)
    return tags


def _origin(config: Config) -> dict[str, str]:
    """What the item rows and the catalog started from, where it was more than this run's data."""
    start = config.pretrain.start_from
    return {
        "thawline.table_started_from": (start and read_origin(Path(start))) or start or "",
        "thawline.catalog_extends": config.windows.previous or "",
    }


def _runs(config: Config, run: Run, data_version: str) -> dict[str, str]:
    """The runs that made what went into the model, by stage.

    Of what no run of this pipeline run made, the newest one of the same data: the pipeline's cache
    or the user took its output.
    """
    with explained(config, "looking for the runs of the stages"):
        own = run.client.get_run(run.pipeline_run_id)
        experiments = [own.info.experiment_id]
        children = run.client.search_runs(
            experiments,
            f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run.pipeline_run_id}' and "
            "attributes.status = 'FINISHED'",
        )
        # The newest comes first, and of a stage that was tried again the last attempt counts.
        found = {child.data.tags.get(STAGE_TAG): child for child in reversed(list(children))}
        for stage in [stage for stage in SHARED_STAGES if stage not in found]:
            same_data = run.client.search_runs(
                experiments,
                f"tags.`{STAGE_TAG}` = '{stage}' and attributes.status = 'FINISHED' and "
                f"tags.`thawline.data_version` = '{data_version}'",
                max_results=1,
            )
            if same_data:
                found[stage] = same_data[0]
    runs = {f"thawline.run.{stage}": found[stage].info.run_id for stage in STAGES if stage in found}
    return {RUN_ID_TAG: own.data.tags.get(RUN_ID_TAG, ""), **runs}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TAG_LENGTH else text[: MAX_TAG_LENGTH - 1] + "…"
