"""Evaluations made by hand, for tests of what a report says of them."""

from __future__ import annotations

from typing import Any

TIERS = ("head", "torso", "tail", "cold")


def figures(auc: float | None, positives: int = 400, candidates: int = 9_000) -> dict[str, Any]:
    """The figures of one action on one slice; all that follow the AUC are made up from it."""
    known = auc is not None
    return {
        "auc": auc,
        "user_auc": auc - 0.01 if known else None,
        "request_auc": auc - 0.02 if known else None,
        "log_loss": 0.9 - auc if known else None,
        "normalized_entropy": 1.7 - auc if known else None,
        "calibration": 1.3 * auc if known else None,
        "ece": 0.0125 if known else None,
        "hit@3": auc / 2 if known else None,
        "ndcg@3": auc / 3 if known else None,
        "mrr": auc / 4 if known else None,
        "positives": positives,
        "candidates": candidates,
    }


def bounds(auc: float, half: float) -> dict[str, list[float] | None]:
    """Intervals of some of the figures."""
    made = figures(auc)
    names = ("auc", "user_auc", "request_auc", "log_loss", "calibration", "hit@3")
    return {name: [made[name] - half, made[name] + half] for name in names} | {"mrr": None}


def holdout(auc: float = 0.75, actions: tuple[str, ...] = ("save", "click")) -> dict[str, Any]:
    """A hold-out of 9,000 requests by 2,000 users; nothing of the tail has a figure."""
    tiers = {"head": auc + 0.03, "torso": auc - 0.02, "tail": None, "cold": auc - 0.15}
    slices = {
        "context.surface": {"home": auc + 0.01, "search": auc - 0.03, "push": None},
        "day": {"2026-01-29": auc - 0.005, "2026-01-30": auc + 0.005},
        "history_length": {"0": auc - 0.1, "1 to 4": auc - 0.04, "5 and more": auc + 0.01},
        "item_age": {"under 1 day": auc - 0.08, "1 to 7 days": auc, "older": auc + 0.02},
    }

    def each(value: float | None, *, thin: bool = False) -> dict[str, Any]:
        positives = 0 if value is None else 12 if thin else 400
        return {action: figures(value, positives) for action in actions}

    return {
        "requests": 9_000,
        "users": 2_000,
        "pooled": each(auc),
        "tiers": {tier: each(value) for tier, value in tiers.items()},
        "slices": {
            kind: {name: each(value, thin=name == "0") for name, value in values.items()}
            for kind, values in slices.items()
        },
        "intervals": {
            "pooled": {action: bounds(auc, 0.004) for action in actions},
            "tiers": {
                tier: {action: bounds(value, 0.03) for action in actions}
                for tier, value in tiers.items()
                if value is not None
            },
        },
        "retrieval": {
            "recall@20": 0.3125,
            "ndcg@20": 0.1875,
            "mrr": 0.0625,
            "k": 20,
            "requests": 8_192,
        },
        "oracle": {action: figures(0.9) for action in actions},
        "trivial": {"item_age": 0.52, "never_trained": 0.5, "as_of_popularity": 0.66},
        "curves": dict.fromkeys(actions, CURVES),
    }


CURVES = {
    "roc": {
        "fpr": [0.0, 0.1, 0.4, 1.0],
        "tpr": [0.0, 0.5, 0.8, 1.0],
        "threshold": [1, 0.6, 0.2, 0],
    },
    "oracle_roc": None,
    "reliability": [
        {"predicted": 0.05, "observed": 0.04, "candidates": 3_000},
        {"predicted": 0.1, "observed": 0.125, "candidates": 3_000},
        {"predicted": 0.3, "observed": 0.25, "candidates": 3_000},
    ],
}


def compared(slice_: str, challenger: float, champion: float, half: float, **changes: Any) -> Any:
    """A line of the comparison with the champion."""
    difference = challenger - champion
    return {
        "action": "save",
        "slice": slice_,
        "figure": "auc",
        "challenger": challenger,
        "champion": champion,
        "difference": difference,
        "low": difference - half,
        "high": difference + half,
        "smallest_effect": 1.4 * half,
        "requests": 9_000,
        "users": 2_000,
    } | changes


CHAMPION = {
    "name": "feed-ranker",
    "version": "3",
    "data_version": "aa51f0c2d3",
    "recipe": "co-train",
    "metrics": {},
    "comparison": {
        "next": [
            compared("pooled", 0.75, 0.74, 0.004),
            compared("head", 0.78, 0.76, 0.01),
            compared("torso", 0.73, 0.729, 0.01),
            compared("cold", 0.60, 0.65, 0.03),
            compared("pooled", 0.31, 0.33, 0.005, figure="log_loss"),
        ],
        "in_window": [compared("pooled", 0.75, 0.751, 0.004)],
    },
}

GATE = {
    "passed": False,
    "rules": [
        {
            "name": "save auc not below the champion's by more than 0.005",
            "status": "passed",
            "reason": "save AUC on next is 0.0100 above the champion's.",
            "value": 0.01,
            "low": 0.006,
            "high": 0.014,
            "bound": -0.005,
        },
        {
            "name": "save auc cold not below the champion's by more than 0.01",
            "status": "failed",
            "reason": "save AUC of cold items on next is 0.0500 below the champion's.",
            "value": -0.05,
            "low": -0.08,
            "high": -0.02,
            "bound": -0.01,
        },
        {
            "name": "save calibration within 0.02",
            "status": "undecided",
            "reason": "save calibration on next is undefined.",
            "value": None,
            "low": None,
            "high": None,
            "bound": 0.02,
        },
        {
            "name": "no errors in the audit",
            "status": "passed",
            "reason": "The audit found none.",
            "value": None,
            "low": None,
            "high": None,
            "bound": None,
        },
    ],
}
