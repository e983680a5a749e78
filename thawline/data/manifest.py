"""What a dataset folder holds, and the handle that reads it.

```
<root>/manifest.json
<root>/catalog.parquet       one line an item or bucket, ordered by row
<root>/moved.parquet         after an eviction: item_id, old_row, row (null: no row any more)
<root>/popularity.parquet    bucket, row, count: positives of every user in a span of time
<root>/requests/day=YYYY-MM-DD/part-*.parquet
<root>/sequences/part-*.parquet
<root>/rejected/*.parquet    rejected rows of the log, with the reason
<root>/items.parquet         one line a line of the catalog: id_<column>, content
<root>/ids/<request or item>_<column>.parquet    hash, support, id: what training has seen
```

The last two are there where the config names further ID tables or content vectors. Requests then
hold `id_<column>` too: a hash of the id, 0 where there is none.

Row 0 of every table is padding and row 1 stands for items that the catalog does not know, so the
catalog's first line has row 2. Items without a row of their own share buckets: lines without an
item_id, found by a hash of the id.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from thawline.errors import DataError

SCHEMA_VERSION = 2
PADDING_ROW = 0
UNKNOWN_ROW = 1
FIRST_ROW = 2

CATALOG_KEY = b"thawline"
"""Key of `RowFacts`, as JSON, in the metadata of `catalog.parquet`."""

TIERS = ("head", "torso", "tail", "cold")
"""Names of the values of the catalog's `tier` column, 0 to 3."""

Split = Literal["train", "in_window", "next"]
SPLITS: tuple[Split, ...] = ("train", "in_window", "next")


class Window(BaseModel):
    """An inclusive span of UTC days."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: datetime.date
    end: datetime.date

    def days(self) -> list[datetime.date]:
        """Every day of the window, in order."""
        count = (self.end - self.start).days + 1
        return [self.start + datetime.timedelta(days=offset) for offset in range(count)]


class Digest(BaseModel):
    """How many events, and sums of their hashes: the same whatever their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    events: int = 0
    high: int = 0
    low: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest(
            events=self.events + other.events,
            high=self.high + other.high,
            low=self.low + other.low,
        )


class Day(BaseModel):
    """A built day of requests, and what it was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: str
    """A hash of its part files."""
    recipe: str
    """A hash of the config that decides it."""
    requests: dict[Literal["train", "held_out"], int]
    own: Digest
    """Events of its requests up to midnight."""
    spill: Digest
    """Events of its requests after midnight."""
    past: Digest
    """Events before it, from which its histories come."""
    since: datetime.date
    """The first day of `past`, or of the log."""


class Late(BaseModel):
    """A day whose events are not those that it was built from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    built: int
    """Events that it was built from."""
    now: int
    """Events that the log holds now."""


class RowFacts(BaseModel):
    """How items found their rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    generation: int = 0
    """Within a generation a row keeps its meaning."""
    first_bucket: int = FIRST_ROW
    buckets: int = 0
    bucketed: int = 0
    """Items of the log that have no row of their own but share a bucket."""
    collision_rate: float | None = None
    """Share of these that are not alone in their bucket."""
    evicted: int = 0
    """Items of the previous catalog that lost their row."""


class ContentFacts(BaseModel):
    """The content vectors of the items."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dim: int
    """Width of the vectors."""
    items: int
    """Items with a row of their own and a vector."""
    missing: int
    """Items with a row of their own and none: zeros."""


class Manifest(BaseModel):
    """`manifest.json`: what the dataset was made from and what is in it."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int
    data_version: str
    impressions: bool
    """True: candidates are the log's impressions. False: each request has one positive."""
    actions: list[str]
    """Bit `a` of a history action is `actions[a]`."""
    context: dict[str, list[str]]
    """Vocabulary of each context column; code 0 is missing or unseen, code i+1 is value i."""
    history_length: int
    bucket_minutes: int
    pretrain: Window
    finetune: Window
    test: Window
    num_items: int
    """Items with a row of their own."""
    requests: dict[Split, int]
    requests_by_day: dict[str, int]
    sequences: dict[Literal["train", "held_out"], int]
    rejected: dict[str, int]
    days: dict[str, Day] = {}
    """The days of requests, by date."""
    late: dict[str, Late] = {}
    """Days that stayed as they were though events came late; `before <date>` stands for all days
    before the first one."""
    rows: RowFacts = RowFacts()
    holdout_by: Literal["user", "request"] = "user"
    """Whether users or single requests are held out of training."""
    ids: dict[Literal["request", "item"], dict[str, int]] = {}
    """Columns of ids that requests and items hold, and how many ids of each training has seen."""
    content: ContentFacts | None = None
    inputs: str = ""
    """A hash of the files and the config; with `parent`, it says whether there is work to do."""
    parent: str = ""
    """A hash of the catalog that this one extends."""
    has_oracle: bool
    """True: requests hold `oracle_<action>`, the true probabilities of a simulated log."""
    weighted: bool = False
    """True: requests hold their `weight`, float64."""


@dataclass(frozen=True)
class Catalog:
    """The items and buckets, as arrays ordered by row; index 0 is row `FIRST_ROW`."""

    item_id: pa.Array
    """int64 or string, as in the log; null for a bucket."""
    first_seen: np.ndarray
    """int64 [N]: microseconds since 1970 UTC of the first event of any user."""
    pretrain_count: np.ndarray
    """int64 [N]: positives of training users in the pretraining window."""
    support: np.ndarray
    """int64 [N]: positives of training users in the fine-tune window."""
    tier: np.ndarray
    """int8 [N]: index into `TIERS`, from `support`; a bucket is tail or cold."""
    rows: RowFacts = field(default_factory=RowFacts)
    """How the items found their rows."""

    @property
    def num_rows(self) -> int:
        """Rows of a table over this catalog, padding and unknown included."""
        return len(self.item_id) + FIRST_ROW

    def extends(self, old: Catalog) -> bool:
        """Whether every row of an old catalog means the same in this one."""
        length = len(old.item_id)
        return (
            old.item_id.type == self.item_id.type
            and length <= len(self.item_id)
            and old.item_id.equals(self.item_id.slice(0, length))
            and (
                not old.rows.buckets
                or (old.rows.first_bucket, old.rows.buckets)
                == (self.rows.first_bucket, self.rows.buckets)
            )
        )

    @classmethod
    def read(cls, path: Path) -> Catalog:
        """Reads `catalog.parquet`.

        Raises:
            DataError: A missing or unreadable file, or one that is no catalog.
        """
        table = read_table(path)
        for name in ("item_id", "first_seen", "pretrain_count", "support", "tier"):
            if name not in table.column_names:
                raise DataError(f"{path} has no column {name!r}", "build the dataset again")
        facts = (table.schema.metadata or {}).get(CATALOG_KEY, b"{}")
        return cls(
            rows=RowFacts.model_validate_json(facts),
            item_id=table.column("item_id").combine_chunks(),
            first_seen=table.column("first_seen").cast(pa.int64()).to_numpy(),
            pretrain_count=table.column("pretrain_count").to_numpy(),
            support=table.column("support").to_numpy(),
            tier=table.column("tier").to_numpy(),
        )


@dataclass(frozen=True)
class Dataset:
    """A dataset folder that has been built."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(cls, root: str | Path) -> Dataset:
        """Opens a dataset folder.

        Raises:
            DataError: No manifest, one that cannot be read, or one of another schema version.
        """
        path = Path(root) / "manifest.json"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}", "build the dataset: `thawline windows`"
            ) from error
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}", "build the dataset again") from error
        version = tree.get("schema_version") if isinstance(tree, dict) else None
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{path} has schema version {version}; this Thawline reads {SCHEMA_VERSION}",
                "build the dataset again with `thawline windows`",
            )
        try:
            return cls(Path(root), Manifest.model_validate(tree))
        except ValidationError as error:
            raise DataError(f"{path} is damaged: {error}", "build the dataset again") from error

    @cached_property
    def catalog(self) -> Catalog:
        """The items."""
        return Catalog.read(self.root / "catalog.parquet")

    def request_files(self, split: Split) -> list[Path]:
        """Part files of the days of a split, ordered by day and name.

        The files of the fine-tune window serve both `train` and `in_window`: the column
        `held_out` tells their requests apart. `next` takes the requests that are not held out.
        """
        window = self.manifest.test if split == "next" else self.manifest.finetune
        files: list[Path] = []
        for day in window.days():
            files += sorted((self.root / "requests" / f"day={day}").glob("part-*.parquet"))
        return files

    def sequence_files(self) -> list[Path]:
        """Part files of the pretraining sequences, in order."""
        return sorted((self.root / "sequences").glob("part-*.parquet"))


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads one Parquet file whole.

    Raises:
        DataError: A missing, truncated or corrupt file; the message names it.
    """
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}", "write or build the file again"
        ) from error
