"""Collects the trials of a study into figures, paired statistics and one report."""

from kfp import dsl

from components.factory import component


@component
def study(
    config: str,
    gathered: dsl.Input[list[dsl.Artifact]],
    study: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Collects the trials of a study into figures, paired statistics and one report.

    Args:
        config: The resolved config, as YAML text.
        gathered: The folders of `gather`.

    Returns:
        study: The study's folder: `trials.parquet`, `study.json`, `study.html` and the trials.
        metrics: The study's metric of each arm, a mean over the seeds.
        report: The report, for the UI to show.
    """
    import shutil
    from pathlib import Path

    from thawline.stages import study_tasks

    outcome = study_tasks.collect(config, [each.path for each in gathered], study.path)
    for row in outcome.main():
        metrics.log_metric(row["arm"], float(row["mean"]))
    study.metadata["trials"] = len(outcome.facts["trials"])
    study.metadata["failed"] = len(outcome.failed)
    shutil.copyfile(Path(study.path) / "study.html", report.path)
