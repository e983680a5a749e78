"""Arrow batches as bytes in one column: how Spark's workers hand over their rows, in order.

The workers import this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

COLUMN = "batch"


def pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turns each batch into a row of one column, `COLUMN`, in Arrow's stream format."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({COLUMN: [sink.getvalue().to_pybytes()]})


def unpack(data: bytes) -> Iterator[pa.RecordBatch]:
    """Gives the batches that `pack` put into a row."""
    yield from pa.ipc.open_stream(data)
