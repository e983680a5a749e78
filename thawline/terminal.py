"""Tables of metrics for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from thawline.config import Config

PIECES = ("pooled", "head", "torso", "tail", "cold")


def _auc_table(title: str, texts: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _aucs(tree: dict[str, Any], action: str) -> list[str]:
    slices = [tree["pooled"], *(tree["tiers"].get(piece, {}) for piece in PIECES[1:])]
    return [_percent(piece.get(action, {}).get("auc")) for piece in slices]


def metrics_table(metrics: dict[str, Any]) -> Table:
    """AUC of each hold-out and action, pooled and by tier, beside the oracle's."""
    table = _auc_table("AUC by hold-out and tier", ("hold-out", "action"), (*PIECES, "oracle"))
    for holdout, tree in metrics.items():
        for action in tree["pooled"]:
            oracle = (tree["oracle"] or {}).get(action, {}).get("auc")
            table.add_row(holdout, action, *_aucs(tree, action), _percent(oracle))
    return table


def figures_table(metrics: dict[str, Any]) -> Table:
    """What else is known of each hold-out and action, pooled; 80 columns wide.

    The interval is the 95 % one of the AUC, over users; `user` is the mean AUC within users, NE the
    normalized entropy.
    """
    figures = ("AUC 95 %", "user", "NE", "calib.", "ECE", "HIT", "NDCG", "MRR")
    table = _auc_table("Pooled figures", ("hold-out", "action"), figures)
    for holdout, tree in metrics.items():
        ends = (tree.get("intervals") or {}).get("pooled") or {}
        for action, own in tree["pooled"].items():
            low, high = (ends.get(action) or {}).get("auc") or (None, None)
            at_k = {name.partition("@")[0]: value for name, value in own.items()}
            table.add_row(
                holdout,
                action,
                ""
                if low is None
                else f"{_percent(low, digits=1)}\N{EN DASH}{_percent(high, digits=1)}",
                _percent(own.get("user_auc"), digits=1),
                *(_decimal(own.get(name)) for name in ("normalized_entropy", "calibration", "ece")),
                *(_percent(at_k.get(name), digits=1) for name in ("hit", "ndcg", "mrr")),
            )
    return table


def epoch_table(settings: Config, epochs: list[dict[str, Any]]) -> Table:
    """AUC by tier after each epoch, and how far the item rows have drifted; 80 columns wide."""
    title = f"{settings.finetune.recipe}: AUC after each epoch"
    drifts = [epoch.get("drift", {}).get("item", {}) for epoch in epochs]
    if any(value for drift in drifts for value in drift.values()):
        title += ", drift of item rows (% of first norm)"
    table = _auc_table(title, ("epoch", "table", "hold-out", "action"), ("loss", *PIECES))
    for epoch, drift in zip(epochs, drifts, strict=True):
        number, share = str(epoch["epoch"] + 1), f"{epoch['trained']['item']:.0%}"
        loss = f"{epoch['losses']['total']:.4f}"
        for name, metrics in ((number, epoch["metrics"]), ("repair", epoch.get("repaired", {}))):
            for holdout, tree in metrics.items():
                for action in tree["pooled"]:
                    table.add_row(name, share, holdout, action, loss, *_aucs(tree, action))
            if name == number and any(drift.values()):
                moved = [_percent(drift.get(piece), digits=1) for piece in PIECES[1:]]
                table.add_row(name, share, "drift", "", loss, "", *moved)
    return table


def _percent(value: float | None, *, digits: int = 2) -> str:
    return "\N{EN DASH}" if value is None else f"{100 * value:.{digits}f}"


def _decimal(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.3f}"
