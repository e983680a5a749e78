"""Scoring in bulk: requests in Parquet in, their scores in Parquet out, in bounded memory."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from thawline.config import Config
from thawline.errors import DataError
from thawline.folders import place_for
from thawline.model.bundle import Bundle
from thawline.progress import progress_bar
from thawline.stages.machine import prepare_machine
from thawline.tracking.fetch import SCHEME, local_model
from thawline.tracking.raw import Lists, Requests, text_of
from thawline.tracking.scorer import Scorer, Scores
from thawline.tracking.server import require_answer

ROWS_AT_ONCE = 4_096
ITEMS_AT_ONCE = 1 << 21
"""Requests that are held at a time have at most so many items, unless one alone has more."""
HISTORY = ("history", "history_action", "history_age")
"""Columns that are read and not written again."""
COUNTED = ("unknown_history", "unknown_candidates")
KEY = b"thawline"
"""Key of what made the scores, as JSON, in the metadata of the file."""


@dataclass
class Summary:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    """As `Scores.counts`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests that could not be scored, by the column at fault."""
    first: dict[str, str] = field(default_factory=dict)
    """The first of them, in words, by that column."""


def run(config: Config, model: str, source: str | Path, out: str | Path) -> Summary:
    """Scores requests and writes the Parquet file `out`, in the order of the requests.

    Their columns are those of the served model (`tracking.served`); all but the history are
    written again, with `score_<action>` beside `candidates`, and how many items of history and
    candidates the model does not know. Requests that cannot be scored are left out: they lie, with
    `row` and `reason`, in `<out>.rejected.parquet`.

    Args:
        config: Names the server and the machine.
        model: A `models:/` URI, or a model folder.
        source: A Parquet file, or a folder of them, which are read in the order of their names.
        out: Appears whole or not at all.

    Raises:
        DataError: No input, a column that is missing or of the wrong type, or of a name that
            scores have; not a single request that can be scored; a damaged model folder, one
            that scores NaN, no place for `out`.
        TrackingError: No such version or alias, the server's refusal.
    """
    files = _files(Path(source))
    out = place_for(out, folder=False)
    if model.startswith(SCHEME):
        require_answer(config)
    device = prepare_machine(config.runtime)
    summary = Summary()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".scores-") as scratch:
        folder = local_model(config, model, Path(scratch) / "model")
        scorer = Scorer(Bundle.load(folder).to(device))
        facts = {"model": model, "data_version": scorer.bundle.meta.data_version}
        scores = Writer(Path(scratch) / "scores.parquet", facts)
        rejected = Writer(Path(scratch) / "rejected.parquet", facts)
        total = sum(pq.ParquetFile(file).metadata.num_rows for file in files)
        with scores, rejected, progress_bar("score", total) as show:
            done = 0
            for batch in _batches(files, scorer):
                _score(scorer, batch, done, scores, rejected, summary)
                done += batch.num_rows
                show(done)
        if total and not summary.counts["requests"]:
            raise DataError(
                f"not one of the {total} requests of {source} can be scored: "
                f"{'; '.join(summary.first.values())}",
                "give requests as docs/serving.md says",
            )
        beside = out.with_name(f"{out.stem}.rejected.parquet")
        beside.unlink(missing_ok=True)
        if summary.rejected:
            (Path(scratch) / "rejected.parquet").rename(beside)
        (Path(scratch) / "scores.parquet").rename(out)
    return summary


class Writer:
    """A Parquet file, with the schema of its first batch."""

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        """Remembers where; nothing is written before the first batch."""
        self._path = path
        self._metadata = {KEY: json.dumps(facts).encode()}
        self._stack = ExitStack()
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, table: pa.Table) -> None:
        """Appends rows as one row group."""
        if self._writer is None:
            schema = table.schema.with_metadata(self._metadata)
            self._writer = self._stack.enter_context(pq.ParquetWriter(self._path, schema))
        self._writer.write_table(table.cast(self._writer.schema))


def _files(source: Path) -> list[Path]:
    files = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    for file in files:
        try:
            pq.ParquetFile(file).close()
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{file} cannot be read as Parquet: {error}", "give --input a Parquet file"
            ) from error
    if not files:
        raise DataError(f"{source} holds no *.parquet", "give --input a file or a folder of them")
    return files


def _batches(files: list[Path], scorer: Scorer) -> Iterator[pa.RecordBatch]:
    """The requests of all files, some thousand at a time, of one checked schema."""
    first: pa.Schema | None = None
    for file in files:
        with pq.ParquetFile(file) as opened:
            schema = opened.schema_arrow.remove_metadata()
            _require_columns(file, schema, scorer)
            if first is not None and not schema.equals(first):
                raise DataError(
                    f"{file} has other columns than {files[0]}",
                    "score files of one schema together",
                )
            first = schema
            if not opened.metadata.num_rows:
                yield pa.RecordBatch.from_pylist([], schema)
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                yield from _cut(batch)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of a bounded number of items."""
    items = np.zeros(batch.num_rows, np.int64)
    for name in ("history", "candidates"):
        items += (
            pc.list_value_length(batch.column(name)).fill_null(0).to_numpy(zero_copy_only=False)
        )
    ends = np.cumsum(items)
    start = 0
    while start < batch.num_rows:
        before = ends[start] - items[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + ITEMS_AT_ONCE, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _require_columns(file: Path, schema: pa.Schema, scorer: Scorer) -> None:
    for name in ("history", "candidates"):
        if name not in schema.names:
            raise DataError(f"{file} has no column {name}", "give history and candidates")
    for name in (*HISTORY, "candidates"):
        kind = schema.field(name).type if name in schema.names else None
        if kind is not None and not (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            raise DataError(
                f"{file}: the column {name} is of type {kind}", "give a list in each row"
            )
    for name in scorer.text_columns:
        if name in schema.names and pa.types.is_nested(schema.field(name).type):
            kind = schema.field(name).type
            raise DataError(f"{file}: the column {name} is of type {kind}", "give one value a row")
    taken = set(schema.names) & {*_score_columns(scorer), *COUNTED}
    if taken:
        raise DataError(
            f"{file} has a column {min(taken)}, which the scores' file has too",
            "rename it or leave it out",
        )


def _score(
    scorer: Scorer,
    batch: pa.RecordBatch,
    start: int,
    scores: Writer,
    rejected: Writer,
    summary: Summary,
) -> None:
    """Scores what of a batch, which begins at row `start`, can be scored."""
    problems: dict[int, tuple[str, str]] = {}
    lists = {}
    for name in (*HISTORY, "candidates"):
        if name in batch.schema.names:
            kind = {"history_action": pa.int64(), "history_age": pa.float64()}.get(
                name, scorer.items.type
            )
            lists[name], bad = _as_lists(batch.column(name), kind)
            for row in bad:
                problems.setdefault(row, (name, f"the column {name} holds no list of {kind}"))
    for row in np.flatnonzero(batch.column("candidates").is_null().to_numpy(False)).tolist():
        problems.setdefault(row, ("candidates", "the column candidates is null"))
    texts = {
        name: _texts(batch.column(name))
        for name in scorer.text_columns
        if name in batch.schema.names
    }
    for problem in scorer.problems(_requests(lists, texts)):
        problems.setdefault(problem.row, (problem.column, problem.what))
    kept = np.setdiff1d(np.arange(batch.num_rows), list(problems))
    if problems:
        rows = sorted(problems)
        for row in rows:
            column, reason = problems[row]
            summary.rejected[column] += 1
            summary.first.setdefault(column, f"row {start + row}: {reason}")
        table = pa.Table.from_batches([batch]).take(rows)
        table = table.append_column("row", pa.array([start + row for row in rows]))
        rejected.write(table.append_column("reason", pa.array([problems[row][1] for row in rows])))
        chosen = pa.array(kept)
        batch = batch.take(chosen)
        lists = {name: array.take(chosen) for name, array in lists.items()}
        texts = {name: array.take(chosen) for name, array in texts.items()}
    found = scorer.score(_requests(lists, texts))
    if not np.isfinite(found.probabilities).all():
        last = start + len(kept) + len(problems) - 1
        raise DataError(
            f"the model's scores of rows {start} to {last} hold NaN",
            "score with another version: this model's weights are NaN or infinite",
        )
    summary.counts += found.counts
    scores.write(_table(scorer, batch, found))


def _requests(lists: dict[str, pa.ListArray], texts: dict[str, pa.StringArray]) -> Requests:
    own = {name: Lists.of(array) for name, array in lists.items()}
    return Requests(
        history=own["history"],
        candidates=own["candidates"],
        actions=own.get("history_action"),
        ages=own.get("history_age"),
        texts=texts,
    )


def _table(scorer: Scorer, batch: pa.RecordBatch, found: Scores) -> pa.Table:
    table = pa.Table.from_batches([batch])
    table = table.select([name for name in table.column_names if name not in HISTORY])
    offsets = pa.array(found.offsets.astype(np.int32))
    for column, name in enumerate(_score_columns(scorer)):
        values = pa.array(found.probabilities[:, column].astype(np.float32))
        table = table.append_column(name, pa.ListArray.from_arrays(offsets, values))
    table = table.append_column("unknown_history", pa.array(found.unknown_history))
    return table.append_column("unknown_candidates", pa.array(found.unknown_candidates))


def _score_columns(scorer: Scorer) -> list[str]:
    return [f"score_{action}" for action in scorer.bundle.meta.actions]


def _as_lists(array: pa.Array, kind: pa.DataType) -> tuple[pa.ListArray, list[int]]:
    """A column of lists as lists of another type, and the rows in which a value is none of it."""
    offsets = np.zeros(len(array) + 1, np.int64)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    np.cumsum(lengths, out=offsets[1:])
    values, bad = _cast(pc.list_flatten(array), kind)
    rows = np.unique(np.searchsorted(offsets, bad, side="right") - 1).tolist() if bad else []
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values), rows


def _cast(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Values as another type, null where one is none of that type, and the places of those."""
    try:
        return values.cast(kind), []
    except (pa.ArrowException, NotImplementedError):
        if len(values) <= 1:
            return pa.nulls(len(values), kind), list(range(len(values)))
    half = len(values) // 2
    left, bad_left = _cast(values.slice(0, half), kind)
    right, bad_right = _cast(values.slice(half), kind)
    return pa.concat_arrays([left, right]), [*bad_left, *(half + row for row in bad_right)]


def _texts(array: pa.Array) -> pa.StringArray:
    """Values as the training log's texts."""
    if pa.types.is_string(array.type):
        return array
    if not pa.types.is_dictionary(array.type):
        array = pc.dictionary_encode(array)
    texts = pa.array([text_of(value) for value in array.dictionary.to_pylist()], pa.string())
    return texts.take(array.indices)
