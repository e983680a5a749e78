"""Sections on what surrounds training: evaluation, audit, gate, tracking, the machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from thawline.config.base import Count, Positive, Section

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
    hit_at: Count = Field(3, description="The k of HIT@k and NDCG@k among a request's candidates.")
    bootstrap: Annotated[int, Field(ge=0)] = Field(
        1_000, description="Resamples of the users for 95 % intervals; 0: none."
    )
    retrieval_requests: Annotated[int, Field(ge=0)] = Field(
        2_000, description="Requests a hold-out whose items are ranked among the catalog; 0: none."
    )
    retrieval_at: Count = Field(100, description="The k of recall@k over the catalog.")


class Audit(Section):
    """What is looked at in a dataset before anything trains on it."""

    waive: list[FindingName] = Field(
        [], description="Findings that do not stop the pipeline though they are errors, by name."
    )
    requests: Count = Field(
        20_000, description="Requests a split that are looked at where all would take too long."
    )


RuleFigure = Literal[
    "auc",
    "user_auc",
    "request_auc",
    "log_loss",
    "normalized_entropy",
    "calibration",
    "hit",
    "ndcg",
    "mrr",
]
"""A figure of the metrics; `hit` and `ndcg` are those at `evaluation.hit_at`."""

LOWER_IS_BETTER = ("log_loss", "normalized_entropy")

BOUNDS = ("not_below", "not_above", "at_least", "at_most", "within")


class GateRule(Section):
    """One rule: on a figure (one of the five bounds), or on the audit."""

    figure: RuleFigure | None = None
    action: str | None = Field(None, description="Unset: the primary action.")
    slice: Literal["pooled", "head", "torso", "tail", "cold"] = "pooled"
    holdout: Literal["next", "in_window"] | None = Field(None, description="Unset: gate.holdout.")
    not_below: float | None = Field(
        None, description="Least value of challenger minus champion, in the figure's own unit."
    )
    not_above: float | None = Field(
        None, description="Greatest value of challenger minus champion; for losses."
    )
    at_least: float | None = Field(None, description="Least value of the challenger's figure.")
    at_most: float | None = Field(None, description="Greatest value of the challenger's figure.")
    within: Positive | None = Field(
        None, description="How far the challenger's calibration may be from 1, its ideal."
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = Field(
        0.95, description="Of the two-sided bootstrap interval that decides."
    )
    undecided: Literal["pass", "refuse"] | None = Field(None, description="Unset: gate.undecided.")
    audit: Literal["no_errors", "no_unwaived_errors"] | None = Field(
        None, description="What the dataset's audit must not have found."
    )

    @property
    def against_champion(self) -> bool:
        """Whether the rule is on challenger minus champion."""
        return self.not_below is not None or self.not_above is not None

    @model_validator(mode="after")
    def _says_one_thing(self) -> GateRule:
        bounds = [name for name in BOUNDS if getattr(self, name) is not None]
        if self.audit is not None:
            if self.figure is not None or bounds:
                raise ValueError("a rule is either on the audit or on a figure: make two of it")
            return self
        if self.figure is None:
            raise ValueError("name a figure (such as auc), or audit: no_errors")
        if len(bounds) != 1:
            raise ValueError(
                f"a rule on {self.figure} has one bound of {', '.join(BOUNDS)}; "
                f"{' and '.join(bounds) or 'none'} is set"
            )
        if self.within is not None and self.figure != "calibration":
            raise ValueError(f"within is for calibration, whose ideal is 1, not for {self.figure}")
        if self.figure == "calibration" and self.against_champion:
            raise ValueError("calibration is best at 1, neither high nor low: use within")
        wrong = "not_below" if self.figure in LOWER_IS_BETTER else "not_above"
        if getattr(self, wrong) is not None:
            right = "not_above" if wrong == "not_below" else "not_below"
            better = "lower" if wrong == "not_below" else "higher"
            raise ValueError(f"{self.figure} is better when {better}: use {right}")
        return self


class Gate(Section):
    """What a model must reach before it is registered."""

    holdout: Literal["next", "in_window"] = "next"
    min_auc: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5,
        description="Least pooled AUC of the primary action: a lower one is refused, and one whose "
        "interval holds it is undecided.",
    )
    champion: str = Field(
        "registry",
        description="What a model is compared with: `registry` (the version of tracking.model_name "
        "with tracking.alias), `none`, a model folder or its URL, or a models:/ URI.",
    )
    rules: list[GateRule] = Field(
        [
            GateRule(figure="auc", not_below=-0.005),
            GateRule(figure="auc", slice="cold", not_below=-0.01),
            GateRule(figure="normalized_entropy", not_above=0.02),
            GateRule(audit="no_errors"),
        ],
        description="Beside min_auc. Those on challenger minus champion ask nothing of a first "
        "model.",
    )
    undecided: Literal["pass", "refuse"] = Field(
        "pass", description="What becomes of a model of which a rule cannot be decided."
    )
    resamples: Annotated[int, Field(ge=100)] = Field(
        1_000, description="Of the users, for the intervals."
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
    alias: str = Field("champion", description="Alias of the version in use.")
    promote: Literal["auto", "manual"] = Field(
        "auto",
        description="What becomes of a version that passed the gate. auto: it gets the alias at "
        "once. manual: it is `challenger` until `thawline promote`.",
    )
    log_vectors: bool = Field(
        True, description="Log the ID tables as Parquet beside the model, for retrieval."
    )
    max_upload_gb: Positive = Field(
        20.0, description="Most that is uploaded of one model, its tables as Parquet included."
    )


class Runtime(Section):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = Field(0, description="0: every core.")
