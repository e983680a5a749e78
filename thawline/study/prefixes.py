"""Epochs that several trials begin with alike: in which every ID table is frozen.

Nothing here loads what trains; `stages.study_prefix` trains them, once for all who share them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thawline import __version__
from thawline.config import Config
from thawline.study.design import UNREAD
from thawline.training.recipes import components_of, make_schedule
from thawline.training.schedule import Curve, Plan, Schedule, TrainingWindow

UNREAD_WHILE_FROZEN = (
    "recipe",
    "schedule",
    "epochs",
    "staleness",
    "cold_rows",
    "checkpoint",
    "prefetch_batches",
)
"""Keys of `finetune` that decide nothing of epochs in which every ID table is frozen, beside what
`_network` says of the schedule: a lookup reads the same rows however early."""

ROWS_MOVE_BY = (
    "optimizer",
    "learning_rate",
    "reset_state_at_thaw",
    "weight_decay",
    "pull",
    "drift_cap",
    "frequency_scaling",
)
"""Keys of an ID table that are read when rows move."""

Chain = Sequence[str]
"""A trial's signatures: of its first epoch, of its first two, and so on."""


def signatures(
    config: Config, context: Sequence[str], *, table_key: str, data_version: str
) -> list[str]:
    """Names what a trial has computed after each of its first epochs, by all that decides it.

    As many as there are whole epochs in which every ID table is frozen. Two trials that have one in
    common have all before it in common, and go through the same states of the network to the bit.

    Args:
        config: Of the trial, with its seed.
        context: Names of the dataset's context columns.
        table_key: Names the pretrained rows.
        data_version: Of the dataset.

    Raises:
        ConfigError: A schedule that cannot be.
    """
    schedule = make_schedule(config, context)
    shared = [__version__, _settings(config), table_key, data_version]
    return [
        _hash([shared, epochs, _network(config, context, schedule, epochs)])
        for epochs in range(1, frozen_epochs(config, schedule) + 1)
    ]


def frozen_epochs(config: Config, schedule: Schedule) -> int:
    """Whole epochs at the start in which every ID table is frozen, and that can be shared.

    None where two copies of the item table are kept, or where processes split the tables.
    """
    if config.finetune.cross_fit or config.tables.engine not in ("auto", "local"):
        return 0
    tables = ("item", *config.tables.others)
    starts = [window.start for name in tables for window in schedule.of(name).windows]
    return math.floor(min(starts, default=schedule.epochs))


@dataclass(frozen=True)
class Prefix:
    """Epochs that are to be trained once."""

    key: str
    """Their signature."""
    epochs: int
    trials: tuple[str, ...]
    """That begin with them, in their order; any one's config trains them."""
    starts: tuple[str, ...]
    """Keys of shorter ones that it may begin from, the longest first."""
    after: str | None
    """The longest of `starts`, where that is to be trained too."""


@dataclass(frozen=True)
class Sharing:
    """Which epochs are shared by whom."""

    prefixes: tuple[Prefix, ...]
    """Those to be trained, each after those that it begins from."""
    starts: Mapping[str, tuple[str, ...]]
    """By trial, the keys that it may begin from, the longest first."""

    def after(self, trial: str) -> str | None:
        """The longest prefix of a trial, where that is to be trained."""
        return _first_in(self.starts[trial], {prefix.key for prefix in self.prefixes})


def share(chains: Mapping[str, Chain], known: Collection[str] = ()) -> Sharing:
    """Finds what is worth to be trained once: what two trials or more begin with.

    Args:
        chains: Of each trial that is to run.
        known: Signatures of what was trained before: it is used, by a single trial too.
    """
    users: dict[str, list[str]] = {}
    for trial, chain in chains.items():
        had = max((epochs for epochs, key in enumerate(chain, start=1) if key in known), default=0)
        for key in chain[had:]:
            users.setdefault(key, []).append(trial)
    shared = {key for key, trials in users.items() if len(trials) > 1}
    # Where the trials that share a prefix go on together, the longer one is enough.
    passed = {
        key
        for chain in chains.values()
        for key, longer in itertools.pairwise(chain)
        if longer in shared and users[longer] == users.get(key)
    }
    kept = (shared - passed) | set(known)
    found: dict[str, Prefix] = {}
    for chain in chains.values():
        for epochs, key in enumerate(chain, start=1):
            if key in kept and key not in known and key not in found:
                starts = tuple(_longest_first(chain[: epochs - 1], kept))
                found[key] = Prefix(
                    key, epochs, tuple(users[key]), starts, _first_in(starts, found)
                )
    return Sharing(
        tuple(found.values()),
        {trial: tuple(_longest_first(chain, kept)) for trial, chain in chains.items()},
    )


def _longest_first(chain: Chain, kept: Collection[str]) -> Iterator[str]:
    return (key for key in reversed(chain) if key in kept)


def _first_in(keys: Sequence[str], wanted: Collection[str]) -> str | None:
    """The first of the keys, if that is wanted."""
    return keys[0] if keys and keys[0] in wanted else None


def _settings(config: Config) -> dict[str, Any]:
    """The config without what is not read while every ID table is frozen.

    A key that is new counts until it is known not to.
    """
    tree = config.model_dump(mode="json", exclude=set(UNREAD))
    tree["gate"] = config.gate.holdout
    finetune = tree["finetune"]
    if finetune.get("examples", "all") != "all":
        # The requests are cut into as many parts as there are epochs.
        finetune["parts"] = finetune["epochs"]
    for name in UNREAD_WHILE_FROZEN:
        del finetune[name]
    del finetune["accumulation"]["factor"]
    for name in ("item", *config.tables.others):
        for key in ROWS_MOVE_BY:
            del tree["tables"][name][key]
    return tree


def _network(
    config: Config, context: Sequence[str], schedule: Schedule, epochs: int
) -> list[dict[str, Any]]:
    """When and how fast each part of the network trains in the first epochs.

    Parts of one plan and rate share a group of the optimizer, by which its state is numbered.
    """
    tables = ("item", *config.tables.others)
    rates = {name: own.learning_rate for name, own in config.finetune.schedule.items()}
    groups: dict[tuple[Plan, float], int] = {}
    parts = []
    for name in components_of(config, context):
        if name not in tables:
            plan, rate = schedule.of(name), rates.get(name) or config.finetune.learning_rate
            group = groups.setdefault((plan, rate), len(groups))
            begun = asdict(_begun(plan, epochs))
            parts.append({"name": name, "plan": begun, "rate": rate, "group": group})
    return parts


def _begun(plan: Plan, epochs: int) -> Plan:
    """What of a plan the first epochs follow; all of it where the rate follows all of it."""
    if plan.curve != Curve():
        return plan
    windows = tuple(
        TrainingWindow(float(window.start), min(float(window.end), float(epochs)))
        for window in plan.windows
        if window.start < epochs
    )
    return replace(plan, windows=windows)


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
