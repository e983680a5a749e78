"""Built days of requests: immutable folders of part files that one dataset takes from another.

A day is taken over only where nothing that decides it has changed: its config (`recipe`), the rows
of the catalog, the codes of the context, its own events and those before it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from thawline import __version__
from thawline.config import Config
from thawline.data.digests import Digests
from thawline.data.engine import DAY_US, HOUR_US
from thawline.data.ids import columns_of
from thawline.data.manifest import SCHEMA_VERSION, Catalog, Dataset, Day, Digest, Late
from thawline.data.spans import EPOCH, Spans, span_of
from thawline.errors import DataError

CHUNK_BYTES = 1 << 20
NEUTRAL_EVENTS = {"path", "truth"}
"""Keys of `events` that change nothing in a dataset: of an input file, the content counts."""
NEUTRAL_WINDOWS = {
    *("engine", "spark", "memory_limit", "max_rejected", "late", "previous", "catalog", "tiers"),
    *("end", "test_days", "finetune_days", "pretrain_days", "pretrain_overlap", "sequence_length"),
}
"""Keys of the config that change nothing in the requests of a day; the catalog's rows do, and are
compared themselves."""


@dataclass(frozen=True)
class Source:
    """A dataset from which days may be taken."""

    dataset: Dataset
    until: int | None = None
    """Days that end later (µs since 1970) are not taken; None: all are."""

    @classmethod
    def of(cls, dataset: Dataset, catalog: Catalog) -> Source:
        """The days of a dataset that say of every item what a new catalog says.

        An item that has risen from a bucket to a row of its own stands under the bucket's row from
        the day on which it was first seen.
        """
        old = dataset.catalog
        risen = catalog.first_seen[len(old.item_id) :]
        if not old.rows.buckets or not len(risen):
            return cls(dataset)
        return cls(dataset, int(risen.min()))

    def has(self, day: datetime.date) -> bool:
        """Whether a day may be taken, if it is there."""
        end = ((day - EPOCH).days + 1) * DAY_US
        return self.until is None or end <= self.until

    def fits(self, catalog: Catalog, context: Mapping[str, list[str]]) -> bool:
        """Whether its rows and codes mean the same in a new catalog and new vocabularies."""
        codes = self.dataset.manifest.context
        return (
            catalog.extends(self.dataset.catalog)
            and codes.keys() == context.keys()
            and all(context[name][: len(values)] == values for name, values in codes.items())
        )


@dataclass
class Plan:
    """Which days of requests are taken and which are built."""

    expected: dict[datetime.date, Day]
    """What a day is made from now; content and counts are not known yet."""
    taken: dict[datetime.date, tuple[Path, Day]] = field(default_factory=dict)
    """Days to take from a folder."""
    late: dict[str, Late] = field(default_factory=dict)

    @property
    def missing(self) -> list[datetime.date]:
        """Days to build."""
        return [day for day in self.expected if day not in self.taken]


def recipe_of(config: Config, spans: Spans, day: datetime.date, truth: Sequence[str]) -> str:
    """A hash of the config's part in a day of requests."""
    events = events_tree(config)
    labels_until = None
    if config.events.impression is not None:
        # A label may come after midnight, as long as its window goes on.
        midnight = ((day - EPOCH).days + 1) * DAY_US
        window = spans.finetune if day <= spans.finetune.end else spans.test
        delayed = midnight + int(config.events.attribution_hours * HOUR_US)
        labels_until = min(span_of(window)[1], delayed)
    made_from = {
        "versions": [SCHEMA_VERSION, __version__],
        "events": events,
        "windows": config.windows.model_dump(mode="json", exclude=NEUTRAL_WINDOWS),
        "labels_until": labels_until,
        "truth": list(truth),
        "ids": sorted(columns_of(config.tables.others, "request").values()),
    }
    return hash_of(made_from)


def events_tree(config: Config) -> dict[str, Any]:
    """What the config says of the log's content, as JSON values.

    Without weights it is what it was before there was a choice, so that datasets stay valid.
    """
    tree = config.events.model_dump(mode="json", exclude=NEUTRAL_EVENTS)
    if tree["weight"] is None:
        del tree["weight"]
    return tree


def plan_days(
    config: Config,
    spans: Spans,
    digests: Digests,
    sources: Sequence[Source],
    truth: Sequence[str],
) -> Plan:
    """Decides which days are taken from other datasets.

    Args:
        config: Uses `events` and `windows`.
        spans: The windows.
        digests: Of the log.
        sources: Datasets whose rows and codes fit, the one to prefer first.
        truth: Fingerprints of the truth's files.
    """
    days = [*spans.finetune.days(), *spans.test.days()]
    plan = Plan(
        {
            day: Day(
                content="",
                recipe=recipe_of(config, spans, day, truth),
                requests={"train": 0, "held_out": 0},
                own=digests.own.get(day, Digest()),
                spill=digests.spill.get(day, Digest()),
                past=digests.past(day),
                since=digests.first,
            )
            for day in days
        }
    )
    changed: list[datetime.date] = []
    for day, now in plan.expected.items():
        for source in sources:
            built = source.dataset.manifest.days.get(str(day))
            folder = source.dataset.root / "requests" / f"day={day}"
            if built is None or built.recipe != now.recipe or not source.has(day):
                continue
            if not _is_whole(folder, built):
                continue
            in_time = built.own == now.own
            if in_time and built.spill != now.spill:
                # Its requests ran past midnight, which was the end of the window then.
                continue
            if not in_time or not _same_past(built, now):
                changed.append(day)
            plan.taken[day] = (folder, built)
            break
    _judge_late(plan, changed, config)
    return plan


def _same_past(built: Day, now: Day) -> bool:
    # Where old days have left the log, nothing can be said.
    return built.past == now.past or now.since > built.since


def _judge_late(plan: Plan, changed: list[datetime.date], config: Config) -> None:
    if not changed:
        return
    if config.windows.late == "rebuild":
        before = datetime.timedelta()
        if config.events.impression is not None:
            # A late action may be a label of a request this long before it.
            before = datetime.timedelta(hours=config.events.attribution_hours)
            before = datetime.timedelta(days=-(-before // datetime.timedelta(days=1)))
        for day in [day for day in plan.taken if day >= changed[0] - before]:
            del plan.taken[day]
        return
    for day in changed:
        built, now = plan.taken[day][1], plan.expected[day]
        if built.own != now.own:
            plan.late[str(day)] = Late(built=built.own.events, now=now.own.events)
    first = min(plan.taken)
    built, now = plan.taken[first][1], plan.expected[first]
    if not _same_past(built, now):
        plan.late[f"before {first}"] = Late(built=built.past.events, now=now.past.events)


def take_day(folder: Path, out: Path) -> None:
    """Puts the part files of a day into another dataset: by links where the disk allows it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in sorted(folder.glob("part-*.parquet")):
        try:
            os.link(file, out / file.name)
        except OSError:
            shutil.copyfile(file, out / file.name)


def content_of(folder: Path) -> str:
    """A hash of the part files in a folder, names and bytes."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("part-*.parquet")):
        digest.update(f"{file.name}\0{hash_file(file)}\0".encode())
    return digest.hexdigest()


def hash_file(file: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        DataError: A file that cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", "build it again") from error


def hash_of(tree: object) -> str:
    """SHA-256 of a tree of JSON values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


class Journal:
    """The days that a build has finished, so that it goes on where it was killed."""

    def __init__(self, root: Path, version: str) -> None:
        """Takes up the journal of a build in a folder, or begins a new one.

        Args:
            root: The folder of the dataset that is built.
            version: What the build is made from; the days of another are not its days.
        """
        self._folder = root / ".days"
        self._requests = root / "requests"
        mark = self._folder / "version"
        if not mark.exists() or mark.read_text(encoding="utf-8") != version:
            for folder in (self._folder, self._requests):
                shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            _write_whole(mark, version)

    def find(self, day: datetime.date) -> Day | None:
        """A finished day, if its files are what was written."""
        try:
            text = (self._folder / f"{day}.json").read_text(encoding="utf-8")
        except OSError:
            return None
        found = Day.model_validate_json(text)
        whole = content_of(self._requests / f"day={day}") == found.content
        return found if whole else None

    def add(self, day: datetime.date, made: Day) -> None:
        """Notes a day whose files are written."""
        _write_whole(self._folder / f"{day}.json", made.model_dump_json())

    def close(self) -> None:
        """Removes the journal: the dataset is whole."""
        shutil.rmtree(self._folder)


def count_requests(folder: Path) -> dict[Literal["train", "held_out"], int]:
    """Requests of training and of held-out users in a day's part files."""
    train = held_out = 0
    for file in sorted(folder.glob("part-*.parquet")):
        with pq.ParquetFile(file) as parquet:
            column = parquet.read(columns=["held_out"]).column("held_out")
        held_out += column.to_numpy().sum()
        train += len(column)
    return {"train": int(train - held_out), "held_out": int(held_out)}


def _is_whole(folder: Path, built: Day) -> bool:
    try:
        rows = sum(pq.read_metadata(file).num_rows for file in folder.glob("part-*.parquet"))
    except (OSError, pa.ArrowException):
        return False
    return rows == sum(built.requests.values())


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)
