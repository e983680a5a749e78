"""Two models on the same candidates: differences of their figures, and what they may be by chance.

A user's requests are alike, so users are drawn with replacement, not requests (`intervals`). Both
models see the same draws: the difference of two figures varies by far less than either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from thawline.data.manifest import TIERS
from thawline.errors import DataError
from thawline.evaluation.checks import require_usable
from thawline.evaluation.figures import Column, Part
from thawline.evaluation.intervals import SEED, UserSums, draws, figure_names
from thawline.evaluation.scored import Scored
from thawline.study.statistics import SHOWN_WITH

SLICES = ("pooled", *TIERS)
MOST_GROUPS = 20_000
"""More users than so many are drawn in groups of users, which bounds the memory."""
LEAST_DEFINED = 0.9
"""Share of the resamples in which a figure must be defined for its interval to mean anything."""
LEAST_USERS = 20
"""Users with positives, and with negatives: with fewer there is no interval, since it would be too
narrow. Of two equally good models, a 95 % interval misses in 9 % of samples of 20 users, in 12 % of
10."""


@dataclass(frozen=True)
class Sides:
    """Candidates that one or two models have scored."""

    scored: Scored
    """With the users, and the logits of the model that is asked about (challenger, B)."""
    tier: np.ndarray
    """int8 [K]: index into `TIERS`."""
    other: np.ndarray | None = None
    """float32 [K, A]: logits of the model that it is compared with (champion, A)."""


@dataclass(frozen=True)
class Measured:
    """One figure on one slice: of the model that is asked about, and of the other one."""

    action: str
    slice: str
    figure: str
    values: tuple[float | None, ...]
    """Of each model; None where it is undefined."""
    resampled: np.ndarray
    """float64 [R, models]: NaN where a resample leaves it undefined."""
    candidates: int
    positives: int

    @property
    def value(self) -> float | None:
        """Of the model that is asked about."""
        return self.values[0]

    @property
    def other(self) -> float | None:
        """Of the one that it is compared with."""
        return self.values[1] if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """The first minus the second."""
        return None if self.value is None or self.other is None else self.value - self.other

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """The two-sided percentile interval of `value`; None where there is none."""
        return None if self.value is None else _interval(self.resampled[:, 0], confidence)

    def difference_interval(self, confidence: float) -> tuple[float, float] | None:
        """That of `difference`; None where there is none."""
        return None if self.difference is None else _interval(self._differences, confidence)

    @property
    def smallest_effect(self) -> float | None:
        """The least true difference that such data would show, with 80 % power at 5 %."""
        values = _defined(self._differences) if self.difference is not None else None
        return None if values is None else SHOWN_WITH * float(values.std(ddof=1))

    @cached_property
    def _differences(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self.resampled[:, 0] - self.resampled[:, 1]


Figures = Mapping[tuple[str, str, str], Measured]
"""By action, slice and figure."""


def measure(
    sides: Sides,
    *,
    hit_at: int,
    resamples: int = 1_000,
    seed: int = SEED,
    slices: Sequence[str] = SLICES,
) -> dict[tuple[str, str, str], Measured]:
    """Every figure of each action on each slice, of one model or of two.

    Args:
        sides: What was scored.
        hit_at: The k of HIT@k and NDCG@k.
        resamples: Of the users.
        seed: Of the draws.
        slices: `pooled` and tiers.

    Returns:
        By action, slice and figure, in that order.

    Raises:
        TrainingError: A score that is NaN or infinite.
        DataError: Requests without their users.
    """
    scored = sides.scored
    user = scored.user
    if user is None:
        raise DataError(
            "scored requests do not say who asked, which comparisons go by",
            "score them with `users=True`",
        )
    logits = [scored.logits] + ([] if sides.other is None else [sides.other])
    for each in logits:
        require_usable(replace(scored, logits=each, oracle=None), {})
    found: dict[tuple[str, str, str], Measured] = {}
    for index, action in enumerate(scored.actions):
        labels = scored.labels[:, index]
        columns = [Column(scored, each[:, index], labels, hit_at) for each in logits]
        parts = [dict(_parts(column, sides.tier)) for column in columns]
        for name in slices:
            sums, values = [], []
            for column, own in zip(columns, parts, strict=True):
                measured = column.measure(own[name])
                values.append(measured.figures())
                sums.append(_Folded(UserSums(measured, user)))
            drawn = _resampled(sums, resamples, seed)
            enough = sums[0].users >= LEAST_USERS
            for figure in figure_names(hit_at):
                found[action, name, figure] = Measured(
                    action,
                    name,
                    figure,
                    tuple(value[figure] for value in values),
                    drawn[figure] if enough else np.full((resamples, len(logits)), np.nan),
                    values[0]["candidates"],
                    values[0]["positives"],
                )
    return found


def comparison(
    figures: Figures, scored: Scored, *, names: tuple[str, str] = ("challenger", "champion")
) -> list[dict[str, Any]]:
    """The rows of a comparison, JSON-able, with 95 % intervals.

    Args:
        figures: Of two models.
        scored: The requests.
        names: What the model that is asked about and the other one are called.

    Returns:
        `{"action", "slice", "figure", <names>, "difference", "low", "high", "smallest_effect",
        "requests", "users"}` each; None where something is undefined.
    """
    rows = []
    for found in figures.values():
        low, high = found.difference_interval(0.95) or (None, None)
        rows.append(
            {
                "action": found.action,
                "slice": found.slice,
                "figure": found.figure,
                names[0]: found.value,
                names[1]: found.other,
                "difference": found.difference,
                "low": low,
                "high": high,
                "smallest_effect": found.smallest_effect,
                "requests": scored.num_requests,
                "users": scored.num_users,
            }
        )
    return rows


class _Folded:
    """The sums of users, in at most `MOST_GROUPS` groups of users."""

    def __init__(self, sums: UserSums) -> None:
        self.own = sums
        up, whole = sums.sums[:, 1], sums.sums[:, 3]
        self.users = int(min(np.count_nonzero(up), np.count_nonzero(whole > up)))
        self.table = sums.sums
        if len(self.table) > MOST_GROUPS:
            short = -len(self.table) % MOST_GROUPS
            padded = np.pad(self.table, ((0, short), (0, 0)))
            self.table = padded.reshape(-1, MOST_GROUPS, padded.shape[1]).sum(axis=0)
            # Beside the sums, which are far fewer now.
            sums.sums = self.table


def _resampled(sides: Sequence[_Folded], resamples: int, seed: int) -> dict[str, np.ndarray]:
    """Each figure of the resamples, [R, models], all from the same draws."""
    blocks: list[dict[str, np.ndarray]] = []
    for counts in draws(len(sides[0].table), resamples, seed):
        each = [side.own.figures(counts, counts @ side.table) for side in sides]
        blocks.append({name: np.stack([own[name] for own in each], axis=1) for name in each[0]})
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _parts(column: Column, tier: np.ndarray) -> list[tuple[str, Part]]:
    return [("pooled", column.whole), *zip(TIERS, column.parts(tier, len(TIERS)), strict=True)]


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float] | None:
    defined = _defined(values)
    if defined is None:
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return float(low), float(high)


def _defined(values: np.ndarray) -> np.ndarray | None:
    """The values that are; None where they are too few."""
    finite = values[np.isfinite(values)]
    return finite if len(finite) > LEAST_DEFINED * len(values) else None
