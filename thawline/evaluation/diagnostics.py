"""Signatures of what goes wrong in training over epochs, in words.

Each is one that the reproduction met: rows that only ever saw label 0, rows that went far and are
read again, a training loss that steps down where the test loss steps up, and a model that knows
more than there is to know.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from thawline.data.manifest import TIERS
from thawline.evaluation.finding import Finding, Tree, ends, primary
from thawline.evaluation.formatting import listed

MAX_DRIFT = 3.0
"""Drift in first norms above which rows can hold the labels of single examples: capping it there
undid the decline in the reproduction, where rows without a cap had gone 14.9."""

MIN_STEP = 3.0
"""A step down of the training loss is as many times its usual change."""

MIN_FALL = 0.005
"""And at least this share of the loss."""

MIN_RISE = 0.002
"""Least rise of a test loss, in nats, that counts."""

MAX_UNDERRATED = 0.5
"""Cold items are underrated where their calibration is below this share of the warm ones'."""

FEW_POSITIVES = 50
"""Fewer positives of cold items say nothing of their rate."""


def diagnostics(
    metrics: Mapping[str, Tree],
    epochs: Sequence[Tree],
    *,
    audit: Tree | None = None,
    schedule: Tree | None = None,
) -> list[Finding]:
    """Every signature that is there.

    Args:
        metrics: Metrics tree of each hold-out.
        epochs: Entries of `epochs.json`, in order.
        audit: `audit.json`.
        schedule: `schedule.json`.
    """
    found = list(drifted(epochs, schedule))
    for holdout, tree in metrics.items():
        found += staircase(epochs, holdout)
        found += underrated(holdout, tree, audit)
        found += oracle_gap(holdout, tree)
    return found


def drifted(epochs: Sequence[Tree], schedule: Tree | None) -> Iterator[Finding]:
    """Tables whose rows have gone far from where they started, in their first norms.

    It takes both a large write and a later replay for a row to give away an example's label, so
    nothing is said where the schedule replays none.
    """
    drifts: Mapping[str, Tree] = (epochs[-1].get("drift") or {}) if epochs else {}
    for table, tiers in drifts.items():
        plan = ((schedule or {}).get("components") or {}).get(table) or {}
        share = plan.get("replayed", 0.0)
        far = [f"{tier} {tiers[tier]:.1f}" for tier in TIERS if tiers.get(tier, 0.0) > MAX_DRIFT]
        if far and share > 0:
            yield Finding(
                "warning",
                "",
                f"The {table} rows have gone far from where they started, in units of their first "
                f"norms: {listed(far)}; and {share:.0%} of the examples are seen again after their "
                "rows were written. Together these let the network read labels off the rows: lower "
                "the table's learning rate, take rowwise_adagrad or a drift cap, or let it train "
                "last.",
            )


def staircase(epochs: Sequence[Tree], holdout: str) -> Iterator[Finding]:
    """The boundary of epochs at which the training loss falls most while the test loss rises.

    The training loss steps down where the mean of an epoch's first twentieth is below that of the
    twentieth before it by `MIN_STEP` times the usual change between neighbours.
    """
    widest, text = 0.0, None
    for number in range(len(epochs) - 1):
        before, after = (
            [loss for loss in entry.get("course") or () if loss is not None]
            for entry in epochs[number : number + 2]
        )
        tested = [test_loss(entry, holdout) for entry in epochs[number : number + 2]]
        if len(before) < 2 or len(after) < 2 or None in tested:
            continue
        changes = [
            abs(later - earlier)
            for course in (before, after)
            for earlier, later in itertools.pairwise(course)
        ]
        usual = statistics.median(changes)
        fall, rise = before[-1] - after[0], (tested[1] or 0.0) - (tested[0] or 0.0)
        if fall <= max(MIN_STEP * usual, MIN_FALL * before[-1]) or rise < MIN_RISE:
            continue
        if fall > widest:
            widest = fall
            text = (
                f"Where epoch {number + 2} starts, the training loss steps down from "
                f"{before[-1]:.4f} to {after[0]:.4f} (it usually changes by {usual:.4f} in a "
                f"twentieth of an epoch), and after it the loss on {holdout} has risen from "
                f"{tested[0]:.4f} to {tested[1]:.4f}: the model recalls examples rather than "
                "learning from them."
            )
    if text:
        yield Finding("warning", holdout, text)


def test_loss(entry: Tree, holdout: str) -> float | None:
    """The pooled log loss after an epoch, summed over actions as the training loss is."""
    tree = (entry.get("metrics") or {}).get(holdout)
    losses = [figures.get("log_loss") for figures in (tree or {}).get("pooled", {}).values()]
    return sum(losses) if losses and None not in losses else None


def underrated(holdout: str, tree: Tree, audit: Tree | None) -> Iterator[Finding]:
    """Cold items that are promised far less than they get, while warm ones are not.

    This is what rows that only ever saw label 0 look like from outside; the reproduction took it
    for overfitting.
    """
    for action in tree["pooled"]:
        cold = tree["tiers"].get("cold", {}).get(action) or {}
        warm = _warm_calibration(tree, action)
        ratio = cold.get("calibration")
        if ratio is None or not warm or cold["positives"] < FEW_POSITIVES:
            continue
        bounds = ends(tree, action, "cold", "calibration") or (ratio, ratio)
        if bounds[1] >= MAX_UNDERRATED * warm:
            continue
        text = (
            f"On {holdout}, {action} of cold items is predicted {ratio:.2f} times as often as it "
            f"happens, that of warm ones {warm:.2f} times: so do rows end that fine-tuning shows "
            "with label 0 alone."
        )
        facts = _negative_rows(audit)
        if facts is not None:
            text += (
                f" There are {facts['rows']:,.0f} such rows, with {facts['share']:.1%} of its "
                f"negatives and {facts['test_share']:.1%} of the test's positives."
            )
        yield Finding("warning" if action == primary(tree) else "note", holdout, text)


def oracle_gap(holdout: str, tree: Tree) -> Iterator[Finding]:
    """How much of what can be known of a simulated log the model knows, by the primary action."""
    action = primary(tree)
    if action is None:
        return
    value = tree["pooled"][action]["auc"]
    ceiling = ((tree.get("oracle") or {}).get(action) or {}).get("auc")
    if value is None or ceiling is None or ceiling <= 0.5:
        return
    bounds = ends(tree, action, "pooled", "auc")
    if value > ceiling and (bounds is None or bounds[0] > ceiling):
        yield Finding(
            "warning",
            holdout,
            f"On {holdout}, the {action} AUC {value:.4f} is above the oracle's {ceiling:.4f}: "
            "nothing that scores honestly knows more than the true probabilities, so the hold-out "
            "leaks, or the file of events.truth is of another log.",
        )
        return
    share = [(each - 0.5) / (ceiling - 0.5) for each in (value, *(bounds or ()))]
    text = (
        f"On {holdout}, the {action} AUC goes {share[0]:.0%} of the way from chance to the "
        f"oracle's {ceiling:.4f}"
    )
    text += f" (95 % interval {share[1]:.0%} to {share[2]:.0%})." if bounds else "."
    yield Finding("note", holdout, text)


def _warm_calibration(tree: Tree, action: str) -> float | None:
    """Predicted over observed positives of the tiers that fine-tuning trains."""
    predicted = observed = 0.0
    for tier in TIERS[:-1]:
        figures = tree["tiers"].get(tier, {}).get(action) or {}
        if figures.get("calibration") is not None:
            predicted += figures["calibration"] * figures["positives"]
            observed += figures["positives"]
    return predicted / observed if observed else None


def _negative_rows(audit: Tree | None) -> Tree | None:
    for finding in (audit or {}).get("findings") or ():
        if finding["name"] == "only_negative_rows" and finding.get("figures"):
            return dict(finding["figures"])
    return None
