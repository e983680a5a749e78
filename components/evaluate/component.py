"""Scores the hold-outs, writes the report and decides whether the model may be registered."""

from kfp import dsl

from components.factory import component


@component
def evaluate(
    config: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    classification: dsl.Output[dsl.ClassificationMetrics],
    report: dsl.Output[dsl.HTML],
) -> bool:
    """Scores the hold-outs, writes the report and decides whether the model may be registered.

    Args:
        config: The resolved config, as YAML text.
        dataset: The dataset folder of `windows`.
        model: The model folder of `finetune`.

    Returns:
        evaluation: The evaluation folder: `evaluation.json`, `report.html` and the scores.
        metrics: Every defined figure, by hold-out, tier and action.
        classification: The primary action's ROC curve on the gate's hold-out, and the confusion
            matrix at the threshold that calls as many candidates positive as are.
        report: The report, for the UI to show.
        Output: Whether the model passed the gate.
    """
    import math
    import shutil
    from pathlib import Path

    from thawline.evaluation.classification import classify
    from thawline.evaluation.holdouts import flat_metrics
    from thawline.stages import evaluate as stage
    from thawline.stages.task import read_config
    from thawline.tracking import pipeline

    parsed = read_config(config)
    verdict = stage.run(
        parsed,
        dataset.path,
        model.path,
        evaluation.path,
        parent_run_id=pipeline.find_parent(parsed),
    )
    evaluation.metadata["passed"] = verdict.passed
    evaluation.metadata["reasons"] = "; ".join(verdict.reasons)
    for name, value in flat_metrics(verdict.metrics).items():
        # A figure that is not finite cannot be stored in a Metrics artifact.
        if value is not None and math.isfinite(value):
            metrics.log_metric(name, float(value))
    found = classify(verdict.metrics[parsed.gate.holdout])
    if found is not None:
        classification.log_roc_curve(found.fpr, found.tpr, found.threshold)
        classification.log_confusion_matrix([f"no {found.action}", found.action], found.confusion)
    shutil.copyfile(Path(evaluation.path) / "report.html", report.path)
    return bool(verdict.passed)
