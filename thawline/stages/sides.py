"""What names a model, as a side of a comparison: its scores of each hold-out, or its figures.

A side is an evaluation folder, a file of scores, a model folder, a `models:/` URI or the id of an
MLflow run that evaluated. Models are scored on a dataset; the others bring what they were scored
on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thawline.config import Config
from thawline.data.manifest import FIRST_ROW, TIERS, Dataset
from thawline.data.storage import is_remote
from thawline.errors import ConfigError, DataError
from thawline.evaluation.holdouts import HOLDOUTS, score_holdout
from thawline.evaluation.metrics import holdout_metrics
from thawline.evaluation.score_file import Scores, read_scores
from thawline.evaluation.scored import Scored
from thawline.model.bundle import Bundle, read_meta
from thawline.model.translate import Translator
from thawline.stages.machine import prepare_machine
from thawline.tracking.evaluations import fetch_evaluation
from thawline.tracking.fetch import SCHEME, local_model

RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Side:
    """One model, or one run."""

    name: str
    seed: int | None
    """Of its training, where that is known."""
    scores: Callable[[], dict[str, Scores]]
    """By hold-out; read or made when it is called."""
    trees: dict[str, Any] | None = None
    """The metrics of its evaluation, where it has one."""
    data_version: str = ""
    """Of what it was evaluated on, where that is known before it is read."""

    def metrics(self, config: Config) -> dict[str, Any]:
        """Figures pooled and by tier, by hold-out."""
        if self.trees is not None:
            return self.trees
        return {
            holdout: holdout_metrics(
                _as_scored(scores),
                np.arange(len(TIERS), dtype=np.int8),
                hit_at=config.evaluation.hit_at,
            )
            for holdout, scores in self.scores().items()
        }


def is_tracked(name: str) -> bool:
    """Whether MLflow knows what a name stands for: a registered model, or a run."""
    is_run = RUN_ID.fullmatch(name) is not None and not Path(name).exists()
    return is_run or name.startswith(SCHEME)


def resolve(config: Config, name: str, dataset: Path, scratch: Path, notes: list[str]) -> Side:
    """Finds what a name stands for.

    Args:
        config: Names the server; its `negatives` and `evaluation` are used for scoring.
        name: See the module's docstring.
        dataset: The folder of the dataset on which models are scored.
        scratch: A folder, not yet there, for what is fetched; it stays while the side is used.
        notes: Gets what a model cannot see of the dataset, once it scores.

    Raises:
        ConfigError: The name stands for nothing.
        DataError: An evaluation or a model that cannot be read.
        TrackingError: The MLflow server does not answer, or has no such model or run.
    """
    path = Path(name)
    if path.suffix == ".parquet":
        return Side(name, None, lambda: {path.stem: read_scores(path)})
    if (path / "evaluation.json").exists():
        return _evaluation(name, path)
    if RUN_ID.fullmatch(name):
        scratch.mkdir()
        return _evaluation(name, fetch_evaluation(config, name, scratch))
    fetched = name.startswith(SCHEME) or is_remote(name)
    if not fetched and not (path / "model.json").exists():
        raise ConfigError(
            f"{name!r} is neither an evaluation folder, a file of scores (.parquet), a model "
            "folder, a models:/ URI nor the id of an MLflow run",
            "check the path",
        )
    scratch.mkdir()
    folder = local_model(config, name, scratch)
    seed = read_meta(folder / "model.json").seed
    return Side(name, seed, lambda: _score(config, name, folder, dataset, notes))


def _evaluation(name: str, folder: Path) -> Side:
    path = folder / "evaluation.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        model, metrics = facts.get("model", {}), facts["metrics"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}", "evaluate the model again") from error

    def scores() -> dict[str, Scores]:
        files = [folder / "scores" / f"{split}.parquet" for split in HOLDOUTS]
        files = [file for file in files if file.exists()]
        if not files:
            raise DataError(
                f"{name} holds no scores", "evaluate the model again with this version of Thawline"
            )
        return {file.stem: read_scores(file) for file in files}

    return Side(name, model.get("seed"), scores, metrics, model.get("data_version", ""))


def _score(
    config: Config, name: str, model: Path, dataset: Path, notes: list[str]
) -> dict[str, Scores]:
    """A model's scores of each hold-out of a dataset, whichever it was trained on."""
    data = Dataset.open(dataset)
    bundle = Bundle.load(model).to(prepare_machine(config.runtime))
    translator = Translator(bundle, data)
    notes += [f"{name}: {note}" for note in translator.notes]
    columns = [data.manifest.actions.index(action) for action in translator.actions]
    found: dict[str, Scores] = {}
    for split in HOLDOUTS:
        scored = score_holdout(
            config, data, split, translator.score, tables=translator.id_columns, users=True
        )
        if scored is None:
            continue
        scores = Scores.of(
            scored, data.catalog, model=name, data_version=data.manifest.data_version
        )
        found[split] = replace(
            scores,
            actions=translator.actions,
            labels=scores.labels[:, columns],
            logits=scores.logits[:, columns],
        )
    return found


def _as_scored(scores: Scores) -> Scored:
    """With a catalog of four rows, one a tier."""
    return Scored(
        actions=scores.actions,
        request_id=scores.request_id,
        timestamp=scores.timestamp,
        offsets=scores.offsets,
        row=FIRST_ROW + scores.tier.astype(np.int64),
        labels=scores.labels,
        logits=scores.logits,
        oracle=None,
        user_id=scores.user_id,
        weight=scores.weight,
    )
