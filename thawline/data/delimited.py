"""CSV files of a log: one table over them, every column as text, and the lines that do not fit."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import ibis.expr.types as ir
import pyarrow as pa
from ibis.util import gen_name

from thawline.config import Events
from thawline.data.engine import Backend, DuckDB, first_line, keep
from thawline.data.sources import require_columns
from thawline.errors import DataError

HEADER_BYTES = 1 << 20
"""A header ends before that."""

MALFORMED = "malformed line"
"""Column of the malformed lines, on engines that mark them so."""

REJECTS = """
CREATE OR REPLACE TEMP TABLE rejects AS
SELECT DISTINCT file_path, line_byte_position, line AS number, csv_line, error_message,
    error_type IN ('MISSING COLUMNS', 'TOO MANY COLUMNS') AS miscounted
FROM reject_errors JOIN reject_scans USING (scan_id, file_id)
"""
"""What DuckDB's scans have put aside; each scan of a file does it again."""


@dataclass(frozen=True)
class CsvLog:
    """CSV files in an engine."""

    files: Sequence[Path]
    table: ir.Table
    """The columns that the config needs, as text; without the malformed lines."""
    marked: ir.Table | None
    """On engines that mark malformed lines: those, as `line` and another column."""

    def malformed(self, engine: Backend) -> ir.Table:
        """Lines of another number of fields than the header's, as `line`.

        To be called once `table` has been read.

        Raises:
            DataError: A line with broken quotes or broken text; a `UnicodeError` caused the latter.
        """
        if self.marked is not None:
            return keep(engine, gen_name("malformed"), self.marked)
        engine.con.execute(REJECTS)
        rejects = engine.table("rejects")
        rejects = rejects.filter(rejects.file_path.isin([str(file) for file in self.files]))
        broken = rejects.filter(~rejects.miscounted).order_by(rejects.columns).limit(1)
        for row in broken.to_pyarrow().to_pylist():
            message = row["error_message"]
            error = DataError(
                f"{row['file_path']} cannot be read as csv: line {row['number']}: {message}",
                "check events.separator, and the quotes of that line",
            )
            raise error from UnicodeError(message) if "unicode" in message else None
        lines = rejects.select("file_path", "line_byte_position", line=rejects.csv_line.strip())
        return keep(engine, gen_name("malformed"), lines.filter(lines.line != "").distinct())


def open_csv(
    engine: Backend, files: Sequence[Path], settings: Events, needed: dict[str, str]
) -> CsvLog:
    """Opens CSV files as one log; their columns may be in different orders.

    Raises:
        DataError: A file that cannot be opened, or is without a needed column.
    """
    by_header: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for file in files:
        found = tuple(settings.header or _read_header(file, settings.separator))
        require_columns(found, needed, file)
        by_header[found].append(file)
    wanted = list(dict.fromkeys(needed.values()))
    tables, marked = [], []
    for header, alike in by_header.items():
        # Engines stumble over names that come twice, or differ in case alone.
        names = [
            name if name in wanted and name not in header[:place] else f"column {place}"
            for place, name in enumerate(header)
        ]
        if isinstance(engine, DuckDB):
            table = engine.read_csv(
                [str(file) for file in alike],
                delim=settings.separator,
                quote='"',
                escape='"',
                header=settings.header is None,
                columns=dict.fromkeys(names, "VARCHAR"),
                auto_detect=False,
                store_rejects=True,
            )
        else:
            table = engine.open_csv(
                alike,
                settings.separator,
                names,
                skip_first=settings.header is None,
                malformed=MALFORMED,
            )
            lines = table.filter(table[MALFORMED].notnull())
            # Spark refuses a query of this column alone.
            marked.append(lines.select(line=lines[MALFORMED], beside=lines[wanted[0]]))
            table = table.filter(table[MALFORMED].isnull())
        tables.append(table.select(*wanted))
    return CsvLog(files, _one_of(tables), _one_of(marked) if marked else None)


def _one_of(tables: Sequence[ir.Table]) -> ir.Table:
    return reduce(lambda one, other: one.union(other), tables)


def _read_header(file: Path, separator: str) -> list[str]:
    """The fields of a file's first line.

    Raises:
        DataError: A file that cannot be read.
    """
    try:
        with pa.input_stream(str(file), compression="detect") as stream:
            head: bytes = stream.read(HEADER_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{file} cannot be read as csv: {first_line(error)}",
            "the file is cut short, damaged or of another format (events.format): write it again",
        ) from error
    line = head.decode("utf-8-sig", "replace").partition("\n")[0].rstrip("\r")
    if len(separator) == 1:
        return next(csv.reader([line], delimiter=separator), [])
    return [name.strip('"') for name in line.split(separator)]
