"""What the metrics say, in words: sentences from the JSON-able trees alone.

A figure that moved by less than `MIN_CHANGE` between two epochs is not spoken of, and one that
moved by less than its interval is wide may be noise. What training did is in `diagnostics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thawline.data.manifest import TIERS
from thawline.evaluation.diagnostics import diagnostics
from thawline.evaluation.finding import Finding, Level, Tree, ends, primary
from thawline.evaluation.formatting import listed

__all__ = ["Finding", "findings", "summary"]

MIN_CHANGE = 0.002
"""Least change of an AUC (0.2 points) that counts as up or down."""

MAX_TRIVIAL = 0.05
"""How far from 0.5 a trivial scorer may be where negatives are sampled."""

WARM = TIERS[:-1]
"""Tiers of the items that fine-tuning trains."""

HOLDOUTS = {
    "next": "the days after training",
    "in_window": "held-out users in the days of training",
}


def holdout_name(holdout: str) -> str:
    """A hold-out in words: `next (the days after training)`."""
    words = HOLDOUTS.get(holdout)
    return f"{holdout} ({words})" if words else holdout


def summary(
    metrics: Mapping[str, Tree], epochs: int, *, recipe: str | None, data_version: str | None
) -> list[str]:
    """What was trained on what, and what the primary action's pooled AUC came to.

    Args:
        metrics: Metrics tree of each hold-out.
        epochs: How many epochs were trained; 0 where that is not known.
        recipe: Name of the schedule.
        data_version: Of the dataset.
    """
    made = "Fine-tuned" if epochs or recipe else "Scored"
    made += f" with the recipe {recipe}" if recipe else ""
    made += f" for {epochs} {'epoch' if epochs == 1 else 'epochs'}" if epochs else ""
    made += f" on data version {data_version}" if data_version else ""
    sentences = [made + "."]
    for holdout, tree in metrics.items():
        action = next(iter(tree["pooled"]), None)
        if action is None:
            continue
        value = tree["pooled"][action]["auc"]
        ceiling = ((tree["oracle"] or {}).get(action) or {}).get("auc")
        words = HOLDOUTS.get(holdout)
        where = f"{holdout} ({words})" if words else holdout
        if value is None:
            sentences.append(f"On {where} the pooled {action} AUC is undefined.")
        else:
            against = "" if ceiling is None else _against(value, ceiling)
            sentences.append(f"On {where} the pooled {action} AUC is {value:.4f}{against}.")
    return sentences


def findings(
    metrics: Mapping[str, Tree],
    epochs: Sequence[Tree],
    sampled: bool,
    *,
    audit: Tree | None = None,
    schedule: Tree | None = None,
) -> list[Finding]:
    """Everything worth saying, warnings first.

    Args:
        metrics: Metrics tree of each hold-out.
        epochs: Entries of `epochs.json`, in order; they are numbered from 1.
        sampled: Whether negatives were sampled (the log holds positives only).
        audit: `audit.json`.
        schedule: `schedule.json`.
    """
    found = [
        *(item for holdout, tree in metrics.items() for item in chance(holdout, tree)),
        *(item for holdout, tree in metrics.items() for item in trivial(holdout, tree, sampled)),
        *across_epochs(epochs, metrics),
        *diagnostics(metrics, epochs, audit=audit, schedule=schedule),
    ]
    return sorted(found, key=lambda item: item.level != "warning")


def across_epochs(
    epochs: Sequence[Tree], metrics: Mapping[str, Tree] | None = None
) -> list[Finding]:
    """Disagreements and declines of every action; only the primary action's are warnings.

    A decline that a disagreement already tells of is a note, and so is what may be noise by the
    intervals of the last model's `metrics`.
    """
    found = []
    for holdout, tree in (epochs[-1].get("metrics") or {} if epochs else {}).items():
        final = (metrics or {}).get(holdout)
        for index, action in enumerate(tree["pooled"]):
            level: Level = "note" if index else "warning"
            parted = disagreement(epochs, holdout, action)
            if parted:
                tiers = [name for name in parted.moves if name != "pooled"]
                noise = _noise(final, tree, action, parted.moves, [["pooled"], tiers])
                sure: Level = "note" if noise else level
                found.append(Finding(sure, holdout, parted.text + noise))
                level = "note"
            fallen = decline(epochs, holdout, action)
            if fallen:
                noise = _noise(final, tree, action, fallen.moves, [list(fallen.moves)])
                found.append(Finding("note" if noise else level, holdout, fallen.text + noise))
    return found


class Moved(NamedTuple):
    """A sentence about AUCs that moved."""

    text: str
    moves: dict[str, float]
    """By how much, `pooled` and by tier."""


def disagreement(epochs: Sequence[Tree], holdout: str, action: str) -> Moved | None:
    """Where the pooled AUC and a warm tier's went opposite ways between two epochs.

    Looks at every step and at the whole span, and speaks of the one with the widest gap.
    """
    last = len(epochs) - 1
    spans = [(index, index + 1) for index in range(last)]
    if last > 1:
        spans.append((0, last))
    widest, found = 0.0, None
    for start, end in spans:
        values: dict[str, tuple[float, float]] = {}
        for name in ("pooled", *WARM):
            before = _auc(epochs[start], holdout, action, name)
            after = _auc(epochs[end], holdout, action, name)
            if before is not None and after is not None and abs(after - before) >= MIN_CHANGE:
                values[name] = before, after
        moves = {name: after - before for name, (before, after) in values.items()}
        pooled = moves.get("pooled", 0.0)
        opposite = [name for name, move in moves.items() if move * pooled < 0]
        gap = max((abs(moves[name] - pooled) for name in opposite), default=0.0)
        if gap > widest:
            widest = gap
            tiers = listed([f"{name} {_moved(*values[name])}" for name in opposite])
            text = (
                f"On {holdout}, from epoch {start + 1} to {end + 1}, pooled {action} AUC "
                f"{_moved(*values['pooled'])} while {tiers}: pooled and warm items point in "
                "opposite directions, so judge by the tiers."
            )
            found = Moved(text, {name: moves[name] for name in ("pooled", *opposite)})
    return found


def decline(epochs: Sequence[Tree], holdout: str, action: str) -> Moved | None:
    """Where the last epoch's AUC, pooled or of a warm tier, is below an earlier epoch's."""
    parts, moves = [], {}
    for name in ("pooled", *WARM):
        values = [_auc(entry, holdout, action, name) for entry in epochs]
        last = values[-1]
        best = max((value for value in values if value is not None), default=None)
        if last is not None and best is not None and best - last >= MIN_CHANGE:
            at = values.index(best) + 1
            parts.append(f"{name} {last:.4f} (best {best:.4f} after epoch {at})")
            moves[name] = last - best
    if not parts:
        return None
    return Moved(f"On {holdout}, {action} AUC ended below its best: {listed(parts)}.", moves)


def _noise(
    final: Tree | None,
    after_epoch: Tree,
    action: str,
    moves: Mapping[str, float],
    sides: Sequence[Sequence[str]],
) -> str:
    """What to add to a sentence that rests on noise: where all moves of one of its sides do.

    The noise of a figure after an epoch is half the width of the last model's interval, wider by
    the square root of how many fewer requests the epoch was scored on. That of a difference
    between two epochs is smaller, since the same requests are scored: this errs on the side of
    doubt.
    """
    if final is None or not after_epoch.get("requests"):
        return ""
    scale = math.sqrt(max(final["requests"] / after_epoch["requests"], 1.0))
    widths = {}
    for name in moves:
        bounds = ends(final, action, name, "auc")
        if bounds is not None:
            widths[name] = scale * (bounds[1] - bounds[0]) / 2
    within = [name for name, width in widths.items() if abs(moves[name]) <= width]
    if not any(set(side) <= set(within) for side in sides):
        return ""
    spread = listed([f"{name} \N{PLUS-MINUS SIGN}{widths[name]:.4f}" for name in within])
    return f" This may be noise: the 95 % intervals after an epoch are {spread}."


def chance(holdout: str, tree: Tree) -> list[Finding]:
    """A primary action whose AUC the interval cannot tell from 0.5, or tells to be below."""
    action = primary(tree)
    bounds = None if action is None else ends(tree, action, "pooled", "auc")
    value = tree["pooled"][action]["auc"] if action is not None else None
    if bounds is None or value is None or bounds[0] > 0.5:
        return []
    verdict = "is worse than chance" if bounds[1] < 0.5 else "cannot be told from chance"
    return [
        Finding(
            "warning",
            holdout,
            f"On {holdout}, the {action} AUC ({value:.4f}) {verdict}: its 95 % interval is "
            f"{bounds[0]:.4f} to {bounds[1]:.4f}.",
        )
    ]


def trivial(holdout: str, tree: Tree, sampled: bool) -> list[Finding]:
    """Trivial scorers that tell positives from negatives too well.

    With sampled negatives, one that is more than `MAX_TRIVIAL` from 0.5 means that the sampler
    leaks. With impressions, one is worth a word only if the model is no better. What is nearer to
    0.5 than half the width of the model's interval may be noise, and beats nothing.
    """
    action = primary(tree)
    model = tree["pooled"][action]["auc"] if action is not None else None
    bounds = None if action is None else ends(tree, action, "pooled", "auc")
    noise = 0.0 if bounds is None else (bounds[1] - bounds[0]) / 2
    strength = {
        name: abs(value - 0.5) for name, value in tree["trivial"].items() if value is not None
    }
    names = {name: f"{name} ({tree['trivial'][name]:.4f})" for name in strength}
    found = []
    leaks = [names[name] for name in strength if sampled and strength[name] > MAX_TRIVIAL]
    if leaks:
        found.append(
            Finding(
                "warning",
                holdout,
                f"On {holdout}, knowing next to nothing is enough to tell the sampled negatives "
                f"from the positives: the AUC of {listed(leaks)} is more than {MAX_TRIVIAL:g} from "
                "0.5, so the model's figures are flattered. Try another negatives.popularity or "
                "negatives.alpha.",
            )
        )
    rivals = [
        names[name]
        for name in strength
        if model is not None and strength[name] > max(model - 0.5, noise)
    ]
    if rivals:
        found.append(
            Finding(
                "warning",
                holdout,
                f"On {holdout}, {listed(rivals)} {'tells' if len(rivals) == 1 else 'tell'} "
                f"positives from negatives better than the model ({model:.4f}): farther from 0.5, "
                "whichever way.",
            )
        )
    return found


def slice_auc(tree: Tree, action: str, name: str) -> float | None:
    """AUC of an action in a metrics tree, `pooled` or of a tier."""
    heads = tree["pooled"] if name == "pooled" else tree["tiers"].get(name, {})
    value: float | None = heads.get(action, {}).get("auc")
    return value


def _auc(entry: Tree, holdout: str, action: str, name: str) -> float | None:
    tree = (entry.get("metrics") or {}).get(holdout)
    return None if tree is None else slice_auc(tree, action, name)


def _moved(before: float, after: float) -> str:
    verb = "rose" if after > before else "fell"
    return f"{verb} from {before:.4f} to {after:.4f}"


def _against(value: float, ceiling: float) -> str:
    side = "below" if value <= ceiling else "above"
    return f", {abs(ceiling - value):.4f} {side} the oracle's {ceiling:.4f}"
