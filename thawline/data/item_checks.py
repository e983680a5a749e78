"""Checks of what a model would see of each item: positives, sampled negatives, and its own past."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from sklearn.metrics import roc_auc_score

from thawline.config import Negatives
from thawline.data.findings import Finding, Severity
from thawline.data.manifest import FIRST_ROW, TIERS, Dataset, Window
from thawline.data.negatives import NegativeSampler
from thawline.data.popularity import Popularity
from thawline.data.request_checks import Counts
from thawline.data.spans import span_of

MAX_NEGATIVE_SHARE = 0.1
"""Share of sampled negatives on rows that are never positive above which a warning is due."""

MAX_NEGATIVE_EXCESS = 0.5
"""How far that share may be above the same rows' share of the test's positives: 0.5 lets a scorer
that knows no more than whether a row was ever positive reach an AUC of 0.75."""

MAX_TRIVIAL = 0.05
"""How far from 0.5 a trivial scorer's AUC may be where negatives are sampled."""

MAX_EXPOSED = {"never_trained": 0.25, "item_age": 0.35}
"""How far that of a scorer may be before it is an error: what these two know is no taste of a user,
but what the sampler did. A popularity scores well wherever `negatives.alpha` is below 1."""

MAX_DRIFT = 0.5
"""Total variation distance between the popularity of two windows above which a warning is due."""

FEW_POSITIVES = 50
"""Fewer positives of a tier in the test leave its AUC to chance."""


def catalogue_leak(negatives: Negatives, impressions: bool) -> Finding:
    """Whether the config lets the sampler draw from the future."""
    figures = {"on": float(negatives.catalogue_leak)}
    if not negatives.catalogue_leak:
        text = "negatives.catalogue_leak is off."
        return Finding(name="catalogue_leak", severity="info", text=text, figures=figures)
    if impressions:
        text = "negatives.catalogue_leak is on, but the log's own impressions are the negatives."
        remedy = "drop negatives.catalogue_leak"
        return Finding(
            name="catalogue_leak", severity="warning", text=text, remedy=remedy, figures=figures
        )
    return Finding(
        name="catalogue_leak",
        severity="error",
        text="negatives.catalogue_leak is on: negatives are drawn from every item of the log, "
        "those of the future too, which a model learns to tell without any taste of a user.",
        remedy="drop negatives.catalogue_leak",
        figures=figures,
    )


def only_negative_rows(
    train: Counts, test: Counts, sampler: NegativeSampler | None
) -> list[Finding]:
    """Rows that training would see with label 0 alone, and rows drawn before they existed."""
    never = train.positive == 0
    positives = max(int(test.positive.sum()), 1)
    in_test = float(test.positive[never].sum() / positives)
    if sampler is None:
        shown = never & (train.shown > 0)
        share = float(train.shown[shown].sum() / max(train.shown.sum(), 1))
        figures = {"rows": int(shown.sum()), "share": share, "test_share": in_test}
        text = (
            f"{shown.sum():,} items are shown in the fine-tune window and never get an action: "
            f"{share:.1%} of its impressions. Items without an action there have {in_test:.1%} of "
            "the test's positives."
        )
        return [Finding(name="only_negative_rows", severity="info", text=text, figures=figures)]
    expected, _ = sampler.expected_draws(train.timestamp)
    drawn = never & (expected >= 1.0)
    share = float(expected[never].sum() / max(expected.sum(), 1e-300))
    figures = {"rows": int(drawn.sum()), "share": share, "test_share": in_test}
    severity: Severity = "info"
    if share - in_test > MAX_NEGATIVE_EXCESS:
        severity = "error"
    elif share > MAX_NEGATIVE_SHARE:
        severity = "warning"
    found = Finding(
        name="only_negative_rows",
        severity=severity,
        text=f"{drawn.sum():,} items are drawn as negatives in the fine-tune window, once an epoch "
        f"or more, and never positive: {share:.1%} of its negatives fall on such items, but "
        f"{in_test:.1%} of the test's positives.",
        remedy="" if severity == "info" else _MORE_RECENT,
        figures=figures,
    )
    return [found, _future_negatives(train, test, sampler)]


_MORE_RECENT = (
    "let negatives follow what is popular at the time: negatives.popularity: decayed with a "
    "half_life_hours as short as an item's life, or a higher negatives.alpha"
)


def _future_negatives(train: Counts, test: Counts, sampler: NegativeSampler) -> Finding:
    """Whether the sampler can draw an item at a time when it had not been seen."""
    _, early = sampler.expected_draws(np.concatenate([train.timestamp, test.timestamp]))
    expected, _ = sampler.expected_draws(train.timestamp)
    # Rows of the test alone, drawn in training.
    only_test = (train.positive + train.shown == 0) & (test.positive > 0)
    figures = {
        "rows": int((early > 0).sum()),
        "draws": float(early.sum()),
        "test_rows": int((only_test & (early > 0) & (expected > 0)).sum()),
    }
    if not early.any():
        text = "No negative can be drawn before its item was first seen."
        return Finding(name="future_negatives", severity="info", text=text, figures=figures)
    return Finding(
        name="future_negatives",
        severity="error",
        text=f"{figures['rows']:,} items can be drawn before they were first seen, "
        f"{early.sum():,.0f} times an epoch; {figures['test_rows']:,} of them are positive in the "
        "test alone.",
        remedy="drop negatives.catalogue_leak, or build the dataset again with `thawline windows`",
        figures=figures,
    )


def trivial_scorers(scores: Mapping[str, np.ndarray], labels: np.ndarray, sampled: bool) -> Finding:
    """The AUC on the test of scorers that know next to nothing.

    Args:
        scores: Scorer to [K] of the candidates.
        labels: [K], of the primary action.
        sampled: Whether negatives were sampled.
    """
    figures = {}
    if 0 < labels.sum() < len(labels):
        figures = {name: float(roc_auc_score(labels, each)) for name, each in scores.items()}
    listed = ", ".join(f"{name} {value:.3f}" for name, value in figures.items()) or "undefined"
    text = f"AUC of scorers that know next to nothing, on the test: {listed}."
    far = [name for name, value in figures.items() if abs(value - 0.5) > MAX_TRIVIAL]
    if not sampled or not far:
        return Finding(name="trivial_scorers", severity="info", text=text, figures=figures)
    exposed = any(abs(figures[name] - 0.5) > limit for name, limit in MAX_EXPOSED.items())
    return Finding(
        name="trivial_scorers",
        severity="error" if exposed else "warning",
        text=f"{text} Negatives are sampled, so {' and '.join(far)} should be near 0.5.",
        remedy=_MORE_RECENT,
        figures=figures,
    )


def tier_sizes(dataset: Dataset, test: Counts) -> Finding:
    """How many items and positives of the test each tier has."""
    tier = np.concatenate([np.full(FIRST_ROW, TIERS.index("cold"), np.int8), dataset.catalog.tier])
    figures = {}
    for index, name in enumerate(TIERS):
        figures[f"{name}_items"] = int((dataset.catalog.tier == index).sum())
        figures[f"{name}_positives"] = int(test.positive[tier == index].sum())
    listed = ", ".join(
        f"{name} {figures[f'{name}_items']:,} ({figures[f'{name}_positives']:,})" for name in TIERS
    )
    text = f"Items by tier (positives in the test): {listed}."
    few = [name for name in TIERS if figures[f"{name}_positives"] < FEW_POSITIVES]
    if not few:
        return Finding(name="tier_sizes", severity="info", text=text, figures=figures)
    return Finding(
        name="tier_sizes",
        severity="warning",
        text=f"{text} Fewer than {FEW_POSITIVES} positives leave a tier's figures to chance: "
        f"{', '.join(few)}.",
        remedy="change windows.tiers, or take more test days",
        figures=figures,
    )


def batch_overlap(rows: Iterable[np.ndarray]) -> Finding:
    """Which share of a batch's items the batch before has read too.

    A lookup that runs one update ahead reads these items before that update.

    Args:
        rows: Of consecutive batches, any shape; rows below `FIRST_ROW` do not count.
    """
    shares = []
    before: np.ndarray | None = None
    for each in rows:
        unique = np.unique(each)
        unique = unique[unique >= FIRST_ROW]
        if before is not None and len(unique):
            shares.append(float(np.isin(unique, before, assume_unique=True).mean()))
        before = unique
    if not shares:
        text = "There are no two batches to compare."
        return Finding(name="batch_overlap", severity="info", text=text)
    mean = float(np.mean(shares))
    return Finding(
        name="batch_overlap",
        severity="info",
        text=f"{mean:.1%} of the items of a batch are in the batch before it too "
        f"(mean of {len(shares):,} pairs): a lookup ahead of the update reads these one step old.",
        figures={"share": mean, "batches": len(shares) + 1},
    )


def popularity_drift(dataset: Dataset) -> Finding:
    """How far the popularity of items moves from one window to the next.

    Total variation distance of the items' shares of positives: 0 for the same shares, 1 for no
    item in common.
    """
    manifest, popularity = dataset.manifest, Popularity.read(dataset)

    def shares(window: Window) -> np.ndarray:
        start, stop = span_of(window)
        inside = (popularity.start >= start) & (popularity.start < stop)
        counts = np.bincount(
            popularity.row[inside], popularity.count[inside], dataset.catalog.num_rows
        )
        return counts / max(counts.sum(), 1)

    pretrain, finetune, test = map(shares, (manifest.pretrain, manifest.finetune, manifest.test))
    figures = {
        "pretrain_to_finetune": float(np.abs(pretrain - finetune).sum() / 2),
        "finetune_to_test": float(np.abs(finetune - test).sum() / 2),
        "unseen_in_finetune": float(test[finetune == 0].sum()),
    }
    text = (
        "Popularity moved by {pretrain_to_finetune:.2f} from the pretraining to the fine-tune "
        "window and by {finetune_to_test:.2f} from there to the test (total variation, 0 to 1); "
        "{unseen_in_finetune:.1%} of the test's positives are on items without one in the "
        "fine-tune window."
    ).format(**figures)
    if max(figures["pretrain_to_finetune"], figures["finetune_to_test"]) <= MAX_DRIFT:
        return Finding(name="popularity_drift", severity="info", text=text, figures=figures)
    return Finding(
        name="popularity_drift",
        severity="warning",
        text=text,
        remedy="take shorter windows, windows.pretrain_overlap, or a half-life for the negatives",
        figures=figures,
    )
