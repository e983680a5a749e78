"""Sections on what surrounds training: evaluation, audit, gate, tracking, the machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from thawline.config.base import Count, Section

FindingName = Literal[
    "catalogue_leak",
    "future_negatives",
    "only_negative_rows",
    "repeated_requests",
    "history_leakage",
    "holdout_leakage",
    "trivial_scorers",
    "tier_sizes",
    "batch_overlap",
    "popularity_drift",
    "rejected_rows",
    "late_events",
]
"""What the audit looks for."""


class Evaluation(Section):
    """What is scored, and how much of it."""

    batch_size: Count = 2_048
    epoch_requests: Annotated[int, Field(ge=0)] = Field(
        20_000, description="Requests a hold-out scored after each epoch; 0 scores none."
    )
    hit_at: Count = 3


class Audit(Section):
    """What is looked at in a dataset before anything trains on it."""

    waive: list[FindingName] = Field(
        [], description="Findings that do not stop the pipeline though they are errors, by name."
    )
    requests: Count = Field(
        20_000, description="Requests a split that are looked at where all would take too long."
    )


class Gate(Section):
    """What a model must reach before it is registered."""

    holdout: Literal["next", "in_window"] = "next"
    min_auc: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="Least pooled AUC of the primary action."
    )


class Tracking(Section):
    """Where runs and models go."""

    uri: str = Field(
        "",
        description="MLflow tracking URI. Empty: MLFLOW_TRACKING_URI, else "
        "sqlite:///<workdir>/mlflow.db.",
    )
    experiment: str = "thawline"
    model_name: str = Field("thawline-ranker", description="Name in the model registry.")
    alias: str = Field("champion", description="Alias given to a version that passed the gate.")


class Runtime(Section):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = Field(0, description="0: every core.")
