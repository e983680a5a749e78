"""The items of a dataset: their rows, counts and tiers, and how popular they are when."""

from __future__ import annotations

from pathlib import Path

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.backends.duckdb import Backend

from thawline.config import Tiers
from thawline.data.engine import keep
from thawline.data.manifest import FIRST_ROW, TIERS

MINUTE_US = 60_000_000
TIMESTAMP = pa.timestamp("us", tz="UTC")


def build_catalog(
    engine: Backend,
    events: ir.Table,
    *,
    positive: ir.BooleanValue,
    pretrain: tuple[int, int],
    finetune: tuple[int, int],
    tiers: Tiers,
) -> ir.Table:
    """Gives every item of the events a row, in order of (first_seen, item_id).

    Args:
        engine: Keeps the result.
        events: Canonical events up to the end of the test window.
        positive: Whether one of `events` is a positive.
        pretrain: First microsecond of the pretraining window and of what follows it.
        finetune: The same of the fine-tune window.
        tiers: Least support of a tier.

    Returns:
        item_id, row, first_seen (int64 microseconds), pretrain_count, support, tier.
    """
    trained = positive & ~events.held_out

    def count(span: tuple[int, int]) -> ir.IntegerValue:
        inside = (events.timestamp >= span[0]) & (events.timestamp < span[1])
        return (trained & inside).sum().cast("int64")

    items = events.group_by("item_id").aggregate(
        first_seen=events.timestamp.min(),
        pretrain_count=count(pretrain),
        support=count(finetune),
    )
    tier = ibis.cases(
        (items.support >= tiers.head, TIERS.index("head")),
        (items.support >= tiers.torso, TIERS.index("torso")),
        (items.support >= 1, TIERS.index("tail")),
        else_=TIERS.index("cold"),
    )
    order = ibis.row_number().over(order_by=[items.first_seen, items.item_id])
    items = items.mutate(tier=tier.cast("int8"), row=(order + FIRST_ROW).cast("int64"))
    return keep(engine, "catalog", items)


def write_catalog(catalog: ir.Table, path: Path) -> int:
    """Writes `catalog.parquet` in order of rows and gives the number of items."""
    columns = ["item_id", "row", "first_seen", "pretrain_count", "support", "tier"]
    table = catalog.order_by("row").select(columns).to_pyarrow()
    place = table.schema.get_field_index("first_seen")
    table = table.set_column(place, "first_seen", table["first_seen"].cast(TIMESTAMP))
    pq.write_table(table.combine_chunks(), path)
    return table.num_rows


def write_popularity(positives: ir.Table, bucket_minutes: int, path: Path) -> None:
    """Writes `popularity.parquet`: positives of each row in each span of time that has any."""
    width = bucket_minutes * MINUTE_US
    keyed = positives.select("row", bucket=positives.timestamp // width * width)
    counts = keyed.group_by(["bucket", "row"]).aggregate(count=keyed.count())
    table = counts.order_by(["bucket", "row"]).select("bucket", "row", "count").to_pyarrow()
    table = table.set_column(0, "bucket", table["bucket"].cast(TIMESTAMP))
    pq.write_table(table.combine_chunks(), path)
