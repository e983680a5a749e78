"""What a file with a line an item says: ids of further tables and content vectors, by row.

Both come to lie in `items.parquet`, a line for each line of the catalog; the vectors pass through
in batches, so that they need no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
from ibis.util import gen_name
from pyarrow import csv

from thawline.config import Items
from thawline.data.engine import Backend, first_line, hash63, keep, stream
from thawline.data.ids import MISSING, stored_as
from thawline.data.manifest import ContentFacts
from thawline.data.mapping import as_text, require_scalar
from thawline.data.parts import write_file
from thawline.data.sources import (
    Format,
    decide_format,
    find_files,
    open_parquet,
    reading,
    require_columns,
)
from thawline.errors import DataError

FLOATS_PER_GROUP = 1 << 22
"""Numbers in a row group of vectors: 16 MiB."""
ROWS_PER_GROUP = 1 << 17


@dataclass(frozen=True)
class ItemFile:
    """The lines of `items.path` in the engine."""

    lines: ir.Table
    """item (its id as text), id_<column> (text) and, with `dim`, content (a list of floats)."""
    columns: list[str]
    """Columns of ids."""
    dim: int | None
    """Width of the content vectors; None: there are none."""
    files: list[Path]
    kind: Format
    needed: dict[str, str]


def open_items(engine: Backend, settings: Items, ids: Mapping[str, str]) -> ItemFile:
    """Opens `items.path` and looks at what a single line cannot tell.

    Args:
        engine: Where the lines are.
        settings: Which file, and what its columns mean.
        ids: The columns of ids, by config key.

    Raises:
        DataError: A file or a column that is missing, a line without an item id, an item that comes
            twice, vectors of different lengths or of no numbers.
    """
    files = find_files(settings.path or [], "items.path")
    kind = decide_format(settings, files, "items")
    needed = {"items.item_id": settings.item_id}
    if settings.content is not None:
        needed["items.content"] = settings.content
    needed |= ids
    if kind == "parquet":
        raw = open_parquet(engine, files, needed)
    else:
        raw = keep(engine, "item_file", ibis.memtable(_read_csv(files, settings, needed)))
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    require_scalar(raw, settings.item_id, f"{where}: column {settings.item_id!r} (items.item_id)")
    for key, column in ids.items():
        require_scalar(raw, column, f"{where}: column {column!r} ({key})")
    columns = list(dict.fromkeys(ids.values()))
    lines = {"item": as_text(raw[settings.item_id])}
    lines |= {stored_as(column): as_text(raw[column]) for column in columns}
    with reading(files, kind, needed):
        _require_once(raw.select(item=lines["item"]), f"{where} (items.path)")
        dim = None
        if settings.content is not None:
            place = f"{where}: column {settings.content!r} (items.content)"
            vectors = raw.select(item=lines["item"], content=raw[settings.content])
            dim = _one_length(vectors, place)
            lines["content"] = raw[settings.content]
    return ItemFile(raw.select(**lines), columns, dim, files, kind, needed)


def _read_csv(files: list[Path], settings: Items, needed: dict[str, str]) -> pa.Table:
    """The needed columns of CSV files as text, in memory."""
    columns = list(dict.fromkeys(needed.values()))
    options = {
        "read_options": csv.ReadOptions(column_names=settings.header or []),
        "parse_options": csv.ParseOptions(delimiter=settings.separator),
    }
    convert = csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
    )
    tables = []
    for file in files:
        try:
            with csv.open_csv(file, **options) as opened:
                require_columns(opened.schema.names, needed, file)
            tables.append(csv.read_csv(file, **options, convert_options=convert))
        except (OSError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(
                f"{file} cannot be read as csv: {first_line(error)}",
                "check items.separator and items.header, or write the items as Parquet",
            ) from error
    return pa.concat_tables(tables)


def _require_once(items: ir.Table, where: str) -> None:
    counted = items.group_by("item").aggregate(copies=items.count())
    twice = counted.filter((counted.copies > 1) | counted.item.isnull())
    facts = twice.aggregate(
        nameless=twice.item.isnull().sum(), items=twice.item.count(), example=twice.item.min()
    )
    (row,) = facts.to_pyarrow().to_pylist()
    if row["nameless"]:
        raise DataError(f"{where} holds lines without an item id", "drop them")
    if row["items"]:
        raise DataError(
            f"{where} has {row['items']:,} items on several lines, such as {row['example']!r}",
            "write one line an item",
        )


def _one_length(vectors: ir.Table, place: str) -> int:
    kind = vectors.content.type()
    if not (kind.is_array() and (kind.value_type.is_floating() or kind.value_type.is_integer())):
        raise DataError(
            f"{place} is of type {kind}", "write each vector as a list of floats, into Parquet"
        )
    length = vectors.content.length()
    bounds = vectors.aggregate(least=length.min(), most=length.max())
    (row,) = bounds.to_pyarrow().to_pylist()
    least, most = row["least"], row["most"]
    if not most:
        raise DataError(f"{place} holds no vector", "name another column, or drop items.content")
    if least != most:
        short, long = (
            vectors.filter(length == count).limit(1).item.to_pyarrow()[0].as_py()
            for count in (least, most)
        )
        raise DataError(
            f"{place} holds vectors of different lengths, such as {least} numbers of item "
            f"{short!r} and {most} of item {long!r}",
            "make all vectors with one model; an item without one has null",
        )
    return int(most)


def write_items(
    engine: Backend, catalog: ir.Table, items: ItemFile, path: Path
) -> tuple[ir.Table, ContentFacts | None]:
    """Writes `items.parquet`: what the file says of each line of the catalog.

    Args:
        engine: Runs the query.
        catalog: The catalog's lines, in rows without a gap.
        items: The file.
        path: Of `items.parquet`.

    Returns:
        item_id, support and the ids as text of the catalog's items, not run yet; and what became of
        the vectors.

    Raises:
        DataError: No item of the catalog is in the file, or a vector holds something that is no
            finite number.
    """
    ids = [stored_as(column) for column in items.columns]
    text = catalog.item_id.cast("string")
    known = catalog.select("row", "support", text=text)
    joined = known.left_join(items.lines, known.text == items.lines.item)
    with reading(items.files, items.kind, items.needed):
        named = keep(
            engine, gen_name("items"), joined.select("row", "support", "text", "item", *ids)
        )
        _require_any(named, items)
        values = {name: hash63(joined[name]).fill_null(MISSING) for name in ids}
        if items.dim is not None:
            values["content"] = joined.content
        lines = joined.order_by("row").select("text", **values)
        fields = [(name, pa.int64()) for name in ids]
        if items.dim is not None:
            fields.append(("content", pa.list_(pa.float32(), items.dim)))
        width = items.dim or 0
        counted = {"items": 0, "missing": 0}

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in stream(engine, lines):
                columns = [batch.column(name) for name in ids]
                if width:
                    columns.append(_vectors(batch, width, counted, items))
                yield pa.record_batch(columns, schema=pa.schema(fields))

        rows = min(ROWS_PER_GROUP, max(1, FLOATS_PER_GROUP // width)) if width else ROWS_PER_GROUP
        write_file(path, pa.schema(fields), batches(), rows)
    return named, ContentFacts(dim=width, **counted) if width else None


def _require_any(named: ir.Table, items: ItemFile) -> None:
    facts = named.aggregate(
        found=named.item.count(), items=named.text.count(), example=named.text.min()
    )
    (row,) = facts.to_pyarrow().to_pylist()
    if row["items"] and not row["found"]:
        other = items.lines.item.min().to_pyarrow().as_py()
        raise DataError(
            f"{items.files[0]} (items.path) has none of the {row['items']:,} items of the log: ids "
            f"are like {row['example']!r} in the log and {other!r} in the file",
            "correct items.item_id, or write the ids as in the log",
        )


def _vectors(
    batch: pa.RecordBatch, width: int, counted: dict[str, int], items: ItemFile
) -> pa.FixedSizeListArray:
    """The vectors of a batch, with zeros where there is none."""
    column = batch.column("content")
    given = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.flatten()
    flat = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    flat = flat.reshape(-1, width)
    if not np.isfinite(flat).all():
        place = np.flatnonzero(given)[~np.isfinite(flat).all(axis=1)][0]
        item = batch.column("text")[place].as_py()
        raise DataError(
            f"{items.files[0]} (items.path): the vector of item {item!r} "
            "holds a null, a NaN or an infinite number",
            "write finite numbers, or null for an item without a vector",
        )
    named = batch.column("text").is_valid().to_numpy(zero_copy_only=False)
    counted["items"] += int(given.sum())
    counted["missing"] += int((named & ~given).sum())
    dense = np.zeros((len(batch), width), np.float32)
    dense[given] = flat
    return pa.FixedSizeListArray.from_arrays(pa.array(dense.ravel()), width)
