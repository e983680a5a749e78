"""The one config tree: the same YAML for the command, the library and the pipeline.

Every key has a default but the source of events. Unknown keys are refused. What a key means is
said in its `description`, which `thawline config --schema` prints.
"""

from thawline.config.events import Action, Columns, Events, Items, Simulate
from thawline.config.presets import PRESETS
from thawline.config.running import (
    Audit,
    Evaluation,
    FindingName,
    Gate,
    GateRule,
    Runtime,
    Tracking,
)
from thawline.config.study import Halving, Study, StudyArm
from thawline.config.text import dump_config, load_config, parse_config, settings_in
from thawline.config.training import (
    GRADIENT_PATHS,
    Accumulation,
    Checkpoint,
    ComponentSchedule,
    Finetune,
    GradientPath,
    IdTableSettings,
    ItemTable,
    Model,
    Pretrain,
    TableRows,
    Tables,
)
from thawline.config.tree import Config
from thawline.config.windows import CatalogRows, Negatives, Tiers, Windows

__all__ = [
    "GRADIENT_PATHS",
    "PRESETS",
    "Accumulation",
    "Action",
    "Audit",
    "CatalogRows",
    "Checkpoint",
    "Columns",
    "ComponentSchedule",
    "Config",
    "Evaluation",
    "Events",
    "FindingName",
    "Finetune",
    "Gate",
    "GateRule",
    "GradientPath",
    "Halving",
    "IdTableSettings",
    "ItemTable",
    "Items",
    "Model",
    "Negatives",
    "Pretrain",
    "Runtime",
    "Simulate",
    "Study",
    "StudyArm",
    "TableRows",
    "Tables",
    "Tiers",
    "Tracking",
    "Windows",
    "dump_config",
    "load_config",
    "parse_config",
    "settings_in",
]
