"""Files of a log: which they are, what is in them, and one ibis table over them."""

from __future__ import annotations

import difflib
import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Events, Items
from thawline.data.engine import Backend, DuckDB, first_line, of_input
from thawline.errors import DataError

Format = Literal["parquet", "csv"]

SUFFIXES: dict[str, Format] = {
    **dict.fromkeys([".parquet", ".pq"], "parquet"),
    **dict.fromkeys([".csv", ".tsv", ".txt", ".dat", ".data", ".inter"], "csv"),
}
COMPRESSED = (".gz", ".zst")
CHUNK_BYTES = 1 << 20


def find_files(path: str | Sequence[str], key: str = "events.path") -> list[Path]:
    """The files that a path setting names, in a fixed order.

    Args:
        path: A file, a folder (every data file below it), a glob, or a list of them.
        key: The config key, for errors.

    Raises:
        DataError: A path that names no file.
    """
    entries = [path] if isinstance(path, str) else list(path)
    files: list[Path] = []
    for entry in entries:
        found = sorted(_expand(entry))
        if not found:
            raise DataError(f"{key}: {entry} names no data file", "check the path")
        files += found
    return list(dict.fromkeys(files))


def _expand(entry: str) -> Iterator[Path]:
    path = Path(entry)
    if path.is_dir():
        for file in path.rglob("*"):
            if file.is_file() and is_data_file(str(file.relative_to(path))):
                yield file
    elif path.is_file():
        yield path
    else:
        yield from (Path(name) for name in glob.glob(entry, recursive=True) if Path(name).is_file())


def is_data_file(name: str) -> bool:
    """Whether a file below a folder belongs to the log: not hidden, and of a known format."""
    file = PurePosixPath(name)
    return not any(part[0] in "._" for part in file.parts) and _format_of(file) is not None


def _format_of(file: PurePath) -> Format | None:
    suffixes = [suffix for suffix in file.suffixes if suffix not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1].lower()) if suffixes else None


def decide_format(
    settings: Events | Items, files: Sequence[Path], section: str = "events"
) -> Format:
    """The one format of all files, declared or told by their suffixes.

    Args:
        settings: Uses `format`.
        files: At least one.
        section: The config's section, for errors.

    Raises:
        DataError: Suffixes that say nothing, or different things.
    """
    if settings.format != "auto":
        return settings.format
    formats = {file: _format_of(file) for file in files}
    known = set(formats.values())
    if len(known) == 1 and None not in known:
        return known.pop()  # type: ignore[return-value]
    odd = next(file for file in files if formats[file] != formats[files[0]] or not formats[file])
    raise DataError(
        f"{section}.path: cannot tell the format of {odd} from its name"
        if not formats[odd]
        else f"{section}.path: {files[0]} and {odd} are of different formats",
        f"set {section}.format to parquet or csv, or narrow {section}.path",
    )


def fingerprints(files: Iterable[Path]) -> list[str]:
    """Size and SHA-256 of each file's content, whatever its name.

    Raises:
        DataError: A file that cannot be read.
    """
    prints = []
    for file in files:
        digest, size = hashlib.sha256(), 0
        try:
            with file.open("rb") as stream:
                while block := stream.read(CHUNK_BYTES):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise DataError(
                f"{file} cannot be read: {error.strerror}", "check its owner"
            ) from error
        prints.append(f"{size}:{digest.hexdigest()}")
    return prints


def open_parquet(engine: Backend, files: Sequence[Path], needed: dict[str, str]) -> ir.Table:
    """One table over Parquet files that all hold the needed columns.

    Args:
        engine: Where the table is made.
        files: At least one.
        needed: Config key to column name.

    Raises:
        DataError: A file that is not Parquet or is cut short, a column that is missing in a file
            or has another type there than in the first file.
    """
    first: pa.Schema | None = None
    for file in files:
        try:
            schema = pq.read_schema(file)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(file, error) from error
        require_columns(schema.names, needed, file)
        first = first or schema
        for key, column in needed.items():
            expected, found = first.field(column).type, schema.field(column).type
            if expected != found:
                raise DataError(
                    f"{file}: column {column!r} ({key}) is {found}, but {expected} in {files[0]}",
                    "write all files with one schema",
                )
    if not isinstance(engine, DuckDB):
        return engine.open_parquet(files)
    return engine.read_parquet([str(file) for file in files], hive_partitioning=False)


def require_columns(found: Sequence[str], needed: dict[str, str], file: Path) -> None:
    """Checks that a file has the columns that the config names.

    Raises:
        DataError: Names the config key, the column and the columns that look like it.
    """
    for key, column in needed.items():
        if column in found:
            continue
        folded = {name.lower(): name for name in found}
        near = difflib.get_close_matches(column.lower(), folded, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(repr(folded[name]) for name in near)}? " if near else ""
        if key.startswith("tables."):
            hint += f"see {key.removesuffix('column')}of, which says in which file it is; "
        shown = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "")
        raise DataError(
            f"{file} has no column {column!r} ({key}); it has: {shown}",
            f"{hint}set {key} to the column's name, or check events.separator and events.header "
            "if this is a CSV file",
        )


@contextmanager
def reading(files: Sequence[Path], kind: Format, needed: dict[str, str]) -> Iterator[None]:
    """Turns what the engine says about unreadable files into an error that names the file.

    Raises:
        DataError: The block failed because of a file's content.
    """
    try:
        yield
    except Exception as error:
        if not of_input(error):
            raise
        if kind == "parquet":
            for file in files:
                _read_through(file, list(needed.values()))
        named = next((str(file) for file in files if str(file) in str(error)), None)
        where = named or ", ".join(map(str, files[:3]))
        raise DataError(
            f"{where} cannot be read as {kind}: {first_line(error)}",
            "check the file"
            if kind == "parquet"
            else "check events.separator and events.header, the line that the message names, and "
            "whether all lines end alike",
        ) from error


def _read_through(file: Path, columns: list[str]) -> None:
    try:
        with pq.ParquetFile(file) as parquet:
            for _ in parquet.iter_batches(columns=columns):
                pass
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        f"{file} cannot be read as Parquet: {first_line(error)}",
        "the file is cut short, damaged or of another format (events.format): write it again",
    )
