"""The audit of a dataset: what would make a model's figures untrue, before anything trains.

What is looked at lives in `request_checks` and `item_checks`, what is found in `findings`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from thawline.config import Config, Negatives
from thawline.data import item_checks, request_checks
from thawline.data.batches import Batch, RequestReader
from thawline.data.engine import open_engine
from thawline.data.findings import SEVERITIES, AuditReport, Finding
from thawline.data.manifest import Dataset, Split
from thawline.data.negatives import NegativeSampler
from thawline.data.trivial import trivial_scores

AUDIT_FILE = "audit.json"
"""In a dataset folder, beside its manifest."""

SEED = 0
"""Of the negatives that are looked at; the evaluation has the same."""


def audit(config: Config, dataset: Dataset) -> AuditReport:
    """Looks a dataset through, with the sampler that the config sets on it.

    Args:
        config: Uses `negatives`, `audit`, `finetune.batch_size`, `windows.memory_limit` and
            `runtime.threads`.
        dataset: Every request is read once; scorers and batches look at `audit.requests`.

    Returns:
        The findings, the most severe first. Nothing is raised for them: see `AuditReport.require`.

    Raises:
        DataError: A damaged file.
        ConfigError: The dataset was built with other buckets of popularity.
    """
    impressions = dataset.manifest.impressions
    sampler = None if impressions else NegativeSampler(dataset, _fixed(config.negatives), SEED)
    train = request_checks.count_candidates(dataset, "train")
    test = request_checks.count_candidates(dataset, "next")
    found = [
        item_checks.catalogue_leak(config.negatives, impressions),
        *item_checks.only_negative_rows(train, test, sampler),
        request_checks.history_leakage(dataset),
        _trivial_scorers(config, dataset, sampler),
        item_checks.tier_sizes(dataset, test),
        item_checks.batch_overlap(_first_batches(config, dataset)),
        item_checks.popularity_drift(dataset),
        *_of_manifest(dataset),
    ]
    # Every engine's files are read by DuckDB: they are one format.
    windows = config.windows.model_copy(update={"engine": "duckdb"})
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_engine(windows, config.runtime, Path(scratch)) as engine,
    ):
        found.append(request_checks.repeated_requests(engine, dataset))
        found.append(request_checks.holdout_leakage(engine, dataset))
    return AuditReport(
        data_version=dataset.manifest.data_version,
        negatives=config.negatives.model_dump(mode="json"),
        findings=_judged(config, found),
    )


def audited(config: Config, dataset: Dataset) -> AuditReport:
    """The audit in a dataset's folder, if it is of this data and these negatives; else a new one.

    Waivers are always those of the config.
    """
    report = AuditReport.read(dataset.root / AUDIT_FILE)
    same = report is not None and (
        report.data_version == dataset.manifest.data_version
        and report.negatives == config.negatives.model_dump(mode="json")
    )
    if report is None or not same:
        return audit(config, dataset)
    return report.model_copy(update={"findings": _judged(config, report.findings)})


def _judged(config: Config, found: list[Finding]) -> list[Finding]:
    marked = [
        finding.model_copy(
            update={"waived": finding.severity == "error" and finding.name in config.audit.waive}
        )
        for finding in found
    ]
    return sorted(marked, key=lambda finding: SEVERITIES.index(finding.severity))


def _fixed(negatives: Negatives) -> Negatives:
    return negatives.model_copy(update={"resample": False, "in_batch": 0})


def _trivial_scorers(config: Config, dataset: Dataset, sampler: NegativeSampler | None) -> Finding:
    rows, times, labels = [], [], []
    for batch in _batches(config, dataset, "next", 2_048, sampler, shuffle=False):
        mask = batch.candidate_mask.numpy()
        rows.append(batch.candidate_row.numpy()[mask])
        times.append(np.broadcast_to(batch.timestamp.numpy()[:, None], mask.shape)[mask])
        labels.append(batch.labels.numpy()[:, :, 0][mask])
    row, time, label = (np.concatenate([*each, np.empty(0)]) for each in (rows, times, labels))
    row, time = row.astype(np.int64), time.astype(np.int64)
    scores = trivial_scores(dataset, row, time, config.negatives)
    return item_checks.trivial_scorers(scores, label, sampler is not None)


def _first_batches(config: Config, dataset: Dataset) -> Iterator[np.ndarray]:
    sampler = None
    if not dataset.manifest.impressions:
        sampler = NegativeSampler(dataset, config.negatives, SEED)
    size = config.finetune.batch_size
    batches = _batches(config, dataset, "train", size, sampler, shuffle=True)
    for batch in islice(batches, max(config.audit.requests // size, 2)):
        yield batch.rows.numpy()


def _batches(
    config: Config,
    dataset: Dataset,
    split: Split,
    batch_size: int,
    sampler: NegativeSampler | None,
    *,
    shuffle: bool,
) -> Iterator[Batch]:
    reader = RequestReader(
        dataset,
        split,
        batch_size=batch_size,
        sampler=sampler,
        shuffle=shuffle,
        limit=None if shuffle else config.audit.requests,
        prefetch=0,
    )
    return reader.epoch(0)


def _of_manifest(dataset: Dataset) -> list[Finding]:
    """What the build itself has counted."""
    rejected = dataset.manifest.rejected
    listed = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items()) or "none"
    late = dataset.manifest.late
    events = sum(abs(day.now - day.built) for day in late.values())
    return [
        Finding(
            name="rejected_rows",
            severity="info",
            text=f"Rows of the log that could not be used: {listed}.",
            figures={reason.replace(" ", "_"): count for reason, count in rejected.items()},
        ),
        Finding(
            name="late_events",
            severity="warning" if late else "info",
            text=f"Built days whose events have changed since, and that stayed as they were: "
            f"{', '.join(late) or 'none'}.",
            remedy="build these days anew with windows.late: rebuild" if late else "",
            figures={"days": len(late), "events": events},
        ),
    ]
