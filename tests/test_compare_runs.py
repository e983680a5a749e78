"""Evaluations that lie in MLflow, fetched to be compared."""

import json

import pytest
from evaluations import evaluation

from thawline.errors import TrackingError
from thawline.stages import compare
from thawline.tracking.evaluations import fetch_evaluation
from thawline.tracking.runs import stage_run, start_parent

pytest_plugins = ["mlflow_fixtures"]

UNKNOWN = "0" * 32


def test_runs_of_the_stage_or_of_the_pipeline_are_compared_like_their_folders(
    sqlite_config, tmp_path
):
    config = sqlite_config
    parent = start_parent(config, "retrain")
    folders = {}
    with stage_run(config, "windows", parent) as windows:
        pass
    for name, noise in (("a", 1.5), ("b", 0.3)):
        folder = evaluation(tmp_path / name, noise, seed=3)
        with stage_run(config, "evaluate", parent if name == "b" else "") as run:
            run.log_artifact(folder / "evaluation.json")
            run.log_artifact(folder / "scores")
        folders[name] = (run.run_id, folder)
    (run_a, folder_a), (run_b, folder_b) = folders["a"], folders["b"]
    wanted = compare.run(config, [str(folder_a)], [str(folder_b)], "", resamples=100)
    found = compare.run(config, [run_a], [run_b], "", resamples=100)
    assert found.rows == wanted.rows
    assert (found.a, found.b) == ([run_a], [run_b])
    # The pipeline's run stands for the evaluation that is its child.
    fetched = fetch_evaluation(config, parent, tmp_path / "fetched")
    assert json.loads((fetched / "evaluation.json").read_text())["model"]["seed"] == 3
    with pytest.raises(TrackingError, match="holds no evaluation"):
        fetch_evaluation(config, windows.run_id, tmp_path / "none")
    with pytest.raises(TrackingError, match=f"opening the run {UNKNOWN}"):
        compare.run(config, [run_a], [UNKNOWN], "")
