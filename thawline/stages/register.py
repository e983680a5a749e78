"""The registration stage: a model folder and its evaluation in, a registered version out."""

from __future__ import annotations

from pathlib import Path

from thawline.config import Config
from thawline.errors import TrackingError
from thawline.folders import whole_folder
from thawline.tracking.registry import Registration, read_evaluation, register
from thawline.tracking.runs import stage_run


def run(
    config: Config,
    model: str | Path,
    evaluation: str | Path,
    out: str | Path,
    *,
    parent_run_id: str = "",
) -> Registration:
    """Registers the model, gives the version the alias and writes `out`/registration.json.

    Running it again for the same parent run gives the same version.

    Raises:
        TrackingError: The evaluation did not pass, or the registry cannot be used.
    """
    verdict = read_evaluation(evaluation)
    if not verdict["passed"]:
        reasons = "; ".join(verdict.get("reasons", [])) or "no reason is given"
        raise TrackingError(
            f"{model} did not pass the gate, so it is not registered: {reasons}",
            "train a better model, or change the rules under `gate` and evaluate again",
        )
    with (
        stage_run(config, "register", parent_run_id) as tracked,
        whole_folder(out) as folder,
    ):
        registration = register(config, model, evaluation, tracked)
        (folder / "registration.json").write_text(registration.to_json(), encoding="utf-8")
        tracked.log_artifact(folder / "registration.json")
    return registration
