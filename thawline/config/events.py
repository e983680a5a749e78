"""Sections on the log: where it is, how to read it, and the simulator that writes one."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from thawline.config.base import Count, Fraction, Name, Positive, Section, Seed
from thawline.config.presets import PRESETS


class Columns(Section):
    """Names of the log's columns."""

    user_id: str = "user_id"
    item_id: str = "item_id"
    timestamp: str = "timestamp"
    request_id: str | None = Field(
        None, description="Groups the impressions of one request. None: every event is a positive."
    )
    position: str | None = Field(None, description="Order of the candidates within a request.")


class Action(Section):
    """When an event counts as an action."""

    column: str | None = Field(
        None, description="Boolean or numeric column. None: every event is this action."
    )
    at_least: float | None = Field(
        None, description="The action happened where `column` is at least this. None: above 0."
    )
    equals: str | list[str] | None = Field(
        None,
        description="The action happened where `column` is this word, or one of these: for logs "
        "with a column that says what an event was.",
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Action:
        if self.equals is not None and self.at_least is not None:
            raise ValueError("equals and at_least are both set; keep one")
        if self.column is None and (self.equals is not None or self.at_least is not None):
            raise ValueError("name the column that equals or at_least is about")
        return self

    @property
    def words(self) -> list[str]:
        """The words of `equals`."""
        return [self.equals] if isinstance(self.equals, str) else list(self.equals or ())


class Events(Section):
    """Where the log is and how to read it."""

    preset: (
        Literal["feed", "recbole", "movielens-csv", "movielens-dat", "movielens-100k"] | None
    ) = Field(None, description="A known column mapping; keys set beside it override it.")
    path: str | list[str] | None = Field(
        None,
        description="A file, a folder, a glob, or a list of them, local or s3://, gs:// or "
        "hdfs://. None: `table`, or the simulator's.",
    )
    table: str | None = Field(
        None,
        description="A table or view (schema.table) of `connect` that holds the log, instead of "
        "files.",
    )
    connect: str | None = Field(
        None,
        description="URL of any backend of ibis, such as "
        "postgres://${PGUSER}:${PGPASSWORD}@host/base; ${NAME} is taken from the environment.",
    )
    format: Literal["auto", "parquet", "csv"] = "auto"
    separator: str = Field(",", description="CSV only.")
    header: list[str] | None = Field(
        None, description="CSV only: the columns' names where the file has no header line."
    )
    columns: Columns = Columns()
    timestamp_unit: Literal["auto", "s", "ms", "us", "ns"] = Field(
        "auto", description="Unit of a numeric timestamp. auto: the column is a timestamp already."
    )
    actions: dict[Name, Action] = Field(
        {"click": Action()},
        min_length=1,
        max_length=7,
        description="Action heads; the first one is the primary metric.",
    )
    impression: Action | None = Field(
        None,
        description="Which rows are impressions, where actions come as rows of their own: an "
        "action then joins the latest impression of its user and item. None: every row is one.",
    )
    attribution_hours: Annotated[float, Field(ge=0.0)] = Field(
        24.0,
        description="How long after an impression an action still joins it. With `impression` "
        "only.",
    )
    request_gap_seconds: Positive | None = Field(
        None,
        description="Impressions of a user at most this far apart are one request, in a log of "
        "impressions without request ids.",
    )
    ignored_actions: list[str] = Field(
        [],
        description="Words in the columns of `equals` whose rows are left out; any other word "
        "that no action names is rejected as unknown.",
    )
    latest: datetime.datetime | None = Field(
        None,
        description="Later rows are rejected as being of the future. None: a day after now.",
    )
    context: dict[Name, str] = Field(
        {},
        description="Small categorical columns of the request: name in the model to log column.",
    )
    weight: str | None = Field(
        None,
        description="Column with the weight of the request, above 0: how much it counts in the "
        "losses and figures. None: all alike.",
    )
    truth: str | None = Field(
        None,
        description="Parquet with request_id, item_id and p_<action>: the true probabilities of "
        "a simulated log, used only to report the oracle's metrics.",
    )
    sample_users: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Share of users kept, chosen by a hash of their id."
    )

    @model_validator(mode="after")
    def _no_secrets(self) -> Events:
        password = urlsplit(self.connect).password if self.connect else None
        if password and "$" not in password:
            raise ValueError(
                "connect holds a password, which would be logged with the config: put it into the "
                "environment and write ${NAME}"
            )
        if (self.table is None) != (self.connect is None):
            raise ValueError("table and connect go together: set both or none")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        if preset not in PRESETS:
            return values
        merged = {**PRESETS[preset], **values}
        columns = values.get("columns")
        if isinstance(columns, dict):
            merged["columns"] = {**PRESETS[preset]["columns"], **columns}
        return merged

    @model_validator(mode="after")
    def _requests_of_impressions(self) -> Events:
        if self.request_gap_seconds is not None and self.columns.request_id is not None:
            raise ValueError(
                "columns.request_id groups the impressions already; drop request_gap_seconds"
            )
        if self.impression is not None and not self.impressions:
            raise ValueError(
                "impression needs requests: set columns.request_id or request_gap_seconds"
            )
        return self

    @property
    def impressions(self) -> bool:
        """Whether the log holds impressions: rows without an action are then negatives."""
        return self.columns.request_id is not None or self.request_gap_seconds is not None

    @property
    def actions_in_rows(self) -> bool:
        """Whether an event may have a row for each of its actions."""
        return self.impression is not None or bool(self.by_word)

    @property
    def by_word(self) -> dict[str, set[str]]:
        """Columns that say what an event was, and the words that are known there."""
        known: dict[str, set[str]] = {}
        for rule in (*self.actions.values(), self.impression):
            if rule is not None and rule.column is not None and rule.words:
                known.setdefault(rule.column, set(self.ignored_actions)).update(rule.words)
        return known


class Items(Section):
    """A file with a line an item: ids of further tables and content vectors.

    A simulated feed brings its own, with `author_id` and, with `simulate.content_dim`, `content`.
    """

    path: str | list[str] | None = Field(
        None, description="A file, a folder, a glob, or a list of them, local or a URL."
    )
    format: Literal["auto", "parquet", "csv"] = "auto"
    separator: str = Field(",", description="CSV only.")
    header: list[str] | None = Field(
        None, description="CSV only: the columns' names where the file has no header line."
    )
    item_id: str = Field("item_id", description="The column of the item's id, as in the log.")
    content: str | None = Field(
        None, description="The column of the content vectors: a list of numbers, all of one length."
    )

    @model_validator(mode="after")
    def _content_of_a_file(self) -> Items:
        if self.content is not None and self.path is None:
            raise ValueError("content names a column, but path names no file")
        return self


class Simulate(Section):
    """The feed simulator: a home feed with known click and save probabilities."""

    impressions: Count = 400_000
    users: Count = 4_000
    items: Count = 12_000
    days: Annotated[int, Field(ge=3)] = 30
    start: datetime.date = datetime.date(2026, 1, 1)
    zipf: Annotated[float, Field(ge=0.0, le=3.0)] = Field(
        1.0, description="Exponent of the items' popularity."
    )
    candidates: Annotated[int, Field(ge=2, le=100)] = Field(
        10, description="Impressions a request."
    )
    interests: Count = Field(16, description="Width of the hidden interest vectors.")
    drift: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.02, description="Share of a user's interest that is replaced each day."
    )
    born_during: Fraction = Field(
        0.5, description="Share of the items born after the first day; the rest are there from it."
    )
    authors: Count = Field(
        800, description="Authors of the items: each has items of similar topics, a few very many."
    )
    content_dim: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Width of the items' content vectors; 0 writes none."
    )
    seed: Seed = 0
