"""The champion: found before anything is scored, then scored on the challenger's hold-outs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thawline.config import Config
from thawline.data.ids import IdTableSpec
from thawline.data.manifest import FIRST_ROW, Dataset, Split
from thawline.errors import DataError
from thawline.evaluation.checks import candidate_tiers
from thawline.evaluation.compare import Figures, Measured, Sides, comparison, measure
from thawline.evaluation.holdouts import score_holdout
from thawline.evaluation.metrics import holdout_metrics
from thawline.evaluation.scored import Scored
from thawline.model.bundle import Bundle
from thawline.model.translate import Translator
from thawline.tracking.fetch import fetch_model, local_model

OTHER = "set gate.champion to another model, or to none"


@dataclass(frozen=True)
class Champion:
    """The model that stands now."""

    name: str
    version: str | None
    """In the registry; None of a folder."""
    translator: Translator

    def facts(self) -> dict[str, Any]:
        """What `evaluation.json` says of it, besides figures."""
        meta = self.translator.bundle.meta
        return {
            "name": self.name,
            "version": self.version,
            "data_version": meta.data_version,
            "recipe": meta.recipe,
            "notes": self.translator.notes,
        }


def find_champion(
    config: Config, data: Dataset, scratch: Path, device: str
) -> tuple[Champion | None, str | None]:
    """Loads what `gate.champion` names.

    Args:
        config: Names it and the server.
        data: The challenger's dataset.
        scratch: A folder for what is fetched.
        device: Where it will score.

    Returns:
        The champion, or None and why there is none.

    Raises:
        TrackingError: The registry does not answer or refuses.
        DataError: A model that cannot be read, or that shares nothing with the dataset.
    """
    wanted = config.gate.champion
    if wanted == "none":
        return None, "it is compared with nothing (gate.champion is none)"
    name, version = wanted, None
    tracking = config.tracking
    if wanted == "registry":
        wanted = f"models:/{tracking.model_name}@{tracking.alias}"
    if wanted.startswith("models:/"):
        fetched = fetch_model(config, wanted, scratch)
        if fetched is None and config.gate.champion == "registry":
            return None, "there is no champion yet"
        if fetched is None:
            raise DataError(
                f"gate.champion is {wanted}, but no version has that alias",
                f"give it one, or {OTHER}",
            )
        name, version, folder = fetched.name, fetched.version, fetched.folder
    else:
        folder = local_model(config, wanted, scratch)
    try:
        translator = Translator(Bundle.load(folder).to(device), data)
    except DataError as error:
        raise _incomparable(name, version, error.what) from error
    return Champion(name, version, translator), None


def _incomparable(name: str, version: str | None, why: str) -> DataError:
    called = f"{name} version {version}" if version else name
    return DataError(f"the champion ({called}) cannot be compared with: {why}", OTHER)


@dataclass
class Match:
    """Challenger and champion on each hold-out, as it is scored."""

    config: Config
    data: Dataset
    champion: Champion | None
    figures: dict[str, Figures]
    """By hold-out."""
    metrics: dict[str, Any]
    """The champion's metrics by hold-out: pooled and by tier."""
    comparison: dict[str, list[dict[str, Any]]]
    """Rows of each hold-out."""

    @classmethod
    def of(cls, config: Config, data: Dataset, champion: Champion | None) -> Match:
        """Before the first hold-out."""
        return cls(config, data, champion, {}, {}, {})

    def play(self, split: Split, scored: Scored) -> None:
        """Scores the champion on a hold-out that the challenger has scored, and compares.

        Without a champion, the challenger is measured alone where a rule asks for its intervals.
        """
        rules = self.config.gate.rules
        hit_at = self.config.evaluation.hit_at
        settings: dict[str, Any] = {"hit_at": hit_at, "resamples": self.config.gate.resamples}
        tier = candidate_tiers(scored.row, self.data.catalog.tier, FIRST_ROW)
        alone = any(rule.figure is not None and not rule.against_champion for rule in rules)
        if self.champion is None:
            self.figures[split] = measure(Sides(scored, tier), **settings) if alone else {}
            return
        translator = self.champion.translator
        tables: Mapping[str, IdTableSpec] = translator.id_columns
        other = score_holdout(self.config, self.data, split, translator.score, tables=tables)
        if other is None or not np.array_equal(other.row, scored.row):
            raise DataError(
                f"{self.data.root}: the requests of {split} changed while they were scored",
                "evaluate again when nothing else writes to the dataset",
            )
        known = _columns(scored, translator.actions)
        other = replace(_columns(other, translator.actions), user_id=scored.user_id)
        if not np.isfinite(other.logits).all():
            raise _incomparable(
                self.champion.name,
                self.champion.version,
                f"its scores of {split} are NaN or infinite",
            )
        figures: dict[tuple[str, str, str], Measured] = measure(
            Sides(known, tier, other.logits), **settings
        )
        self.comparison[split] = comparison(figures, scored)
        rest = [action for action in scored.actions if action not in translator.actions]
        if rest:
            figures |= measure(Sides(_columns(scored, rest), tier), **settings)
        self.figures[split] = figures
        self.metrics[split] = holdout_metrics(other, self.data.catalog.tier, hit_at=hit_at)

    def facts(self) -> dict[str, Any] | None:
        """`champion` of `evaluation.json`."""
        if self.champion is None:
            return None
        return self.champion.facts() | {"metrics": self.metrics, "comparison": self.comparison}


def _columns(scored: Scored, actions: list[str]) -> Scored:
    """The same requests with some of their actions."""
    if scored.actions == actions:
        return scored
    columns = [scored.actions.index(action) for action in actions]
    return replace(
        scored,
        actions=actions,
        labels=scored.labels[:, columns],
        logits=scored.logits[:, columns],
        oracle=None if scored.oracle is None else scored.oracle[:, columns],
    )
