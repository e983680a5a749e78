"""Checks of the request and sequence files: what leaks from one window or user to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.engine import HOUR_US, Backend
from thawline.data.findings import Finding
from thawline.data.ids import USER_ID
from thawline.data.manifest import FIRST_ROW, Dataset, Split
from thawline.errors import DataError

AGE_TOLERANCE_US = 1_000_000
"""Ages are float32 hours: after four months they are told to about this many microseconds."""

_REBUILD = "build the dataset again with `thawline windows`"


@dataclass(frozen=True)
class Counts:
    """What the requests of a split show each row."""

    timestamp: np.ndarray
    """int64 [R]: microseconds since 1970 UTC, in the order of the files."""
    shown: np.ndarray
    """int64 [num_rows]: how often a row is a stored candidate."""
    positive: np.ndarray
    """int64 [num_rows]: how often with any label 1."""


def count_candidates(dataset: Dataset, split: Split) -> Counts:
    """Counts the stored candidates of a split.

    Raises:
        DataError: A damaged part file.
    """
    size = dataset.catalog.num_rows
    shown, positive = np.zeros(size, np.int64), np.zeros(size, np.int64)
    labels = [f"label_{name}" for name in dataset.manifest.actions]
    times = [np.empty(0, np.int64)]
    columns = ["held_out", "timestamp", "candidate_row", *labels]
    for _, batch in _read(dataset.request_files(split), columns):
        wanted = batch.filter(pa.array(_held_out(batch) == (split == "in_window")))
        rows = _flat(wanted, "candidate_row")
        happened = np.zeros(len(rows), bool)
        for name in labels:
            happened |= _flat(wanted, name) > 0
        shown += np.bincount(rows, minlength=size)
        positive += np.bincount(rows[happened], minlength=size)
        times.append(wanted.column("timestamp").cast(pa.int64()).to_numpy())
    return Counts(np.concatenate(times), shown, positive)


def history_leakage(dataset: Dataset) -> Finding:
    """Whether a history holds what was not over before its request.

    Looks at every history: ages must be above 0 and fall, and no item may be in a history at a
    time at which it had not been seen.
    """
    first_seen = np.concatenate([np.zeros(FIRST_ROW, np.int64), dataset.catalog.first_seen])
    # What shares a bucket has no first_seen of its own.
    named = np.concatenate([np.zeros(FIRST_ROW, bool), dataset.catalog.item_id.is_valid()])
    late = disordered = unseen = total = 0
    where = ""
    files = [*dataset.request_files("train"), *dataset.request_files("next")]
    for path, batch in _read(files, ["timestamp", "history_row", "history_age"]):
        age = _flat(batch, "history_age").astype(np.float64)
        row = _flat(batch, "history_row")
        lengths = _lengths(batch, "history_row")
        time = np.repeat(batch.column("timestamp").cast(pa.int64()).to_numpy(), lengths)
        same = np.repeat(np.arange(len(lengths)), lengths)
        before = late + disordered + unseen
        late += int((~(age > 0)).sum())
        disordered += int(((np.diff(age) > 0) & (np.diff(same) == 0)).sum())
        happened = time - age * HOUR_US
        tolerance = AGE_TOLERANCE_US + np.abs(age) * HOUR_US * 2.0**-22
        unseen += int((named[row] & (first_seen[row] > happened + tolerance)).sum())
        total += len(age)
        if not where and late + disordered + unseen > before:
            where = str(path)
    figures = {"not_before": late, "disordered": disordered, "unseen": unseen, "entries": total}
    if not where:
        text = f"All {total:,} entries of the histories were over before their requests."
        return Finding(name="history_leakage", severity="info", text=text, figures=figures)
    return Finding(
        name="history_leakage",
        severity="error",
        text=f"Of {total:,} entries of histories, {late:,} are not older than their request, "
        f"{disordered:,} are older than the one before and {unseen:,} are of items that had not "
        f"been seen yet; the first is in {where}.",
        remedy=_REBUILD,
        figures=figures,
    )


def repeated_requests(engine: Backend, dataset: Dataset) -> Finding:
    """Whether a request id comes twice, or a window repeats what another one showed a user."""
    parts = [
        table.mutate(later=later)
        for later, split in ((False, "train"), (True, "next"))
        if (table := _open(engine, dataset.request_files(split))) is not None  # type: ignore[arg-type]
    ]
    requests = parts[0].union(*parts[1:]) if len(parts) > 1 else parts[0]
    ids = requests.group_by("request_id").aggregate(
        copies=requests.count(), across=requests.later.any() & (~requests.later).any()
    )
    ids = ids.filter(ids.copies > 1)
    row = ids.aggregate(ids=ids.count(), across=ids.across.sum()).to_pyarrow().to_pylist()[0]
    figures = {"ids": row["ids"], "ids_across_windows": row["across"] or 0, "lists": 0}
    if dataset.manifest.impressions:
        # A page of the same items in the same order is a request that was logged again.
        pages = requests.filter(requests.candidate_row.length() > 1)
        pages = pages.group_by(["user_id", "candidate_row"]).aggregate(
            across=pages.later.any() & (~pages.later).any()
        )
        figures["lists"] = pages.filter(pages.across).count().to_pyarrow().as_py()
    if row["ids"]:
        return Finding(
            name="repeated_requests",
            severity="error",
            text=f"{row['ids']:,} request ids come more than once, "
            f"{figures['ids_across_windows']:,} of them in the fine-tune and in the test window.",
            remedy=_REBUILD,
            figures=figures,
        )
    if figures["lists"]:
        return Finding(
            name="repeated_requests",
            severity="warning",
            text=f"{figures['lists']:,} lists of candidates were shown to a user in the fine-tune "
            "window and again in the test window, in the same order.",
            remedy="see whether the log holds requests twice under different ids",
            figures=figures,
        )
    text = "No request comes twice."
    return Finding(name="repeated_requests", severity="info", text=text, figures=figures)


def holdout_leakage(engine: Backend, dataset: Dataset) -> Finding:
    """Whether held-out users, or requests, are in anything that trains."""
    by_user = dataset.manifest.holdout_by == "user"
    what, key = ("user", "user_id") if by_user else ("request", "request_id")
    files = [dataset.request_files("train")]
    if by_user:
        files.append(dataset.sequence_files())
    trained, held_out = [], []
    for paths in files:
        table = _open(engine, paths)
        if table is not None:
            trained.append(table.filter(~table.held_out).select(key).distinct())
            held_out.append(table.filter(table.held_out).select(key).distinct())
    count = 0
    if trained:
        both = _union(held_out).distinct().inner_join(_union(trained).distinct(), key)
        count = both.count().to_pyarrow().as_py()
    figures = {f"{what}s": count}
    if count:
        return Finding(
            name="holdout_leakage",
            severity="error",
            text=f"{count:,} held-out {what}s are in the training data too.",
            remedy=_REBUILD,
            figures=figures,
        )
    text = f"No held-out {what} is in the training data."
    if by_user and USER_ID in dataset.manifest.ids.get("request", {}):
        return Finding(
            name="holdout_leakage",
            severity="warning",
            text=f"{text} They are new to a table of users, so the in_window hold-out tells only "
            "how a model does without their rows.",
            remedy="set windows.holdout_by: request to see what a table of users does",
            figures=figures,
        )
    return Finding(name="holdout_leakage", severity="info", text=text, figures=figures)


def _union(tables: Sequence[ir.Table]) -> ir.Table:
    return tables[0].union(*tables[1:]) if len(tables) > 1 else tables[0]


def _open(engine: Backend, files: Sequence[Path]) -> ir.Table | None:
    if not files:
        return None
    return engine.read_parquet([str(file) for file in files], hive_partitioning=False)


def _read(files: Sequence[Path], columns: list[str]) -> Iterator[tuple[Path, pa.RecordBatch]]:
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=columns):
                    yield path, batch
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}", _REBUILD) from error


def _flat(batch: pa.RecordBatch, name: str) -> np.ndarray:
    return batch.column(name).flatten().to_numpy(zero_copy_only=False)


def _lengths(batch: pa.RecordBatch, name: str) -> np.ndarray:
    return np.diff(batch.column(name).offsets.to_numpy())


def _held_out(batch: pa.RecordBatch) -> np.ndarray:
    return batch.column("held_out").to_numpy(zero_copy_only=False)
