"""What the trials of a study say of its arms and contrasts: by seed, in figures and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from thawline.config.running import LOWER_IS_BETTER
from thawline.study.statistics import Paired, paired, pairs_needed

LEVEL = 0.05
"""Of the sign-flip test: above it a difference counts as undecided."""

COUNTS = ("positives", "candidates")
"""Figures that say how much there is, and nothing of a model."""
UNRANKED = ("calibration", "positive_logit", "drift", "trained_share")
"""Neither high nor low is better."""
LOWER = (*LOWER_IS_BETTER, "ece", "seconds")

Tree = Mapping[str, Any]
Values = Mapping[int, float]
"""By seed."""
Key = tuple[str, str, str, str]
"""Hold-out, action, slice, figure."""


def compare_arms(facts: Mapping[str, Any], table: pa.Table) -> list[dict[str, Any]]:
    """Each arm beside its baseline, and the contrasts, by hold-out, action, slice and figure.

    Args:
        facts: `study.json`; its `arms` and `contrasts` are used.
        table: `trials.parquet`; the final figures of the last round are used.

    Returns:
        Rows in the table's order and, within a figure, in that of the arms and then of the
        contrasts: `holdout`, `action`, `slice`, `figure`, `arm`, `contrast` (whether `arm` names
        one), `baseline` (None for a baseline or a contrast), `seeds` (finished), `mean`, `sd` (of
        the arm's figures), and for arms with a baseline `n` (pairs), `difference` (arm minus
        baseline), `difference_sd`, `low`, `high`, `agreement`, `p_value`, `exact`, `pairs_needed`,
        `words`. The difference of a contrast is its mean. What is undefined is None.
    """
    rows = []
    for key, arms in _finals(facts, table).items():
        for arm in facts["arms"]:
            own = arms.get(arm["name"])
            if own:
                other = arms.get(arm["baseline"], {}) if arm["baseline"] != arm["name"] else None
                rows.append(_row(key, arm, own, other))
        for contrast in facts.get("contrasts", ()):
            sums = _sums(contrast["weights"], arms)
            if sums:
                rows.append(_contrast_row(key, contrast["name"], sums))
    return rows


def words(found: Paired | None, figure: str, *, contrast: bool = False) -> str:
    """What the pairs decide, for a reader.

    The sign-flip test needs six pairs to come under 0.05: with fewer, nothing is decided however
    far the arms are apart.

    Args:
        found: None where there is no pair.
        figure: That was compared.
        contrast: Whether sums of arms are tested, of which none is better or worse.
    """
    if found is None:
        return "no pair of seeds"
    seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
    if not found.mean and not found.sd:
        return f"no difference with {seeds}"
    if found.n == 1:
        return "undecided with 1 seed"
    up, down = "better", "worse"
    if contrast:
        up, down = "above 0", "below 0"
    elif figure in UNRANKED:
        up, down = "higher", "lower"
    elif figure in LOWER:
        up, down = down, up
    which = up if found.mean > 0 else down
    agreeing = f"{which} in {round(found.agreement * found.n)} of {found.n}"
    if found.p_value <= LEVEL:
        return f"{which} with {seeds} ({agreeing})"
    return f"undecided with {seeds} ({agreeing})"


def decided(row: Mapping[str, Any]) -> str:
    """`better`, `worse` or `undecided`, for colours."""
    word = str(row.get("words") or "").partition(" ")[0]
    return word if word in ("better", "worse") else "undecided"


def _finals(facts: Mapping[str, Any], table: pa.Table) -> dict[Key, dict[str, dict[int, float]]]:
    """By figure, arm and seed, the final value of the last round."""
    rounds = {arm["name"]: arm["epochs"] for arm in facts["arms"]}
    found: dict[Key, dict[str, dict[int, float]]] = {}
    for row in _finished(table):
        if row["round"] != rounds.get(row["arm"]) or row["figure"] in COUNTS:
            continue
        key = (row["holdout"], row["action"], row["slice"], row["figure"])
        arms = found.setdefault(key, {})
        if row["value"] is not None and math.isfinite(row["value"]):
            arms.setdefault(row["arm"], {})[row["seed"]] = row["value"]
    return found


def _finished(table: pa.Table) -> Iterator[dict[str, Any]]:
    yield from table.filter(table["final"]).to_pylist()


def _sums(weights: Mapping[str, float], arms: Mapping[str, Values]) -> dict[int, float]:
    """A contrast by seed, of the seeds that all its arms have; 0 is left where arms are equal."""
    values = [(weight, arms.get(name, {})) for name, weight in weights.items()]
    shared = set.intersection(*(set(own) for _, own in values))
    return {
        seed: math.fsum(weight * own[seed] for weight, own in values) for seed in sorted(shared)
    }


def _row(key: Key, arm: Tree, own: Values, other: Values | None) -> dict[str, Any]:
    row = _means(key, arm["name"], own) | {
        "contrast": False,
        "baseline": None if other is None else arm["baseline"],
    }
    if other is None:
        return row
    shared = [seed for seed in own if seed in other]
    found = paired([own[seed] - other[seed] for seed in shared]) if shared else None
    return row | _tested(found) | {"words": words(found, key[3])}


def _contrast_row(key: Key, name: str, sums: Values) -> dict[str, Any]:
    found = paired(list(sums.values()))
    tested = _tested(found) | {"words": words(found, key[3], contrast=True)}
    return _means(key, name, sums) | {"contrast": True, "baseline": None} | tested


def _means(key: Key, name: str, own: Values) -> dict[str, Any]:
    values = np.array(list(own.values()))
    return {
        **dict(zip(("holdout", "action", "slice", "figure"), key, strict=True)),
        "arm": name,
        "seeds": len(values),
        "mean": float(values.mean()),
        "sd": float(values.std(ddof=1)) if len(values) > 1 else None,
    }


def _tested(found: Paired | None) -> dict[str, Any]:
    needed = None
    if found is not None and found.sd is not None and found.mean:
        needed = pairs_needed(found.mean, found.sd)
    return {
        "n": found.n if found else 0,
        "difference": found and found.mean,
        "difference_sd": found and found.sd,
        "low": found and found.low,
        "high": found and found.high,
        "agreement": found and found.agreement,
        "p_value": found and found.p_value,
        "exact": found and found.exact,
        "pairs_needed": needed,
    }
