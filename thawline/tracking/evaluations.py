"""What a run of the evaluation stage left with MLflow, back in a folder."""

from __future__ import annotations

from pathlib import Path

import mlflow.artifacts
from mlflow.entities import Run as MlflowRun
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.tracking.server import connect, explained, tracking_uri

STAGE_TAG = "thawline.stage"
KEPT = ("evaluation.json", "scores")
"""What an evaluation's run holds that comparisons need."""


def fetch_evaluation(config: Config, run_id: str, folder: Path) -> Path:
    """Fetches `evaluation.json` and the scores of a run of the stage.

    Args:
        config: Names the server.
        run_id: Of the stage's run, or of the pipeline run that it is part of.
        folder: Where they are put.

    Returns:
        The folder.

    Raises:
        TrackingError: No such run, one without an evaluation, the server's refusal.
    """
    run = _evaluation_run(config, run_id)
    with explained(config, f"fetching the evaluation of run {run_id}"):
        held = {each.path for each in connect(config).list_artifacts(run.info.run_id)}
        if KEPT[0] not in held:
            raise TrackingError(
                f"the run {run_id} holds no evaluation (no {KEPT[0]})",
                "name a run of the evaluate stage that has finished",
            )
        for name in KEPT:
            if name in held:
                mlflow.artifacts.download_artifacts(
                    run_id=run.info.run_id,
                    artifact_path=name,
                    dst_path=str(folder),
                    tracking_uri=tracking_uri(config),
                )
    return folder


def _evaluation_run(config: Config, run_id: str) -> MlflowRun:
    """The run itself, or its newest child that evaluated."""
    client = connect(config)
    with explained(config, f"opening the run {run_id}"):
        run = client.get_run(run_id)
        if run.data.tags.get(STAGE_TAG) == "evaluate":
            return run
        children = client.search_runs(
            [run.info.experiment_id],
            f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{run_id}' and tags.`{STAGE_TAG}` = 'evaluate'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
    return children[0] if children else run
