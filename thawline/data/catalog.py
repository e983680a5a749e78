"""The items of a dataset: their rows, counts and tiers, and how popular they are when.

A catalog lives: it extends the one before it, and what has a row keeps it. Everything here is a
query of the engine, so that the number of ids is bounded by its disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from thawline.config import CatalogRows, Tiers
from thawline.data.engine import DAY_US, Backend, epoch_us, hash63, keep, stream
from thawline.data.manifest import CATALOG_KEY, FIRST_ROW, TIERS, UNKNOWN_ROW, RowFacts
from thawline.data.parts import write_file
from thawline.data.previous import Previous
from thawline.data.sources import open_parquet
from thawline.errors import ConfigError, DataError

MINUTE_US = 60_000_000
TIMESTAMP = pa.timestamp("us", tz="UTC")
COLUMNS = ("item_id", "row", "first_seen", "pretrain_count", "support", "tier")
COUNTS = ("pretrain_count", "support")
ROWS_PER_GROUP = 1 << 20


@dataclass(frozen=True)
class BuiltCatalog:
    """Tables in the engine."""

    lines: ir.Table
    """item_id (null for a bucket), row, first_seen (int64 microseconds), pretrain_count, support,
    tier: each row of a table over the catalog but the first two."""
    rows: ir.Table
    """item_id and row of each item of the log, its own or its bucket's; `UNKNOWN_ROW` for an
    evicted one where there are no buckets."""
    facts: RowFacts
    num_items: int
    """Items with a row of their own."""
    moved: ir.Table | None
    """After an eviction: item_id, old_row and row (null: evicted) of what does not stay."""


def build_catalog(
    engine: Backend,
    events: ir.Table,
    *,
    positive: ir.BooleanValue,
    pretrain: tuple[int, int],
    finetune: tuple[int, int],
    end: int,
    tiers: Tiers,
    settings: CatalogRows,
    previous: Previous | None = None,
) -> BuiltCatalog:
    """Gives the items of the events rows.

    New rows come in order of (first_seen, item_id), after the buckets and the previous catalog's
    rows. A row moves only where an eviction starts a new generation.

    Args:
        engine: Keeps the result.
        events: Canonical events up to the end of the test window.
        positive: Whether one of `events` is a positive.
        pretrain: First microsecond of the pretraining window and of what follows it.
        finetune: The same of the fine-tune window.
        end: What follows the last microsecond of the test window.
        tiers: Least support of a tier.
        settings: Which items have a row of their own.
        previous: The catalog to extend.

    Raises:
        ConfigError: An eviction within the windows, or another number of buckets than before.
        DataError: Ids of another type than in the previous catalog.
    """
    start = min(pretrain[0], finetune[0])
    days = settings.evict_after_days
    if days is not None and end - days * DAY_US > start:
        raise ConfigError(
            f"windows.catalog.evict_after_days is {days}, but the windows are "
            f"{(end - start) // DAY_US} days: items of the windows would lose their rows",
            f"raise it to at least {(end - start) // DAY_US}",
        )
    items = _count_items(events, positive, pretrain, finetune)
    items = _add_previous(engine, items, previous)
    known = items.old_row.notnull()
    own = known | (items.trained >= settings.min_support)
    if days is not None:
        own = own & (items.last_seen >= end - days * DAY_US).fill_null(False)
    items = keep(engine, "items", items.mutate(own=own))
    evicted = items.filter(items.old_row.notnull(), ~items.own).count().to_pyarrow().as_py()
    old = previous.catalog if previous else None
    anew = old is None or evicted > 0
    buckets = _decide_buckets(settings, None if old is None else old.rows, anew)
    first_bucket, first_own = FIRST_ROW, FIRST_ROW + buckets
    if old is not None and not anew:
        first_own = old.num_rows
        first_bucket = old.rows.first_bucket
        if buckets and not old.rows.buckets:
            first_bucket, first_own = old.num_rows, old.num_rows + buckets

    owned = items.filter(items.own)
    numbered = _number(owned, first_own, anew)
    tier = ibis.cases(
        (numbered.support >= tiers.head, TIERS.index("head")),
        (numbered.support >= tiers.torso, TIERS.index("torso")),
        (numbered.support >= 1, TIERS.index("tail")),
        else_=TIERS.index("cold"),
    )
    numbered = keep(engine, "numbered", numbered.mutate(tier=tier.cast("int8")))
    lines = numbered.select(*COLUMNS)
    rest = items.filter(~items.own, items.last_seen.notnull())
    facts = RowFacts(
        generation=0 if old is None else old.rows.generation + (evicted > 0), evicted=evicted
    )
    if buckets:
        place = hash63(rest.item_id.cast("string")) % buckets + first_bucket
        rest = keep(engine, "bucketed", rest.mutate(row=place.cast("int64")))
        shared = _fill_buckets(engine, rest, first_bucket, buckets, end)
        lines = lines.union(shared.mutate(item_id=ibis.null(lines.item_id.type())).select(*COLUMNS))
        facts = facts.model_copy(
            update={"first_bucket": first_bucket, "buckets": buckets} | _collisions(shared)
        )
    else:
        rest = rest.mutate(row=ibis.literal(UNKNOWN_ROW, "int64"))
    rows = numbered.select("item_id", "row").union(rest.select("item_id", "row"))
    moved = None
    if evicted:
        before = items.filter(items.old_row.notnull()).select("item_id", "old_row")
        after = numbered.select(own_id="item_id", row="row")
        joined = before.left_join(after, before.item_id == after.own_id)
        moved = joined.filter(joined.row.isnull() | (joined.row != joined.old_row))
        moved = keep(engine, "moved", moved.select("item_id", "old_row", "row"))
    return BuiltCatalog(
        lines=keep(engine, "catalog", lines),
        rows=keep(engine, "item_rows", rows),
        facts=facts,
        num_items=numbered.count().to_pyarrow().as_py(),
        moved=moved,
    )


def _count_items(
    events: ir.Table,
    positive: ir.BooleanValue,
    pretrain: tuple[int, int],
    finetune: tuple[int, int],
) -> ir.Table:
    def inside(span: tuple[int, int]) -> ir.BooleanValue:
        return (events.timestamp >= span[0]) & (events.timestamp < span[1])

    trained = positive & ~events.held_out
    return events.group_by("item_id").aggregate(
        first_seen=events.timestamp.min(),
        last_seen=events.timestamp.max(),
        pretrain_count=(trained & inside(pretrain)).sum().cast("int64"),
        support=(trained & inside(finetune)).sum().cast("int64"),
        trained=(trained & (inside(pretrain) | inside(finetune))).sum().cast("int64"),
    )


def _add_previous(engine: Backend, items: ir.Table, previous: Previous | None) -> ir.Table:
    """Adds the previous catalog's items, and `old_row`: null where it has none."""
    if previous is None:
        return items.mutate(old_row=ibis.null("int64"))
    columns = ("item_id", "row", "first_seen")
    needed = {f"windows.previous, column {name}": name for name in columns}
    known = open_parquet(engine, [previous.path], needed)
    known = known.filter(known.item_id.notnull())
    if known.item_id.type().is_string() != items.item_id.type().is_string():
        raise DataError(
            f"item ids are {items.item_id.type()} in the log, but {known.item_id.type()} in "
            f"{previous.path} (windows.previous)",
            "write the ids as before, or drop windows.previous to number the items anew",
        )
    known = known.select(known_id="item_id", old_row="row", known_since=epoch_us(known.first_seen))
    joined = items.outer_join(known, items.item_id == known.known_id)
    seen = joined.first_seen.fill_null(joined.known_since)
    joined = joined.mutate(
        item_id=joined.item_id.fill_null(joined.known_id),
        first_seen=ibis.least(seen, joined.known_since.fill_null(seen)),
        **{name: joined[name].fill_null(0) for name in (*COUNTS, "trained")},
    )
    return joined.drop("known_id", "known_since")


def _decide_buckets(settings: CatalogRows, old: RowFacts | None, anew: bool) -> int:
    wanted = settings.buckets if settings.min_support else 0
    if old is None or not old.buckets:
        return wanted
    if wanted and wanted != old.buckets and not anew:
        raise ConfigError(
            f"windows.catalog.buckets is {wanted}, but windows.previous has {old.buckets}",
            f"set it to {old.buckets}, or drop windows.previous to number the items anew",
        )
    return wanted or old.buckets


def _number(owned: ir.Table, first: int, anew: bool) -> ir.Table:
    """Adds `row`: the old one where it stays, else from `first` on."""
    stays = owned.filter(owned.old_row.notnull())
    fresh = owned if anew else owned.filter(owned.old_row.isnull())
    order = [fresh.old_row.asc(nulls_first=False)] * anew + [fresh.first_seen, fresh.item_id]
    place = ibis.row_number().over(order_by=order)
    fresh = fresh.mutate(row=(place + first).cast("int64"))
    return fresh if anew else fresh.union(stays.mutate(row=stays.old_row))


def _fill_buckets(
    engine: Backend, bucketed: ir.Table, first: int, count: int, end: int
) -> ir.Table:
    """The lines of the buckets; one without items is not seen before `end`."""
    summed = bucketed.group_by("row").aggregate(
        items=bucketed.count(),
        seen=bucketed.first_seen.min(),
        **{name: bucketed[name].sum().cast("int64") for name in COUNTS},
    )
    numbers = pa.table({"number": np.arange(first, first + count)})
    places = keep(engine, "buckets", ibis.memtable(numbers))
    joined = places.left_join(summed, places.number == summed.row)
    support = joined.support.fill_null(0)
    tier = (support >= 1).ifelse(TIERS.index("tail"), TIERS.index("cold")).cast("int8")
    return keep(
        engine,
        "bucket_lines",
        joined.select(
            row=joined.number,
            first_seen=joined.seen.fill_null(end).cast("int64"),
            pretrain_count=joined.pretrain_count.fill_null(0),
            support=support,
            tier=tier,
            items=joined["items"].fill_null(0),
        ),
    )


def _collisions(shared: ir.Table) -> dict[str, int | float | None]:
    items = shared["items"]
    row = shared.aggregate(
        bucketed=items.sum().cast("int64"), alone=(items == 1).sum().cast("int64")
    )
    facts = row.to_pyarrow().to_pylist()[0]
    bucketed, alone = facts["bucketed"] or 0, facts["alone"] or 0
    rate = 1 - alone / bucketed if bucketed else None
    return {"bucketed": bucketed, "collision_rate": rate}


def write_catalog(engine: Backend, catalog: BuiltCatalog, path: Path) -> None:
    """Writes `catalog.parquet` in order of rows, a part at a time."""
    id_type = pa.string() if catalog.lines.item_id.type().is_string() else pa.int64()
    types = [id_type, pa.int64(), TIMESTAMP, pa.int64(), pa.int64(), pa.int8()]
    schema = pa.schema(
        list(zip(COLUMNS, types, strict=True)),
        metadata={CATALOG_KEY: catalog.facts.model_dump_json().encode()},
    )
    lines = catalog.lines.order_by("row").select(*COLUMNS)
    write_file(path, schema, stream(engine, lines, ROWS_PER_GROUP), ROWS_PER_GROUP)


def write_moved(engine: Backend, catalog: BuiltCatalog, path: Path) -> None:
    """Writes `moved.parquet` where rows have moved."""
    if catalog.moved is not None:
        moved = catalog.moved.order_by("old_row")
        schema = moved.schema().to_pyarrow()
        write_file(path, schema, stream(engine, moved, ROWS_PER_GROUP), ROWS_PER_GROUP)


def write_popularity(engine: Backend, positives: ir.Table, bucket_minutes: int, path: Path) -> None:
    """Writes `popularity.parquet`: positives of each row in each span of time that has any."""
    width = bucket_minutes * MINUTE_US
    known = positives.filter(positives.row >= FIRST_ROW)
    keyed = known.select("row", bucket=known.timestamp // width * width)
    counts = keyed.group_by(["bucket", "row"]).aggregate(count=keyed.count())
    counts = counts.order_by(["bucket", "row"]).select("bucket", "row", "count")
    schema = pa.schema([("bucket", TIMESTAMP), ("row", pa.int64()), ("count", pa.int64())])
    write_file(path, schema, stream(engine, counts, ROWS_PER_GROUP), ROWS_PER_GROUP)
