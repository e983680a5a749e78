"""Comparing models: whatever names one (`sides`) becomes scores or figures, set side by side.

One model a side is compared request by request, with a bootstrap over users; several a side are
compared run by run, in pairs of the same seed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thawline.config import Config
from thawline.errors import ConfigError, DataError
from thawline.evaluation.compare import SLICES, comparison, measure
from thawline.evaluation.intervals import SEED, figure_names
from thawline.evaluation.pairing import pair
from thawline.stages.sides import Side, is_tracked, resolve
from thawline.study.statistics import paired, pairs_needed
from thawline.tracking.server import require_answer


@dataclass(frozen=True)
class Comparison:
    """What was found; `rows` are JSON-able."""

    a: list[str]
    b: list[str]
    by: str
    """`users`: resampled users of the same requests; `seeds`: pairs of runs."""
    rows: dict[str, list[dict[str, Any]]]
    """By hold-out: `{"action", "slice", "figure", "a", "b", "difference", "low", "high",
    "smallest_effect"}`, with B minus A; by users also `requests` and `users`, by seeds also `n`,
    `sd`, `agreement`, `p_value`, `exact` and `pairs_needed`."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and what a model could not see."""

    def tree(self) -> dict[str, Any]:
        """The JSON."""
        return asdict(self)


def run(
    config: Config,
    a: Sequence[str],
    b: Sequence[str],
    dataset: str | Path,
    *,
    resamples: int = 1_000,
    seed: int = SEED,
) -> Comparison:
    """Compares B with A.

    Args:
        config: Names the server; its `negatives` and `evaluation` are used for scoring.
        a: What names the models of one side.
        b: The same of the other one; as many.
        dataset: A dataset folder; opened if models have to be scored.
        resamples: Of the users, for one model a side.
        seed: Of the draws.

    Raises:
        ConfigError: Sides of different sizes, or a name that means nothing.
        DataError: Scores that cannot be read or paired, or no hold-out in common.
        TrackingError: The MLflow server does not answer, or has no such model or run.
    """
    if not a or len(a) != len(b):
        raise ConfigError(
            f"{len(a)} models are to be compared with {len(b)}",
            "name one on each side, or as many runs on both, paired by seed",
        )
    notes: list[str] = []
    if any(is_tracked(name) for name in (*a, *b)):
        require_answer(config)
    with tempfile.TemporaryDirectory() as scratch:
        first, second = (
            [
                resolve(config, name, Path(dataset), Path(scratch) / f"{letter}{place}", notes)
                for place, name in enumerate(names)
            ]
            for letter, names in (("a", a), ("b", b))
        )
        if len(a) > 1:
            rows = _by_seed(config, first, second, notes)
        else:
            rows = _by_user(config, first[0], second[0], notes, resamples, seed)
    return Comparison(list(a), list(b), "seeds" if len(a) > 1 else "users", rows, notes)


def _by_user(
    config: Config, a: Side, b: Side, notes: list[str], resamples: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    first, second = a.scores(), b.scores()
    if len(first) == len(second) == 1:
        # Files may be called anything.
        second = dict(zip(first, second.values(), strict=True))
    rows = {}
    for holdout in _shared(first, second):
        pairing = pair(first[holdout], second[holdout])
        notes += [f"{holdout}: {each}" for each in pairing.left_out]
        figures = measure(
            pairing.sides, hit_at=config.evaluation.hit_at, resamples=resamples, seed=seed
        )
        found = comparison(figures, pairing.sides.scored, names=("b", "a"))
        order = ("action", "slice", "figure", "a", "b")
        rows[holdout] = [{key: row[key] for key in (*order, *row)} for row in found]
    return rows


def _by_seed(
    config: Config, a: list[Side], b: list[Side], notes: list[str]
) -> dict[str, list[dict[str, Any]]]:
    seeds = [sorted(run.seed for run in side if run.seed is not None) for side in (a, b)]
    if seeds[0] == seeds[1] and len(set(seeds[0])) == len(a):
        a, b = (sorted(side, key=lambda run: run.seed or 0) for side in (a, b))
    else:
        notes.append("the seeds of the two sides are not the same: runs are paired in order")
    for left, right in zip(a, b, strict=True):
        if left.data_version and right.data_version and left.data_version != right.data_version:
            notes.append(f"{left.name} and {right.name} were evaluated on other data")
    first, second = ([run.metrics(config) for run in side] for side in (a, b))
    shared = _shared(*(_in_all(side) for side in (first, second)))
    return {
        holdout: [
            _row(key, *([_value(each[holdout], *key) for each in side] for side in (first, second)))
            for key in _keys(config, first[0][holdout])
        ]
        for holdout in shared
    }


def _row(key: tuple[str, str, str], a: list[float | None], b: list[float | None]) -> dict[str, Any]:
    known = [
        (left, right)
        for left, right in zip(a, b, strict=True)
        if left is not None and right is not None
    ]
    row: dict[str, Any] = dict(zip(("action", "slice", "figure"), key, strict=True))
    if not known:
        return row | dict.fromkeys(
            ("a", "b", "difference", "low", "high", "smallest_effect", "sd", "agreement",
             "p_value", "exact", "pairs_needed")
        ) | {"n": 0}  # fmt: skip
    left, right = np.array(known).T
    found = paired(right - left)
    needed = None
    if found.sd is not None and found.mean:
        needed = pairs_needed(found.mean, found.sd)
    return row | {
        "a": float(left.mean()),
        "b": float(right.mean()),
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "smallest_effect": found.smallest_effect,
        "n": found.n,
        "sd": found.sd,
        "agreement": found.agreement,
        "p_value": found.p_value,
        "exact": found.exact,
        "pairs_needed": needed,
    }


def _keys(config: Config, tree: dict[str, Any]) -> list[tuple[str, str, str]]:
    figures = figure_names(config.evaluation.hit_at)
    return [
        (action, piece, figure)
        for action in tree["pooled"]
        for piece in SLICES
        for figure in figures
    ]


def _value(tree: dict[str, Any], action: str, piece: str, figure: str) -> float | None:
    actions = tree["pooled"] if piece == "pooled" else tree["tiers"].get(piece, {})
    value = actions.get(action, {}).get(figure)
    return None if value is None else float(value)


def _in_all(trees: list[dict[str, Any]]) -> list[str]:
    return [holdout for holdout in trees[0] if all(holdout in tree for tree in trees)]


def _shared(first: Iterable[str], second: Iterable[str]) -> list[str]:
    shared = [holdout for holdout in first if holdout in second]
    if not shared:
        raise DataError(
            f"one side has {', '.join(first) or 'no hold-out'}, the other "
            f"{', '.join(second) or 'no hold-out'}",
            "compare scores of the same hold-outs",
        )
    return shared
