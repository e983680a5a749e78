"""Context columns as codes: a small vocabulary each, learned from training events."""

from __future__ import annotations

from collections.abc import Mapping

import ibis
import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.duckdb import Backend

from thawline.data.engine import keep
from thawline.errors import DataError

LARGEST = 1_000
"""Most values of a context column: beyond it, it is no small category."""


def build_vocabularies(
    engine: Backend,
    training: ir.Table,
    names: list[str],
    known: Mapping[str, list[str]] | None = None,
) -> dict[str, list[str]]:
    """The values of each column `ctx_<name>`, sorted, and keeps their codes in the engine.

    Args:
        engine: Keeps a table `vocabulary_<name>` of value and code (value i has code i + 1).
        training: Events that training may look at.
        names: Of the context columns, without `ctx_`.
        known: Values that keep their codes; what is new comes after them.

    Raises:
        DataError: More than `LARGEST` values in a column.
    """
    vocabularies = {}
    for name in names:
        values = training.select(value=training[f"ctx_{name}"]).distinct()
        values = values.filter(values.value.notnull())
        old = (known or {}).get(name, [])
        schema = pa.schema([("value", pa.string()), ("code", pa.int32())])
        codes = pa.table([old, range(1, len(old) + 1)], schema=schema)
        known_codes = keep(engine, f"known_{name}", ibis.memtable(codes))
        values = values.anti_join(known_codes, "value")
        code = ibis.row_number().over(order_by=values.value) + len(old) + 1
        values = values.mutate(code=code.cast("int32")).union(known_codes)
        table = keep(engine, f"vocabulary_{name}", values)
        count = table.count().to_pyarrow().as_py()
        if count > LARGEST:
            raise DataError(
                f"events.context.{name} has {count} values in the fine-tune window, more than "
                f"{LARGEST}",
                "drop it from events.context, or name a column of few values",
            )
        vocabularies[name] = table.order_by("code").value.to_pyarrow().to_pylist()
    return vocabularies


def encode_context(engine: Backend, requests: ir.Table, names: list[str]) -> ir.Table:
    """Replaces the values of `ctx_<name>` by their codes (int32); 0 is missing or unseen.

    Args:
        engine: Holds the tables of `build_vocabularies`, and keeps the result.
        requests: With a string column `ctx_<name>` for each name.
        names: Of the context columns, without `ctx_`.
    """
    for name in names:
        vocabulary = engine.table(f"vocabulary_{name}")
        joined = requests.left_join(vocabulary, requests[f"ctx_{name}"] == vocabulary.value)
        code = joined.code.fill_null(0).cast("int32")
        requests = joined.mutate(**{f"ctx_{name}": code}).drop("value", "code")
    return keep(engine, "encoded", requests)
