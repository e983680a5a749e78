"""What the explorer knows of a study: its figures by arm and seed, and every pair of arms compared.

The page computes nothing: what it shows is in here, from `trials.parquet` and `study.json` by the
functions that make the tables.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from thawline.evaluation import formatting
from thawline.study.comparison import LOWER, UNRANKED, words
from thawline.study.explorer_arms import Tree, arms_of, dimensions_of, timelines_of
from thawline.study.statistics import paired

FIGURES = (
    "auc",
    "user_auc",
    "request_auc",
    "log_loss",
    "normalized_entropy",
    "mrr",
    "calibration",
    "positive_logit",
)
"""What can be chosen, beside the study's own metric."""
SLICES = ("pooled", "warm", "head", "torso", "tail", "cold")
TRAINING = "training"
"""Hold-out of the rows that are no figures of a hold-out: drift and seconds."""
ALL_PAIRS = 24
"""Arms up to which all are compared with all; beyond, with those that differ in one dimension."""

Key = tuple[str, str, str, str]
"""Hold-out, action, figure, slice."""
Values = dict[Key, dict[str, dict[int, float]]]
"""By figure, arm and seed."""


def study_data(
    name: str,
    facts: Tree,
    table: pa.Table,
    *,
    href: str | None = None,
    question: str = "",
    dataset: str = "",
) -> dict[str, Any]:
    """All that the explorer shows of one study, JSON-able.

    Args:
        name: Of the study, as no other's on the page.
        facts: `study.json`. `exposure` and `resolved` of its arms may be missing.
        table: `trials.parquet`. The rows of the hold-out `training` may be missing.
        href: Of the study's own page.
        question: What it asks.
        dataset: What it was run on, for the reader's choice; the name begins with it then.

    Returns:
        `values[figure][slice]`: a list an arm, in it a value a seed or None, exactly those of the
        Parquet file. `means`, `sds` beside it, `epochs` (the mean over the seeds after each epoch),
        and `pairs[figure][slice]`: three numbers for each pair of `compared` (mean and standard
        deviation of the first arm minus the second, and the place in `verdicts`) or three None.
        A figure is `holdout|action|figure`; these numbers have seven digits.
    """
    arms, dimensions = arms_of(facts), dimensions_of(facts)
    finals, epochs = _read(facts, table)
    scored = {key: own for key, own in finals.items() if key[0] != TRAINING}
    keys = list(dict.fromkeys(key[:3] for key in scored))
    pairs = _pairs([arm["at"] for arm in arms], [arm["baseline"] for arm in arms])
    verdicts = _Verdicts()
    names, seeds = [arm["name"] for arm in arms], list(facts["seeds"])
    drawn, places = timelines_of(facts)
    found: dict[str, Any] = {
        "name": name,
        "dataset": dataset,
        "title": name.removeprefix(f"{dataset}: ") if dataset else name,
        "href": href,
        "question": question,
        "metric": facts["metric"],
        "action": facts["action"],
        "holdout": facts["holdout"],
        "seeds": seeds,
        "dimensions": dimensions,
        "arms": [arm | {"timeline": place} for arm, place in zip(arms, places, strict=True)],
        "timelines": drawn,
        "holdouts": list(dict.fromkeys(key[0] for key in keys)),
        "actions": list(dict.fromkeys(key[1] for key in keys)),
        "figures": [_figure(each) for each in _in_order((key[2] for key in keys), FIGURES)],
        "slices": _in_order((key[3] for key in scored), SLICES),
        "compared": pairs,
        "values": {},
        "means": {},
        "sds": {},
        "epochs": {},
        "pairs": {},
    }
    for key, own in scored.items():
        place, piece = "|".join(key[:3]), key[3]
        rows = [own.get(arm, {}) for arm in names]
        after = [epochs.get(key, {}).get(arm, {}) for arm in names]
        for part, content in {
            "values": [[row.get(seed) for seed in seeds] for row in rows],
            "means": [_mean(list(row.values())) for row in rows],
            "sds": [_sd(list(row.values())) for row in rows],
            "epochs": [_course(each) for each in after],
            "pairs": list(_compared(rows, pairs, key[2], verdicts)),
        }.items():
            found[part].setdefault(place, {})[piece] = content
    found["verdicts"] = verdicts.rows
    found["drift"] = _drift(finals, names)
    found["seconds"] = _seconds(finals, facts, names)
    return found


def _read(facts: Tree, table: pa.Table) -> tuple[Values, dict[Key, Any]]:
    """The final values of each arm's last round, and those after each epoch."""
    rounds = {arm["name"]: arm["epochs"] for arm in facts["arms"]}
    wanted = pa.array([*FIGURES, facts["metric"], "drift", "seconds"])
    finals: Values = {}
    epochs: dict[Key, dict[str, dict[int, dict[int, float]]]] = {}
    for row in table.filter(pc.is_in(table["figure"], wanted)).to_pylist():
        value = row["value"]
        if row["round"] != rounds.get(row["arm"]) or value is None or not math.isfinite(value):
            continue
        key = (row["holdout"], row["action"], row["figure"], row["slice"])
        if row["final"]:
            finals.setdefault(key, {}).setdefault(row["arm"], {})[row["seed"]] = value
        else:
            own = epochs.setdefault(key, {}).setdefault(row["arm"], {})
            own.setdefault(row["epoch"], {})[row["seed"]] = value
    return finals, epochs


def _pairs(at: Sequence[Sequence[int]], baselines: Sequence[int | None]) -> list[tuple[int, int]]:
    """Places of arms, the first smaller than the second."""
    return [
        (first, second)
        for first, second in itertools.combinations(range(len(at)), 2)
        if len(at) <= ALL_PAIRS
        or sum(a != b for a, b in zip(at[first], at[second], strict=True)) == 1
        or baselines[first] == second
        or baselines[second] == first
    ]


class _Verdicts:
    """What pairs of arms say, each distinct one once."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._places: dict[str, int] = {}

    def place(self, row: dict[str, Any]) -> int:
        """Where the row stands."""
        text = json.dumps(row)
        if text not in self._places:
            self._places[text] = len(self.rows)
            self.rows.append(row)
        return self._places[text]


def _compared(
    rows: Sequence[Mapping[int, float]],
    pairs: Sequence[tuple[int, int]],
    figure: str,
    verdicts: _Verdicts,
) -> Iterator[float | int | None]:
    for first, second in pairs:
        own, other = rows[first], rows[second]
        differences = [own[seed] - other[seed] for seed in own if seed in other]
        if not differences:
            yield from (None, None, None)
            continue
        found = paired(differences)
        yield brief(found.mean)
        yield brief(found.sd)
        yield verdicts.place(
            {
                "n": found.n,
                "p": found.p_value,
                "reach": _reach(found.n),
                # Of the first arm against the second, and the other way round.
                "words": [
                    words(found, figure),
                    words(replace(found, mean=-found.mean), figure),
                ],
            }
        )


def _reach(n: int) -> float | None:
    """Half of the 95 % interval of a mean, in standard deviations of the differences."""
    if n < 2:
        return None
    unit = paired([*([0.0] * (n - 1)), 1.0])
    return None if unit.high is None or not unit.sd else brief((unit.high - unit.mean) / unit.sd)


def _figure(name: str) -> dict[str, Any]:
    better = "none" if name in UNRANKED else "lower" if name in LOWER else "higher"
    return {"key": name, "label": formatting.label(name), "better": better}


def _course(epochs: Mapping[int, Mapping[int, float]]) -> list[float | None]:
    last = max(epochs, default=0)
    return [_mean(list(epochs.get(number, {}).values())) for number in range(1, last + 1)]


def _drift(finals: Values, names: Sequence[str]) -> dict[str, dict[str, list[float | None]]]:
    """By table and tier, the mean over the seeds of each arm."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for (holdout, table, figure, tier), own in finals.items():
        if (holdout, figure) == (TRAINING, "drift"):
            rows = [_mean(list(own.get(arm, {}).values())) for arm in names]
            found.setdefault(table, {})[tier] = rows
    return {
        table: {tier: own[tier] for tier in _in_order(own, SLICES)} for table, own in found.items()
    }


def _seconds(finals: Values, facts: Tree, names: Sequence[str]) -> dict[str, Any]:
    """What a trial of each arm takes: its training, and all of it with the evaluation."""
    whole: dict[str, list[float]] = {}
    rounds = {arm["name"]: arm["epochs"] for arm in facts["arms"]}
    for trial in facts["trials"]:
        if trial.get("seconds") is not None and trial["round"] == rounds.get(trial["arm"]):
            whole.setdefault(trial["arm"], []).append(trial["seconds"])
    trained: dict[str, dict[int, float]] = {}
    for (holdout, _, figure, _), own in finals.items():
        if (holdout, figure) == (TRAINING, "seconds"):
            trained = own
    return {
        "trial": [_mean(whole.get(arm, [])) for arm in names],
        "training": [_mean(list(trained.get(arm, {}).values())) for arm in names],
    }


def _in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Each name once: those that have a place in the order first."""
    known = list(dict.fromkeys(names))
    return sorted(known, key=lambda name: order.index(name) if name in order else len(order))


def _mean(values: Sequence[float]) -> float | None:
    return brief(float(np.mean(values))) if values else None


def _sd(values: Sequence[float]) -> float | None:
    return brief(float(np.std(values, ddof=1))) if len(values) > 1 else None


def brief(value: float | None) -> float | None:
    """A number with seven digits, which is more than is shown."""
    return None if value is None else float(f"{value:.7g}")
