"""Writing a stream of rows into Parquet files of a bounded number of rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DIFFERENT = {"request_id", "timestamp"}
"""Columns of which hardly two rows are alike: a dictionary makes them larger and slower to write,
as it does with floats."""


class PartWriter:
    """Writes `part-00000.parquet`, `part-00001.parquet`, ... into a folder.

    Where the row groups and the files end depends on the rows alone, never on how they arrive, so
    that the same rows give the same files.
    """

    def __init__(
        self, folder: Path, schema: pa.Schema, *, rows_per_file: int, rows_per_group: int
    ) -> None:
        """Makes the folder; no file is made before the first row."""
        self.rows = 0
        self._folder = folder
        self._schema = schema
        self._rows_per_file = rows_per_file
        self._rows_per_group = rows_per_group
        self._waiting: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._in_file = 0
        self._files = 0
        folder.mkdir(parents=True, exist_ok=True)

    def write_all(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Appends the rows of all batches, cast to the schema, and closes the last file."""
        try:
            for batch in batches:
                table = pa.Table.from_batches([batch]).select(self._schema.names)
                self._waiting.append(table.cast(self._schema))
                self._drain(flush=False)
            self._drain(flush=True)
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _drain(self, *, flush: bool) -> None:
        waiting = sum(table.num_rows for table in self._waiting)
        # A file takes a whole number of row groups, but for its last one.
        wanted = min(self._rows_per_group, self._rows_per_file - self._in_file)
        while waiting >= wanted or (flush and waiting):
            rows = pa.concat_tables(self._waiting)
            self._write(rows.slice(0, wanted).combine_chunks())
            rest = rows.slice(wanted)
            self._waiting = [rest] if rest.num_rows else []
            waiting = rest.num_rows
            wanted = min(self._rows_per_group, self._rows_per_file - self._in_file)

    def _write(self, group: pa.Table) -> None:
        if self._writer is None:
            path = self._folder / f"part-{self._files:05d}.parquet"
            self._writer = pq.ParquetWriter(
                path, self._schema, compression="zstd", use_dictionary=_alike(self._schema)
            )
            self._files += 1
        self._writer.write_table(group, row_group_size=group.num_rows)
        self.rows += group.num_rows
        self._in_file += group.num_rows
        if self._in_file >= self._rows_per_file:
            self._writer.close()
            self._writer, self._in_file = None, 0


def _alike(schema: pa.Schema) -> list[str]:
    """Paths of the columns that a dictionary makes smaller."""
    paths = []
    for field in schema:
        nested = pa.types.is_list(field.type)
        kind = field.type.value_type if nested else field.type
        if not pa.types.is_floating(kind) and field.name not in DIFFERENT:
            paths.append(f"{field.name}.list.element" if nested else field.name)
    return paths


def write_file(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], rows_per_group: int
) -> None:
    """Writes rows, cast to the schema, into one file.

    Where its row groups end does not depend on how the rows arrive.
    """
    waiting = schema.empty_table()
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            waiting = pa.concat_tables([waiting, pa.Table.from_batches([batch]).cast(schema)])
            while len(waiting) >= rows_per_group:
                writer.write_table(waiting.slice(0, rows_per_group).combine_chunks())
                waiting = waiting.slice(rows_per_group)
        writer.write_table(waiting.combine_chunks())
