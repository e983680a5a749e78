"""Sections on the model, its tables, pretraining and fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from thawline.config.base import Count, Fraction, Positive, Section

GradientPath = Literal["contrastive", "transformer", "feature_cross", "history"]
GRADIENT_PATHS: tuple[GradientPath, ...] = get_args(GradientPath)


class Model(Section):
    """The ranker."""

    dim: Annotated[int, Field(ge=4)] = Field(64, description="Width of the item table.")
    heads: Count = 2
    layers: Count = 2
    ffn: Count = Field(128, description="Width of the transformer's feed-forward layers.")
    dropout: Fraction = 0.0
    cross_layers: Count = 2
    mlp: tuple[Count, ...] = (256, 128)
    context_dim: Count = 8
    pairwise_weight: Annotated[float, Field(ge=0.0)] = 0.5
    contrastive_weight: Annotated[float, Field(ge=0.0)] = 0.5
    temperature: Positive = 0.1
    adapter: Literal["off", "bias", "diagonal", "full"] = Field(
        "off",
        description="A zero-initialised map `e + eA + b` on every row, cold ones too, that trains "
        "with the network: full (a matrix A), diagonal, or bias alone.",
    )
    gradient_paths: tuple[GradientPath, ...] = Field(
        GRADIENT_PATHS,
        description="Paths by which the losses reach the item rows: the candidate's through the "
        "contrastive loss, the transformer and the feature cross, and the history's.",
    )

    @model_validator(mode="after")
    def _paths_once(self) -> Model:
        if len(set(self.gradient_paths)) < len(self.gradient_paths):
            raise ValueError("gradient_paths names a path twice")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        if self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) must be a multiple of heads ({self.heads})")
        return self


class Pretrain(Section):
    """Contrastive pretraining of the item table."""

    epochs: Annotated[int, Field(ge=0)] = Field(4, description="0 keeps the random rows.")
    start_from: str | None = Field(
        None,
        description="A table or model folder whose rows pretraining starts from; items that it "
        "does not know start at random. None: all do.",
    )
    batch_size: Count = Field(256, description="Sequences a step.")
    learning_rate: Positive = Field(1e-3, description="Adam, for the encoder.")
    table_learning_rate: Positive = Field(0.05, description="Row-wise Adagrad, for the table.")
    negatives: Count = Field(512, description="In-batch negatives of a step.")
    group_by_length: bool = Field(
        True, description="Batch sequences of similar length, so that there is little padding."
    )
    temperature: Positive = 0.1
    recall_at: Count = 20


class ItemTable(Section):
    """How the item table moves in fine-tuning, where the recipe lets it."""

    optimizer: Literal["row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd"] = Field(
        "row-wise-adagrad",
        description="dense-adam moves every row in every step, as torch.optim.Adam does; the "
        "others move the rows of the batch.",
    )
    learning_rate: Positive = 0.02
    reset_state_at_thaw: bool = Field(
        True, description="The first update after a thaw equals a fresh optimizer's."
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="Decoupled, on the rows of the batch."
    )
    pull: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="Pulls the rows of the batch to their pretrained values, by "
        "(1 + support)^-0.5: rare ones more.",
    )
    drift_cap: Positive | None = Field(
        None, description="No row goes farther from its pretrained value than so many of its norms."
    )
    frequency_scaling: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="Scales a row's step by ((1 + support) / (1 + max support)) to this power.",
    )


class Tables(Section):
    """The ID tables."""

    item: ItemTable = ItemTable()


class Finetune(Section):
    """Fine-tuning of the ranker and the table."""

    recipe: str = Field(
        "freeze-until-last",
        description="co-train, frozen, freeze-until-last, train-first or window(start, length) "
        "in epochs.",
    )
    epochs: Count = 3
    batch_size: Count = 512
    learning_rate: Positive = Field(1e-3, description="Adam, for the network.")
    clip_norm: Positive | None = Field(None, description="Clips the network's gradient norm.")
    prefetch_batches: Count = Field(4, description="Batches prepared ahead by the reader.")
    shuffle_groups: Count = Field(
        16, description="Row groups read together and shuffled as one buffer."
    )
    group_by_length: bool = Field(
        False,
        description="true: batches hold requests of similar history length, which saves padding.",
    )
