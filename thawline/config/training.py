"""Sections on the model, its tables, pretraining and fine-tuning."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

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
    content_tower: tuple[Count, ...] | None = Field(
        None,
        description="Widths of the hidden layers of a tower from an item's content vector "
        "(items.content) to the ranker; () is a linear map, None no tower.",
    )
    small_table_backward: Literal["auto", "one-hot", "scatter"] = Field(
        "auto",
        description="How gradients of tables of tens of rows are summed: as a matrix product or "
        "one by one; auto measures once on each machine which is faster and remembers it.",
    )
    checkpoint_activations: bool = Field(
        False,
        description="true: the backward computes the transformer's activations again, rather than "
        "that the forward keeps them; the same gradients in less memory and more time.",
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
        "does not know start at random. models:/<name>@<alias> is a registered model. None, or no "
        "version with that alias: all start at random.",
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


class TableRows(Section):
    """How the rows of an ID table move in fine-tuning, where the schedule lets them."""

    optimizer: Literal["row-wise-adagrad", "adagrad", "lazy-adam", "dense-adam", "sgd"] = Field(
        "row-wise-adagrad",
        description="dense-adam moves every row in every step, as torch.optim.Adam does; the "
        "others move the rows of the batch.",
    )
    learning_rate: Positive = 0.02
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of the rows; bfloat16 halves them and rounds each update stochastically. "
        "The optimizer's state is float32.",
    )
    reset_state_at_thaw: bool = Field(
        True, description="The first update after a thaw equals a fresh optimizer's."
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="Decoupled, on the rows of the batch."
    )
    pull: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="Pulls the rows of the batch to their first values (the pretrained ones), by "
        "(1 + support)^-0.5: rare ones more.",
    )
    drift_cap: Positive | None = Field(
        None, description="No row goes farther from its first value than so many of its norms."
    )
    frequency_scaling: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="Scales a row's step by ((1 + support) / (1 + max support)) to this power.",
    )


class ItemTable(TableRows):
    """The item table: pretrained, and read for the history and the candidates."""


class IdTableSettings(TableRows):
    """A further ID table, for example of users or authors."""

    column: str = Field(
        description="Where its ids are: user_id or another column of the log (`of: request`), or "
        "a column of items.path (`of: item`)."
    )
    of: Literal["request", "item"] = Field(
        "request", description="request: one id a request; item: one id a candidate."
    )
    rows: Annotated[int, Field(ge=2)] = Field(
        100_000, description="Row 0, for missing and unknown ids, included."
    )
    hashed: bool = Field(
        True,
        description="true: an id's row is a hash of it, so that any id has one; false: the most "
        "frequent ids have rows, and the others share row 0.",
    )
    dim: Count = Field(32, description="Width.")
    init: Annotated[float, Field(ge=0.0)] = Field(
        0.01, description="Standard deviation of the first values."
    )


RESERVED_TABLES = ("content", "content_tower", "adapter", "dense", "history_action")


class Tables(Section):
    """The ID tables: `item`, and any others by a name of your own."""

    model_config = ConfigDict(extra="allow")

    engine: Literal["auto", "local", "sharded", "torchrec"] = Field(
        "auto",
        description="local: one process holds the tables; sharded: the processes that torchrun "
        "started hold a part of the rows each, on GPUs by TorchRec; torchrec: by TorchRec on CPUs "
        "too; auto: sharded under torchrun alone.",
    )
    item: ItemTable = ItemTable()
    __pydantic_extra__: dict[str, IdTableSettings]

    @model_validator(mode="after")
    def _names(self) -> Tables:
        for name in self.others:
            if name in RESERVED_TABLES or name.startswith("ctx_"):
                raise ValueError(f"`{name}` cannot be a table's name, since a component has it")
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                raise ValueError(f"the table's name `{name}` must be lower-case letters, digits, _")
        return self

    @property
    def others(self) -> dict[str, IdTableSettings]:
        """The tables beside `item`, by name."""
        return dict(self.__pydantic_extra__ or {})


class ComponentSchedule(Section):
    """When one component trains and how fast; what is not set is the recipe's."""

    recipe: str | None = Field(None, description="A recipe for this component alone.")
    windows: tuple[tuple[float, float], ...] | None = Field(
        None,
        description="Spans [start, end) in epochs, in place of a recipe; () is never.",
    )
    learning_rate: Positive | None = Field(
        None, description="Of a part of the network; an ID table's is tables.<name>.learning_rate."
    )
    curve: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: from the learning rate down to 0 over the trained steps."
    )
    warm_up: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="Epochs of training in which the learning rate grows linearly from 0."
    )
    restart: bool = Field(False, description="The curve starts anew with each window.")

    @model_validator(mode="after")
    def _one_source(self) -> ComponentSchedule:
        if self.recipe is not None and self.windows is not None:
            raise ValueError("recipe and windows are both set; keep one")
        return self


class Accumulation(Section):
    """Several micro-batches (of `batch_size`) to one step of the network's optimizer."""

    micro_batches: Count = 1
    tables: Literal["exact", "fused"] = Field(
        "exact",
        description="exact: one lookup and one update of the ID rows a step, as a batch of that "
        "size would; fused: an update a micro-batch, as optimizers fused into the backward do.",
    )
    factor: Positive | Literal["mean"] = Field(
        1.0,
        description="With `fused`: a factor on the ID tables' learning rates; mean: one over "
        "micro_batches, which is right for sgd alone.",
    )

    @property
    def table_factor(self) -> float:
        """The factor on the learning rates of ID tables."""
        if self.tables == "exact":
            return 1.0
        return 1.0 / self.micro_batches if self.factor == "mean" else self.factor

    @property
    def words(self) -> str:
        """How micro-batches add up, for a report."""
        if self.micro_batches == 1:
            return "none"
        how = f", tables' learning rate x {self.table_factor:g}" if self.tables == "fused" else ""
        return f"{self.tables}, {self.micro_batches} micro-batches a step{how}"


class Checkpoint(Section):
    """Checkpoints of fine-tuning, from which a run that was killed goes on."""

    every_steps: Annotated[int, Field(ge=0)] = Field(
        1_000,
        description="Steps between two checkpoints; 0: only at the end of each epoch and on "
        "SIGTERM, when there is one in any case.",
    )
    keep: Count = Field(2, description="The newest ones to keep, beside that of the best epoch.")
    folder: str | None = Field(
        None,
        description="Where they lie until the run has succeeded, local or `s3://`, `gs://`, "
        "`hdfs://`; each run in a folder of its own. Default: `<model folder>.checkpoints`.",
    )


class Finetune(Section):
    """Fine-tuning of the ranker and the table."""

    recipe: str = Field(
        "freeze-until-last",
        description="When the ID tables train: a name that `thawline recipes` lists, such as "
        "co-train, frozen, freeze-until-last or window(start, length) in epochs.",
    )
    schedule: dict[str, ComponentSchedule] = Field(
        {},
        description="Exceptions from the recipe, by component: item, another ID table, adapter, "
        "content_tower, history_action, ctx_<context column>, dense (the rest of the network).",
    )
    cross_fit: bool = Field(
        False,
        description="Keeps two copies of the item table; the network reads for each request the "
        "copy that requests of the other half write. The model keeps their mean. Lookups are then "
        "never stale.",
    )
    cold_rows: Literal["keep", "mean-drift", "ridge", "neighbours"] = Field(
        "keep",
        description="Moves item rows of tier cold after the last epoch, as the warm rows have "
        "drifted: by their mean, by a ridge-fitted affine map, or as the nearest ones.",
    )
    epochs: Count = 3
    examples: Literal["all", "replay", "fresh"] = Field(
        "all",
        description="all: every epoch shows all training requests. replay, fresh: they are cut "
        "into as many equal parts as there are epochs, by a hash of their ids, and each epoch "
        "shows one: the same again (replay), or another (fresh), in which no request is seen "
        "twice.",
    )
    batch_size: Count = 512
    learning_rate: Positive = Field(1e-3, description="Adam, for the network.")
    clip_norm: Positive | None = Field(None, description="Clips the network's gradient norm.")
    staleness: Annotated[int, Field(ge=0)] = Field(
        1,
        description="Updates that a lookup of ID rows may miss: 0 looks rows up when a batch is "
        "due; 1, as in the article, while the batch before is in its backward; k, k batches ahead.",
    )
    accumulation: Accumulation = Accumulation()
    checkpoint: Checkpoint = Checkpoint()
    export: Literal["last", "best"] = Field(
        "last",
        description="The epoch after which the model is taken; best: that with the highest AUC of "
        "the primary action on gate.holdout.",
    )
    compile: bool = Field(False, description="Compiles the network with torch.compile.")
    autocast: Literal["off", "bfloat16"] = Field(
        "off",
        description="bfloat16: matrix products of the network in bfloat16; parameters, ID rows "
        "and losses stay float32.",
    )
    prefetch_batches: Count = Field(4, description="Batches prepared ahead by the reader.")
    shuffle_groups: Count = Field(
        16, description="Row groups read together and shuffled as one buffer."
    )
    group_by_length: bool = Field(
        False,
        description="true: batches hold requests of similar history length, which saves padding.",
    )

    @model_validator(mode="after")
    def _cross_fit_alone(self) -> Finetune:
        if self.cross_fit and self.accumulation.micro_batches > 1:
            raise ValueError("cross_fit takes one micro-batch a step; drop accumulation")
        return self
