"""Sections on the dataset: windows, tiers, the catalog's rows and the negatives."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from thawline.config.base import Count, Fraction, Positive, Section


class Tiers(Section):
    """Item tiers by support: positives of training users in the fine-tune window."""

    head: Count = Field(100, description="Least support of a head item.")
    torso: Count = Field(20, description="Least support of a torso item; tail is 1 or more.")

    @model_validator(mode="after")
    def _in_order(self) -> Tiers:
        if self.head <= self.torso:
            raise ValueError(f"head ({self.head}) must be above torso ({self.torso})")
        return self


class CatalogRows(Section):
    """Which items have a row of their own."""

    min_support: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Positives of training users in the training windows that an item needs for a "
        "row of its own; the others share buckets by a hash of their id. 0: every item has one.",
    )
    buckets: Count = Field(1_024, description="Rows shared by the items below `min_support`.")
    evict_after_days: Count | None = Field(
        None,
        description="Items without an event for so many days lose their row. Where one of "
        "`previous` does, a new generation starts and moved.parquet says which rows moved.",
    )


class Windows(Section):
    """Spans of days, histories and hold-outs."""

    end: datetime.date | None = Field(
        None, description="Last day (UTC) of the test window. None: the last day of the log."
    )
    test_days: Count = Field(1, description="Days of the `next` hold-out, up to `end`.")
    finetune_days: Count = Field(7, description="Days before the test window.")
    pretrain_days: Count = Field(21, description="Days of the pretraining window.")
    pretrain_overlap: bool = Field(
        False,
        description="true: the pretraining window ends with the fine-tune window; "
        "false: it ends where the fine-tune window starts.",
    )
    history_length: Count = Field(50, description="Last positives before the request.")
    sequence_length: Annotated[int, Field(ge=2)] = Field(
        50, description="Longest pretraining sequence; longer ones are cut into several."
    )
    holdout_users: Fraction = Field(
        0.05,
        description="Share of users held out of all training (the `in_window` hold-out); of "
        "requests, with `holdout_by: request`.",
    )
    holdout_by: Literal["user", "request"] = Field(
        "user",
        description="user: nothing of a held-out user trains, who is new to a table of users; "
        "request: the positives of held-out requests are no targets in any training, but are in "
        "the histories of later requests.",
    )
    tiers: Tiers = Tiers()
    catalog: CatalogRows = CatalogRows()
    previous: str | None = Field(
        None,
        description="A dataset or model folder whose catalog and vocabularies are extended, so "
        "that its rows keep their meaning. Days that it has built already are taken from it. "
        "models:/<name>@<alias> is a registered model; while no version has the alias, the items "
        "are numbered anew.",
    )
    late: Literal["report", "rebuild"] = Field(
        "report",
        description="Events that arrived after their day was built. report: the day stays as it "
        "is; rebuild: it and the days after it, whose histories they change, are built anew.",
    )
    rows_per_file: Count = 200_000
    rows_per_group: Count = 8_192
    engine: Literal["duckdb", "spark"] = Field(
        "duckdb",
        description="duckdb: within the process, out of core; spark: for logs that outgrow a "
        "machine (the extra `spark`, and Java 17). Both give the same rows.",
    )
    spark: dict[str, str] = Field(
        {},
        description="Spark's own settings, such as spark.master. What spark-submit sets counts "
        "where it started us; else Spark runs in this process.",
    )
    memory_limit: str = Field(
        "4GB", description="The engine's memory on this machine; beyond it, it spills."
    )
    max_rejected: Fraction = Field(
        0.01, description="Share of rejected rows above which the stage fails."
    )


class Negatives(Section):
    """How negatives are drawn for a log without impressions."""

    per_positive: Count = 4
    alpha: Annotated[float, Field(ge=0.0, le=2.0)] = Field(
        0.75, description="Draws are proportional to popularity^alpha."
    )
    popularity: Literal["window", "as_of", "decayed"] = Field(
        "as_of",
        description="window: positives in the training windows; as_of: before the request; "
        "decayed: as_of, halved every `half_life_hours`.",
    )
    half_life_hours: Positive = 24.0
    bucket_minutes: Annotated[int, Field(ge=1, le=1440)] = Field(
        60, description="How often as_of and decayed popularity are refreshed."
    )
    resample: bool = Field(True, description="Draw anew each epoch.")
    in_batch: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Negatives a request beside `per_positive`, taken in training from the other "
        "positives of its batch that existed at its time.",
    )
    exclude_known: bool = Field(
        False, description="Never draw an item of the request's own history."
    )
    catalogue_leak: bool = Field(
        False,
        description="For the study of the leak alone: draws from every item of the log, those of "
        "the test window and of the future too. The audit refuses it unless it is waived.",
    )
