"""Files with bytes that are no UTF-8: copies in which U+FFFD stands for them.

DuckDB refuses such a file as a whole. In its copy the rest can be read, and the rows with U+FFFD
are rejected one by one. Spark puts U+FFFD there by itself.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from thawline.data.sources import Format
from thawline.errors import DataError

CHUNK_BYTES = 1 << 20


def is_about_encoding(error: DataError) -> bool:
    """Whether an engine refused a file for its bytes."""
    cause = str(error.__cause__ or "").lower()
    return any(word in cause for word in ("utf", "unicode", "encoding"))


def mend(files: Sequence[Path], kind: Format, folder: Path) -> list[Path]:
    """The files, those with broken text replaced by their copies.

    Args:
        files: Of a log.
        kind: Their format.
        folder: Where the copies go.
    """
    mended = []
    for number, file in enumerate(files):
        copy = folder / f"{number}.{kind}"
        if kind == "parquet":
            mended.append(_mend_parquet(file, copy))
        else:
            mended.append(_mend_text(file, copy))
    return mended


def _mend_parquet(file: Path, copy: Path) -> Path:
    broken = False
    with pq.ParquetFile(file) as source, pq.ParquetWriter(copy, source.schema_arrow) as writer:
        for batch in source.iter_batches():
            whole = [_as_text(column) for column in batch.columns]
            broken |= any(new is not old for new, old in zip(whole, batch.columns, strict=True))
            writer.write_batch(pa.record_batch(whole, schema=source.schema_arrow))
    if not broken:
        copy.unlink()
        return file
    return copy


def _as_text(column: pa.Array) -> pa.Array:
    """The same column, unless it is of text and some of it is broken."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        large = pa.types.is_large_string(column.type)
        raw = column.view(pa.large_binary() if large else pa.binary()).to_pylist()
        texts = [None if text is None else text.decode("utf-8", "replace") for text in raw]
        return pa.array(texts, column.type)
    return column


def _mend_text(file: Path, copy: Path) -> Path:
    broken = False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with (
        pa.input_stream(str(file), compression="detect") as source,
        copy.open("w", encoding="utf-8", newline="") as target,
    ):
        while chunk := source.read(CHUNK_BYTES):
            text = decoder.decode(chunk)
            broken |= "\ufffd" in text
            target.write(text)
        rest = decoder.decode(b"", final=True)
        broken |= bool(rest)
        target.write(rest)
    if not broken:
        copy.unlink()
        return file
    return copy
