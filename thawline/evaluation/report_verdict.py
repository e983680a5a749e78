"""What the report says of the gate and of the champion: is it better, what to worry about.

From the keys `gate` and `champion` of `evaluation.json`, which older ones lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from thawline.config.running import LOWER_IS_BETTER
from thawline.evaluation import formatting
from thawline.evaluation.dots import Dot, Scale, dot_plot
from thawline.evaluation.finding import ends
from thawline.evaluation.formatting import listed

Tree = Mapping[str, Any]

Judgement = Literal["better", "worse", "undecided"]

SHOWN = ("auc", "normalized_entropy", "calibration")
"""Figures of the primary action whose comparison is not folded away."""

SHORT = 12
"""Characters of a data version that are enough to tell it by."""

ROUNDED = 5e-5
"""Smaller differences are none to a reader of four decimals."""

MAX_MISCALIBRATION = 0.05
"""A mean prediction may be this far off, as a share of the rate, before it is spoken of."""


def gate_view(gate: Tree | None) -> list[dict[str, Any]]:
    """The gate's rules in order; empty where an older evaluation names none."""
    return [
        {
            "name": rule["name"],
            "status": rule["status"],
            "reason": rule.get("reason") or "",
        }
        for rule in (gate or {}).get("rules") or ()
    ]


def champion_name(champion: Tree) -> str:
    """The champion in words: `feed-ranker version 3`."""
    version = champion.get("version")
    name = champion.get("name") or "the champion"
    return f"{name} version {version}" if version else str(name)


def champion_view(champion: Tree, action: str | None) -> dict[str, Any]:
    """What the page shows of the comparison: a dot plot of differences a hold-out and figure.

    Args:
        champion: From `evaluation.json`.
        action: The primary one, whose main figures are not folded away.
    """
    return {
        "name": champion_name(champion),
        "facts": {
            key.replace("_", " "): champion[key][:length]
            for key, length in (("recipe", None), ("data_version", SHORT))
            if champion.get(key)
        },
        "notes": champion.get("notes") or (),
        "holdouts": [
            {"name": holdout, "size": _size(rows)} | _folded(_groups(rows), action)
            for holdout, rows in (champion.get("comparison") or {}).items()
            if rows
        ],
    }


def judge(row: Tree) -> Judgement:
    """Whether the challenger is better, if the interval of the difference leaves no doubt.

    Calibration is better the nearer it is to 1.
    """
    low, high = row.get("low"), row.get("high")
    if low is None or high is None or low <= 0 <= high:
        return "undecided"
    if row["figure"] == "calibration":
        nearer = abs(row["challenger"] - 1) < abs(row["champion"] - 1)
        return "better" if nearer else "worse"
    lower_is_better = row["figure"] in (*LOWER_IS_BETTER, "ece")
    return "better" if (high < 0) == lower_is_better else "worse"


def is_better(evaluation: Tree, holdouts: Sequence[str], action: str | None) -> list[str]:
    """Answers "is it better?" in a sentence a hold-out, by the primary action's AUC.

    Args:
        evaluation: What `evaluation.json` holds.
        holdouts: Names, in the order to speak of them.
        action: The primary one.
    """
    if "champion" not in evaluation:
        return ["It was not compared with another model."]
    champion = evaluation["champion"]
    if champion is None:
        return ["There is no champion to compare it with."]
    sentences = []
    for holdout in holdouts:
        rows = [
            row
            for row in (champion.get("comparison") or {}).get(holdout) or ()
            if row["action"] == action and row["figure"] == "auc"
        ]
        pooled = next((row for row in rows if row["slice"] == "pooled"), None)
        if pooled is not None:
            tiers = [row for row in rows if row["slice"] != "pooled"]
            of = f"that of {champion_name(champion)}"
            sentences.append(f"{_against(holdout, pooled, of)}{_by_tier(tiers)}")
    return sentences or [f"Nothing could be compared with {champion_name(champion)}."]


def worries(evaluation: Tree, *, sampled: bool) -> list[str]:
    """What a reader should look into, apart from the findings in the metrics.

    Args:
        evaluation: What `evaluation.json` holds.
        sampled: Whether negatives were sampled, in which case rates are not those of the log.
    """
    return [
        *_rules((evaluation.get("gate") or {}).get("rules") or ()),
        *_losses(evaluation.get("champion") or {}),
        *([] if sampled else _miscalibrated(evaluation["metrics"])),
        *_audited((evaluation.get("audit") or {}).get("findings") or ()),
    ]


def _rules(rules: Sequence[Tree]) -> Iterator[str]:
    for status in ("failed", "undecided"):
        names = [str(rule["name"]) for rule in rules if rule["status"] == status]
        if names:
            kind = "failed" if status == "failed" else "could not be decided"
            yield f"{len(names)} of the gate's {len(rules)} rules {kind}: {listed(names)}."


def _losses(champion: Tree) -> Iterator[str]:
    """Where the challenger's AUC is below the champion's beyond doubt."""
    for holdout, rows in (champion.get("comparison") or {}).items():
        worse = [
            f"{row['action']} {row['slice']} ({formatting.signed(row['difference'])})"
            for row in rows
            if row["figure"] == "auc" and judge(row) == "worse"
        ]
        if worse:
            yield f"On {holdout}, the AUC is below the champion's: {listed(worse)}."


def _miscalibrated(metrics: Mapping[str, Tree]) -> Iterator[str]:
    for holdout, tree in metrics.items():
        for action, values in tree["pooled"].items():
            ratio = values.get("calibration")
            if ratio is None or abs(ratio - 1) <= MAX_MISCALIBRATION:
                continue
            bounds = ends(tree, action, "pooled", "calibration")
            if bounds is None and tree.get("intervals"):
                continue
            low, high = bounds or (ratio, ratio)
            if low <= 1 <= high:
                continue
            share = f"{abs(ratio - 1):.0%}".replace("%", " %")
            way = "more" if ratio > 1 else "less"
            yield f"On {holdout}, {action} is predicted {share} {way} often than it happens."


def _audited(found: Sequence[Tree]) -> Iterator[str]:
    for finding in found:
        if finding["severity"] != "info":
            waived = " (waived)" if finding.get("waived") else ""
            yield f"Audit{waived}: {finding['text']}"


def _against(holdout: str, row: Tree, of: str) -> str:
    difference = row.get("difference")
    what = f"On {holdout}, {row['action']} AUC"
    if difference is None:
        return f"{what} cannot be compared with {of}: it is undefined."
    bounds = formatting.interval([row.get("low"), row.get("high")], sign=True)
    if abs(difference) < ROUNDED:
        text = f"{what} is as high as {of}"
    else:
        side = "above" if difference > 0 else "below"
        text = f"{what} is {abs(difference):.4f} {side} {of}"
    if bounds is None:
        return f"{text}."
    text += f" (95 % interval {bounds})"
    found = judge(row)
    if found != "undecided":
        return f"{text}: {found}."
    least = row.get("smallest_effect")
    shown = f"; the smallest effect these data could show is {least:.4f}" if least else ""
    return f"{text}: no difference can be told{shown}."


def _by_tier(rows: Sequence[Tree]) -> str:
    parts = []
    if rows and all(judge(row) == "undecided" for row in rows):
        return " By tier: undecided on all."
    for judgement in ("better", "worse", "undecided"):
        names = [row["slice"] for row in rows if judge(row) == judgement]
        if names:
            parts.append(f"{judgement} on {listed(names)}")
    return f" By tier: {', '.join(parts)}." if parts else ""


def _size(rows: Sequence[Tree]) -> str:
    requests, users = rows[0].get("requests"), rows[0].get("users")
    parts = [
        f"{formatting.count(number)} {name}"
        for number, name in ((requests, "requests"), (users, "users"))
        if number is not None
    ]
    return ", ".join(parts)


def _folded(groups: Iterable[dict[str, Any]], action: str | None) -> dict[str, Any]:
    parts: dict[str, Any] = {"shown": [], "folded": []}
    for group in groups:
        main = group["action"] == action and group["figure"] in SHOWN
        parts["shown" if main else "folded"].append(group)
    return parts


def _groups(rows: Sequence[Tree]) -> Iterator[dict[str, Any]]:
    """The slices of each action and figure, as a dot plot."""
    keys = dict.fromkeys((row["action"], row["figure"]) for row in rows)
    for action, figure in keys:
        dots = [
            _difference(row) for row in rows if (row["action"], row["figure"]) == (action, figure)
        ]
        yield {
            "action": action,
            "figure": figure,
            "title": f"{action}: {formatting.label(figure)}",
            "plot": dot_plot(dots, 0.0, Scale.over(dots, 0.0), signed=True),
        }


def _difference(row: Tree) -> Dot:
    judged = judge(row)
    parts = [
        f"{formatting.figure(row.get('challenger'))} against "
        f"{formatting.figure(row.get('champion'))}"
    ]
    bounds = formatting.interval([row.get("low"), row.get("high")], sign=True)
    if bounds is not None:
        parts.append(bounds)
    if row.get("smallest_effect") is not None:
        parts.append(f"could show {formatting.figure(row['smallest_effect'])}")
    kinds = {"better": "good", "worse": "bad", "undecided": "open"}
    return Dot(
        row["slice"],
        row.get("difference"),
        row.get("low"),
        row.get("high"),
        kinds[judged],
        ", ".join(parts),
    )
