"""What the report shows of one hold-out: tables by tier, dot plots of slices, curves.

Every key of a metrics tree that older evaluations lack may be absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from thawline.data.manifest import TIERS
from thawline.evaluation import epoch_plots, findings, formatting, plots
from thawline.evaluation.dots import THIN, Dot, Scale, dot_plot
from thawline.evaluation.finding import ends, primary

Tree = Mapping[str, Any]

PROBABILITY = (0.0, 1.0)
"""What an AUC lies in."""

ORDER = (
    "auc",
    "user_auc",
    "request_auc",
    "hit@",
    "ndcg@",
    "mrr",
    "log_loss",
    "normalized_entropy",
    "calibration",
    "ece",
)
"""Figures of a table from top to bottom; others come below them."""

COUNTS = ("positives", "candidates")

_KINDS = {
    "day": "By day",
    "history_length": "By history length",
    "item_age": "By item age",
}


def tile(holdout: str, tree: Tree) -> dict[str, Any] | None:
    """The primary action's AUC, pooled, of the oracle and as a dot plot of the tiers."""
    action = primary(tree)
    if action is None:
        return None
    return {
        "holdout": holdout,
        "action": action,
        "auc": tree["pooled"][action]["auc"],
        "interval": ends(tree, action, "pooled", "auc"),
        "oracle": ((tree.get("oracle") or {}).get(action) or {}).get("auc"),
        "tiers": _tiers(tree, action),
    }


def holdout_view(
    holdout: str,
    tree: Tree,
    epochs: Sequence[Tree],
    windows: Sequence[tuple[float, float]],
    tracks: Sequence[epoch_plots.Track],
    *,
    sampled: bool,
) -> dict[str, Any]:
    """Everything that the page shows of a hold-out.

    Args:
        holdout: Its name.
        tree: Its metrics tree.
        epochs: Entries of `epochs.json`.
        windows: Spans in epochs in which the item table trains.
        tracks: The schedule of the ID tables, drawn beneath the curves.
        sampled: Whether negatives were sampled.
    """
    main = primary(tree)
    heads = [
        {
            "action": action,
            "auc": tree["pooled"][action]["auc"],
            "table": table(tree, action),
            "plots": [
                *_by_epoch(holdout, action, epochs, windows, tracks),
                *(_roc(holdout, tree, action) if action == main else ()),
                *_reliability(holdout, tree, action, sampled),
            ],
            "trivial": (tree.get("trivial") or {}) if action == main else {},
            "slices": slices(tree, action),
        }
        for action in tree["pooled"]
    ]
    return {
        "name": holdout,
        "words": findings.HOLDOUTS.get(holdout, ""),
        "requests": tree["requests"],
        "users": tree.get("users"),
        "primary": main,
        "heads": heads,
        "hollow": any(
            row["thin"] for head in heads for part in head["slices"] for row in part["plot"]["rows"]
        ),
        "intervals": bool(tree.get("intervals")),
        "undefined": any(
            cell["text"] == formatting.UNDEFINED
            for head in heads
            for row in head["table"]["rows"]
            for cell in row["cells"]
        ),
        "retrieval": _retrieval(tree),
        "epoch_requests": _epoch_requests(holdout, epochs),
    }


def table(tree: Tree, action: str) -> dict[str, Any]:
    """One action's figures: a row a figure; a column for all candidates, each tier, the oracle."""
    columns: dict[str, Tree] = {"pooled": tree["pooled"][action]}
    columns |= {tier: tree["tiers"].get(tier, {}).get(action) or {} for tier in TIERS}
    if tree.get("oracle") and action in tree["oracle"]:
        columns["oracle"] = tree["oracle"][action]
    names = sorted(columns["pooled"], key=_place)
    return {
        "columns": list(columns),
        "rows": [
            {
                "label": formatting.label(name),
                "minor": name in COUNTS,
                "cells": [
                    {
                        "column": column,
                        "text": (formatting.count if name in COUNTS else formatting.figure)(
                            values.get(name)
                        ),
                        "interval": formatting.interval(ends(tree, action, column, name)),
                    }
                    for column, values in columns.items()
                ],
            }
            for name in names
        ],
    }


def slices(tree: Tree, action: str) -> list[dict[str, Any]]:
    """A dot plot of the AUC by each kind of slice, all on one scale, beside the pooled AUC."""
    kinds: dict[str, list[Dot]] = {}
    for kind, values in (tree.get("slices") or {}).items():
        dots = [
            _dot(value, heads[action], None) for value, heads in values.items() if action in heads
        ]
        if all(dot.name.isdigit() for dot in dots):
            dots.sort(key=lambda dot: int(dot.name))
        if any(dot.value is not None for dot in dots):
            kinds[kind] = dots
    pooled = tree["pooled"][action]["auc"]
    scale = Scale.over([dot for dots in kinds.values() for dot in dots], pooled, PROBABILITY)
    return [
        {"title": slice_title(kind), "plot": dot_plot(dots, pooled, scale)}
        for kind, dots in kinds.items()
    ]


def slice_title(kind: str) -> str:
    """A kind of slice for a reader."""
    if kind.startswith("context."):
        return f"By {kind.removeprefix('context.')}"
    return _KINDS.get(kind, f"By {kind.replace('_', ' ')}")


def _tiers(tree: Tree, action: str) -> dict[str, Any]:
    dots = [
        _dot(
            tier,
            tree["tiers"].get(tier, {}).get(action) or {},
            ends(tree, action, tier, "auc"),
            tier,
        )
        for tier in TIERS
    ]
    pooled = tree["pooled"][action]["auc"]
    every = [replace(dot, thin=False) for dot in dots]
    return dot_plot(dots, pooled, Scale.over(every, pooled, PROBABILITY))


def _dot(name: str, values: Tree, bounds: tuple[float, float] | None, kind: str = "") -> Dot:
    low, high = bounds or (None, None)
    hint, thin = "", False
    if "positives" in values and "candidates" in values:
        positives, candidates = values["positives"], values["candidates"]
        hint = f"{positives:,} positives of {candidates:,} candidates"
        thin = min(positives, candidates - positives) < THIN
    return Dot(name, values.get("auc"), low, high, kind, hint=hint, thin=thin)


def _place(name: str) -> tuple[int, str]:
    for place, known in enumerate(ORDER):
        if name == known or (known.endswith("@") and name.startswith(known)):
            return place, name
    return len(ORDER) + (COUNTS.index(name) + 1 if name in COUNTS else 0), name


def _retrieval(tree: Tree) -> list[tuple[str, str]]:
    found: Tree = tree.get("retrieval") or {}
    shown = [
        (formatting.label(name), formatting.figure(value))
        for name, value in found.items()
        if name not in ("k", "requests")
    ]
    if "requests" in found:
        shown.append(("requests", formatting.count(found["requests"])))
    return shown


def _by_epoch(
    holdout: str,
    action: str,
    epochs: Sequence[Tree],
    windows: Sequence[tuple[float, float]],
    tracks: Sequence[epoch_plots.Track],
) -> Iterable[dict[str, Any]]:
    """Curves of an action's AUC; nothing where no epoch was scored or no AUC is defined."""
    scored = [
        (index, entry["metrics"][holdout])
        for index, entry in enumerate(epochs, start=1)
        if holdout in (entry.get("metrics") or {})
    ]
    series = {
        name: [findings.slice_auc(tree, action, name) for _, tree in scored]
        for name in ("pooled", *TIERS)
    }
    if all(value is None for values in series.values() for value in values):
        return
    yield _plot(
        f"{action}: AUC after each epoch",
        epoch_plots.auc_by_epoch(
            series,
            [index for index, _ in scored],
            windows,
            f"{holdout}: AUC of {action} after each epoch, pooled and by tier",
            tracks,
        ),
    )


def _epoch_requests(holdout: str, epochs: Sequence[Tree]) -> int | None:
    for entry in epochs:
        tree = (entry.get("metrics") or {}).get(holdout)
        if tree:
            return int(tree["requests"])
    return None


def _roc(holdout: str, tree: Tree, action: str) -> Iterable[dict[str, Any]]:
    curve = (tree.get("curves") or {}).get(action) or {}
    if not curve.get("roc"):
        return
    oracle = (tree.get("oracle") or {}).get(action) or {}
    svg = plots.roc(
        curve["roc"],
        tree["pooled"][action]["auc"],
        curve.get("oracle_roc"),
        oracle.get("auc"),
        f"{holdout}: ROC curve of {action}",
    )
    yield _plot(f"{action}: ROC", svg)


def _reliability(holdout: str, tree: Tree, action: str, sampled: bool) -> Iterable[dict[str, Any]]:
    bins = ((tree.get("curves") or {}).get(action) or {}).get("reliability")
    if bins:
        svg = plots.reliability(bins, f"{holdout}: calibration of {action}")
        yield _plot(f"{action}: calibration", svg, _calibration(bins, sampled))


def _plot(title: str, svg: Markup, caption: str = "") -> dict[str, Any]:
    return {"title": title, "svg": svg, "caption": caption}


def _calibration(bins: Sequence[Tree], sampled: bool) -> str:
    total = sum(item["candidates"] for item in bins)
    predicted = sum(item["predicted"] * item["candidates"] for item in bins) / total
    observed = sum(item["observed"] * item["candidates"] for item in bins) / total
    text = f"Predicted {predicted:.4f} on average, observed {observed:.4f}"
    text += f", a ratio of {predicted / observed:.3f}." if observed else "."
    text += " Bars are 95 % intervals."
    if sampled:
        text += " These are rates among the sampled candidates."
    return text
