"""The evaluation stage: a dataset and a model folder in, metrics, a report and a verdict out.

The verdict compares with the champion (`champion`), which is scored on the same hold-outs.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thawline.config import Config, dump_config
from thawline.data.audit import audited
from thawline.data.manifest import Dataset, Split
from thawline.errors import DataError
from thawline.evaluation.gate import decide, require_rules
from thawline.evaluation.holdouts import all_metrics
from thawline.evaluation.report import write_report
from thawline.evaluation.score_file import write_scores
from thawline.evaluation.scored import Scored
from thawline.folders import whole_folder
from thawline.model.bundle import Bundle
from thawline.stages.champion import Match, find_champion
from thawline.stages.machine import prepare_machine
from thawline.tracking.runs import stage_run


@dataclass(frozen=True)
class Verdict:
    """Whether a model may be registered, and why."""

    passed: bool
    reasons: list[str]
    metrics: dict[str, Any]
    champion: dict[str, Any] | None = None
    """The champion's figures and the comparison, as in `evaluation.json`."""


def run(
    config: Config,
    dataset: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    parent_run_id: str = "",
    page: bool = True,
) -> Verdict:
    """Scores the model and the champion on each hold-out and writes the evaluation folder `out`.

    The folder holds `evaluation.json` (everything that the report shows), `report.html` (unless no
    `page` is wanted) and the model's scores of each hold-out, `scores/<hold-out>.parquet`.

    Raises:
        ConfigError: A rule of the gate on an action that the dataset does not have.
        DataError: A model of another dataset, an error of the dataset's audit that `audit.waive`
            does not name, or a champion that cannot be compared with.
        TrackingError: The registry, which names the champion, does not answer.
    """
    device = prepare_machine(config.runtime)
    data = Dataset.open(dataset)
    bundle = Bundle.load(model).to(device)
    if bundle.meta.data_version != data.manifest.data_version:
        raise DataError(
            f"{model} was trained on data_version {bundle.meta.data_version}; "
            f"{dataset} is {data.manifest.data_version}",
            "evaluate a model on the dataset that it was trained on",
        )
    audit = audited(config, data)
    audit.require()
    require_rules(config.gate, data.manifest.actions)
    with (
        stage_run(config, "evaluate", parent_run_id) as tracked,
        whole_folder(out) as folder,
        tempfile.TemporaryDirectory() as scratch,
    ):
        champion, without = find_champion(config, data, Path(scratch), device)
        match = Match.of(config, data, champion)

        def keep(split: Split, scored: Scored) -> None:
            write_scores(
                folder / "scores" / f"{split}.parquet",
                scored,
                data.catalog,
                model=f"{bundle.meta.recipe}, seed {bundle.meta.seed}",
                data_version=data.manifest.data_version,
            )
            match.play(split, scored)

        # The config may say something else of them than that which the model was trained by.
        tables = bundle.meta.tables
        metrics = all_metrics(
            config,
            data,
            bundle.score,
            full=True,
            tables=tables,
            bundle=bundle,
            on_scored=keep,
        )
        decision = decide(
            config.gate,
            metrics,
            data.manifest.actions,
            figures=match.figures,
            hit_at=config.evaluation.hit_at,
            findings=audit.findings,
            without=without,
        )
        epochs = json.loads((Path(model) / "epochs.json").read_text(encoding="utf-8"))
        # Models of earlier versions have none.
        schedule = Path(model) / "schedule.json"
        facts = {
            "title": config.tracking.model_name,
            "passed": decision.passed,
            "reasons": decision.reasons,
            "gate": decision.tree(),
            "champion": match.facts(),
            "metrics": metrics,
            "epochs": epochs,
            "model": bundle.meta.model_dump(mode="json"),
            "dataset": data.manifest.model_dump(mode="json"),
            "audit": audit.model_dump(mode="json"),
            "config": dump_config(config),
        }
        if schedule.exists():
            facts["schedule"] = json.loads(schedule.read_text(encoding="utf-8"))
        (folder / "evaluation.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        if page:
            write_report(folder / "report.html", facts)
        tracked.log_params({"data_version": data.manifest.data_version})
        tracked.log_metrics(
            {name: _figures(tree) for name, tree in metrics.items()}, step=len(epochs)
        )
        tracked.log_artifact(folder / "evaluation.json")
        if page:
            tracked.log_artifact(folder / "report.html")
        if (folder / "scores").exists():
            tracked.log_artifact(folder / "scores")
    return Verdict(decision.passed, decision.reasons, metrics, match.facts())


def _figures(tree: dict[str, Any]) -> dict[str, Any]:
    """What MLflow gets of a metrics tree: slices, intervals and curves are in the artifact."""
    unlogged = ("slices", "intervals", "curves")
    return {key: value for key, value in tree.items() if key not in unlogged and value is not None}
