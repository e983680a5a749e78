"""The whole tree."""

from __future__ import annotations

from pydantic import Field, model_validator

from thawline.config.base import Section, Seed
from thawline.config.events import Events, Items, Simulate
from thawline.config.running import Audit, Evaluation, Gate, Runtime, Tracking
from thawline.config.study import Study
from thawline.config.training import Finetune, Model, Pretrain, Tables
from thawline.config.windows import Negatives, Windows


class Config(Section):
    """Everything a run needs."""

    seed: Seed = 0
    workdir: str = Field("runs", description="Local folder for all outputs of local runs.")
    simulate: Simulate | None = None
    events: Events = Events(preset="feed")
    items: Items = Items()
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
    study: Study = Study()

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

    @model_validator(mode="after")
    def _best_is_scored(self) -> Config:
        if self.finetune.export == "best" and not self.evaluation.epoch_requests:
            raise ValueError(
                "finetune.export is best, but evaluation.epoch_requests is 0, so that no epoch is "
                "scored"
            )
        return self

    @model_validator(mode="after")
    def _items_of_item_tables(self) -> Config:
        if self.simulate is not None:
            if self.items.path is not None:
                raise ValueError("items.path and simulate are both set: a feed has its own items")
            return self
        for name, table in self.tables.others.items():
            if table.of == "item" and self.items.path is None:
                raise ValueError(
                    f"tables.{name} takes the ids of items from {table.column!r}, a column of "
                    "items.path, which is not set"
                )
        return self
