"""The section on studies: which configs are set against each other, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from thawline.config.base import Count, Section, Seed

StudyFigure = Literal["auc", "user_auc", "request_auc", "log_loss", "normalized_entropy", "mrr"]


class Halving(Section):
    """Runs of fewer epochs first, of which the best arms go on."""

    epochs: tuple[Count, ...] = Field(
        description="`finetune.epochs` of each round before the last, which is the config's own.",
    )
    eta: Annotated[int, Field(ge=2)] = Field(
        3, description="One arm in so many goes on to the next round, rounded up."
    )

    @model_validator(mode="after")
    def _rising(self) -> Halving:
        if not self.epochs or list(self.epochs) != sorted(set(self.epochs)):
            raise ValueError(f"epochs {list(self.epochs)} must grow from round to round")
        return self


class StudyArm(Section):
    """One way to set the config that is given a name."""

    set: dict[str, Any] = Field(
        {}, description="Config keys and values, e.g. `finetune.recipe: frozen`."
    )
    baseline: str | None = Field(
        None,
        description="The arm that it is compared with; its own name: with none. Unset: "
        "`study.baseline`.",
    )


class Study(Section):
    """Configs beside each other: named arms, a grid, or every arm with all of a grid."""

    arms: dict[str, StudyArm] = Field(
        {}, description="Configs by name; each runs with every combination of `grid`."
    )
    grid: dict[str, list[Any]] = Field(
        {}, description="Values of config keys, e.g. `finetune.recipe: [co-train, frozen]`."
    )
    seeds: list[Seed] = Field([0, 1, 2], description="Every arm runs with each; pairs share one.")
    baseline: str | None = Field(
        None,
        description="What arms are compared with: a name of `arms`, a value of the grid, or "
        "`key=value`s with commas between them; keys that it leaves out are as in the arm. Unset: "
        "the first arm.",
    )
    contrasts: dict[str, dict[str, float]] = Field(
        {},
        description="Weighted sums of arms within a seed, by name: e.g. a difference of "
        "differences is `{a: 1, b: -1, c: -1, d: 1}`. They are tested as differences are.",
    )
    jobs: Count = Field(1, description="Trials at a time; they divide the cores between them.")
    pretrain: Literal["once", "each-seed"] = Field(
        "once", description="Whether seeds share the pretrained rows."
    )
    share_prefix: bool = Field(
        True,
        description="Train the first epochs of trials that freeze their ID tables alike once; the "
        "figures are the same to the bit.",
    )
    metric: StudyFigure = Field("auc", description="Shown first, and what halving judges by.")
    action: str | None = Field(None, description="Of the metric. Unset: the primary one.")
    holdout: Literal["next", "in_window"] = Field("next", description="Of the metric.")
    halving: Halving | None = None
    pages: bool = Field(
        True, description="Make the evaluation's page of each trial, which takes some seconds."
    )
    keep_models: bool = Field(
        False, description="Keep each trial's model and scores, not only its figures and page."
    )

    @model_validator(mode="after")
    def _values_and_seeds(self) -> Study:
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key} has no value")
            if any(values.count(value) > 1 for value in values):
                raise ValueError(f"grid.{key} names a value twice")
        for name, arm in self.arms.items():
            if arm.baseline is not None and arm.baseline not in self.arms:
                raise ValueError(f"arms.{name}.baseline: there is no arm {arm.baseline!r}")
        for name, weights in self.contrasts.items():
            if not weights or not all(weights.values()):
                raise ValueError(f"contrasts.{name} needs an arm, and no weight of 0")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} must name at least one, and none twice")
        return self
