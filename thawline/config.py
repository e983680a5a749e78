"""The one config tree: the same YAML for the command, the library and the pipeline.

Every key has a default but the source of events. Unknown keys are refused. What a key means is
said in its `description`, which `thawline config --schema` prints.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thawline.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = {
    "feed": {
        "format": "parquet",
        "columns": {
            "user_id": "user_id",
            "item_id": "item_id",
            "timestamp": "timestamp",
            "request_id": "request_id",
            "position": "position",
        },
        "timestamp_unit": "auto",
        "actions": {"save": {"column": "save"}, "click": {"column": "click"}},
        "context": {"surface": "ctx_surface", "device": "ctx_device", "hour": "ctx_hour"},
    },
    "recbole": {
        "format": "csv",
        "separator": "\t",
        "columns": {
            "user_id": "user_id:token",
            "item_id": "item_id:token",
            "timestamp": "timestamp:float",
        },
        "timestamp_unit": "s",
        "actions": {"click": {}},
    },
    "movielens-csv": {
        "format": "csv",
        "separator": ",",
        "columns": {"user_id": "userId", "item_id": "movieId", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
    "movielens-dat": {
        "format": "csv",
        "separator": "::",
        "header": ["user_id", "item_id", "rating", "timestamp"],
        "columns": {"user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
    "movielens-100k": {
        "format": "csv",
        "separator": "\t",
        "header": ["user_id", "item_id", "rating", "timestamp"],
        "columns": {"user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
}
"""Column mappings of well-known logs; any key beside `preset` overrides the preset's."""

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

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


GradientPath = Literal["contrastive", "transformer", "feature_cross", "history"]
GRADIENT_PATHS: tuple[GradientPath, ...] = get_args(GradientPath)


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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
    content_dim: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Width of the items' content vectors; 0 writes none."
    )
    seed: int = 0


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
        0.05, description="Share of users held out of all training (the `in_window` hold-out)."
    )
    tiers: Tiers = Tiers()
    catalog: CatalogRows = CatalogRows()
    previous: str | None = Field(
        None,
        description="A dataset or model folder whose catalog and vocabularies are extended, so "
        "that its rows keep their meaning. Days that it has built already are taken from it.",
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
        description="dense-adam moves every row in every step, as torch.optim.Adam does; the others "
        "move the rows of the batch.",
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


class Config(Section):
    """Everything a run needs."""

    seed: int = 0
    workdir: str = Field("runs", description="Local folder for all outputs of local runs.")
    simulate: Simulate | None = None
    events: Events = Events(preset="feed")
    windows: Windows = Windows()
    negatives: Negatives = Negatives()
    audit: Audit = Audit()
    model: Model = Model()
    tables: Tables = Tables()
    pretrain: Pretrain = Pretrain()
    finetune: Finetune = Finetune()
    evaluation: Evaluation = Evaluation()
    gate: Gate = Gate()
    tracking: Tracking = Tracking()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _one_source(self) -> Config:
        sources = {
            "events.path": self.events.path,
            "events.table": self.events.table,
            "simulate": self.simulate,
        }
        named = [name for name, source in sources.items() if source is not None]
        if "://" in self.workdir:
            raise ValueError(
                f"workdir ({self.workdir}) must be a local folder; the stages' commands take URLs "
                "for what they read and write"
            )
        if not named:
            raise ValueError("set events.path to a log, or a simulate section to make one")
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are both set; keep one")
        return self


def parse_config(text: str, overrides: Sequence[str] = (), source: str = "config") -> Config:
    """Parses YAML text and `key=value` overrides into a `Config`.

    Args:
        text: YAML; empty text is an empty mapping.
        overrides: `dotted.key=value` strings; values are YAML (`3`, `true`, `[1, 2]`, `null`).
        source: Named in errors, usually the file.

    Raises:
        ConfigError: Text that is not YAML, an unknown key, a value of the wrong kind.
    """
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}", "fix the syntax") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds a {type(tree).__name__}", "write keys and values")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source), _remedy(error)) from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file (see `parse_config`); relative paths stay relative to the cwd."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "check --config") from error
    return parse_config(text, overrides, source=str(path))


def dump_config(config: Config) -> str:
    """The whole config as YAML text that `parse_config` reads back to an equal `Config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", key.strip()):
        raise ConfigError(f"override {override!r} is not key=value", "write e.g. finetune.epochs=3")
    *sections, last = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if child is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {section} is not a section", "check the key")
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r} is not YAML: {error}", "quote it") from error


def _explain(error: ValidationError, source: str) -> str:
    lines = [f"{source} cannot be used:"]
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key"
        lines.append(f"  {where}: {message}")
    return "\n".join(lines)


def _remedy(error: ValidationError) -> str:
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            *parents, key = [str(part) for part in item["loc"]]
            known = _keys_at(parents)
            near = difflib.get_close_matches(key, known, n=1)
            if near:
                return f"did you mean {'.'.join([*parents, near[0]])}?"
            if known:
                return f"known keys there: {', '.join(known)}"
    return "see `thawline config --schema` for every key"


def _keys_at(parents: Sequence[str]) -> list[str]:
    section: Any = Config
    for name in parents:
        field = section.model_fields.get(name) if _is_section(section) else None
        if field is None:
            return []
        options = [field.annotation, *get_args(field.annotation)]
        section = next((option for option in options if _is_section(option)), None)
    return list(section.model_fields) if _is_section(section) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
