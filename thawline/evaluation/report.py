"""The report: one self-contained HTML page, made from `evaluation.json` alone.

Words come from `findings`, drawings from `plots`, the page from `report.html.j2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from thawline.data.manifest import TIERS, Window
from thawline.evaluation import findings, plots, schedule

UNDEFINED = "\N{EN DASH}"

Tree = Mapping[str, Any]


def write_report(path: str | Path, evaluation: Tree) -> None:
    """Writes the page to `path` as UTF-8.

    Args:
        path: The file, usually `report.html`.
        evaluation: What `evaluation.json` holds. Every key but `metrics` may be absent:

            - `metrics`: the metrics tree of each hold-out (`metrics.holdout_metrics`), with
              `metrics.holdout_curves` under the key `curves` where ROC and calibration are wanted.
            - `title`: the heading, usually the model's name.
            - `passed`, `reasons`: the gate's verdict.
            - `epochs`: entries of `epochs.json` in order, with `metrics` and, where known, `losses`
              by objective, `seconds`, `trained` (share of the epoch in which each component
              trained) and `drift` (by ID table and tier).
            - `schedule`: `schedule.json` of the model folder.
            - `model`: `model.json`.
            - `dataset`: `manifest.json`.
            - `audit`: `audit.json`.
            - `facts`: what else to say about the run, by name, in order.
            - `timings`: seconds by stage or step, in order.
            - `config`: the config as YAML text, folded away at the end.
    """
    Path(path).write_text(render_report(evaluation), encoding="utf-8")


def render_report(evaluation: Tree) -> str:
    """The page as text; see `write_report`."""
    metrics: Mapping[str, Tree] = evaluation["metrics"]
    epochs: Sequence[Tree] = evaluation.get("epochs") or ()
    dataset: Tree | None = evaluation.get("dataset")
    model: Tree = evaluation.get("model") or {}
    planned: Tree | None = evaluation.get("schedule")
    windows = schedule.item_windows(planned) if planned else []
    sampled = dataset is not None and not dataset["impressions"]
    found = findings.findings(metrics, epochs, sampled)
    template = _environment().from_string(
        resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=evaluation.get("title") or "Ranker",
        summary=findings.summary(
            metrics,
            len(epochs),
            recipe=model.get("recipe"),
            data_version=model.get("data_version") or (dataset or {}).get("data_version"),
        ),
        findings=[finding for finding in found if finding.level == "warning"],
        passed=evaluation.get("passed"),
        reasons=evaluation.get("reasons") or (),
        tiles=_tiles(metrics),
        holdouts=[
            _holdout(name, tree, epochs, windows, sampled)
            | {
                "notes": [item for item in found if item.level == "note" and item.holdout == name],
            }
            for name, tree in metrics.items()
        ],
        epochs=[_epoch(index, entry) for index, entry in enumerate(epochs, start=1)],
        epoch_heads=_epoch_heads(epochs),
        shaded=bool(windows),
        timeline=schedule.timeline(planned) if planned else None,
        exposure=schedule.words(planned) if planned else (),
        drifts=schedule.drifts(epochs),
        tiers=TIERS,
        losses=list(epochs[-1].get("losses") or {}) if epochs else [],
        facts=_facts(model) | dict(evaluation.get("facts") or {}),
        dataset=_dataset(dataset) if dataset else None,
        audit=(evaluation.get("audit") or {}).get("findings") or (),
        sampled=sampled,
        max_trivial=findings.MAX_TRIVIAL,
        timings=evaluation.get("timings") or {},
        config=evaluation.get("config") or "",
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(figure=_figure, count=_count, duration=_duration)
    return environment


def _tiles(metrics: Mapping[str, Tree]) -> list[dict[str, Any]]:
    """The primary action's pooled AUC on each hold-out, with the oracle's and the tiers'."""
    tiles = []
    for holdout, tree in metrics.items():
        action = next(iter(tree["pooled"]), None)
        if action is None:
            continue
        oracle = (tree["oracle"] or {}).get(action) or {}
        tiles.append(
            {
                "holdout": holdout,
                "action": action,
                "auc": tree["pooled"][action]["auc"],
                "oracle": oracle.get("auc"),
                "tiers": {tier: tree["tiers"][tier][action]["auc"] for tier in TIERS},
            }
        )
    return tiles


def _holdout(
    holdout: str,
    tree: Tree,
    epochs: Sequence[Tree],
    windows: Sequence[tuple[float, float]],
    sampled: bool,
) -> dict[str, Any]:
    heads = [
        _head(tree, action) | {"by_epoch": _by_epoch(holdout, action, epochs, windows)}
        for action in tree["pooled"]
    ]
    primary = heads[0]["action"] if heads else None
    return {
        "name": holdout,
        "words": findings.HOLDOUTS.get(holdout, ""),
        "requests": tree["requests"],
        "primary": primary,
        "heads": heads,
        "undefined": any(
            value is None for head in heads for row in head["rows"] for value in row["figures"]
        ),
        "epoch_requests": _epoch_requests(holdout, epochs),
        "score_plots": _score_plots(holdout, tree, primary, sampled),
        "model_auc": tree["pooled"][primary]["auc"] if heads else None,
        "trivial": tree["trivial"],
    }


def _head(tree: Tree, action: str) -> dict[str, Any]:
    """One action's table: a row for all candidates, each tier and the oracle."""
    slices: dict[str, Tree] = {"pooled": tree["pooled"][action]}
    slices |= {tier: tree["tiers"][tier][action] for tier in TIERS}
    if tree["oracle"] and action in tree["oracle"]:
        slices["oracle"] = tree["oracle"][action]
    hit = next(key for key in tree["pooled"][action] if key.startswith("hit@"))
    return {
        "action": action,
        "hit": hit.upper(),
        "rows": [
            {
                "slice": name,
                "figures": [values["auc"], values["log_loss"], values[hit]],
                "positives": values["positives"],
                "candidates": values["candidates"],
            }
            for name, values in slices.items()
        ],
    }


def _by_epoch(
    holdout: str, action: str, epochs: Sequence[Tree], windows: Sequence[tuple[float, float]]
) -> Markup | None:
    """Curves of an action's AUC; None where no epoch was scored or no AUC is defined."""
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
        return None
    return plots.auc_by_epoch(
        series,
        [index for index, _ in scored],
        windows,
        f"{holdout}: AUC of {action} after each epoch, pooled and by tier",
    )


def _epoch_requests(holdout: str, epochs: Sequence[Tree]) -> int | None:
    for entry in epochs:
        tree = (entry.get("metrics") or {}).get(holdout)
        if tree:
            return int(tree["requests"])
    return None


def _score_plots(
    holdout: str, tree: Tree, action: str | None, sampled: bool
) -> list[dict[str, Any]]:
    curve = (tree.get("curves") or {}).get(action)
    if curve is None:
        return []
    drawn: list[dict[str, Any]] = []
    if curve["roc"] is not None:
        oracle = (tree["oracle"] or {}).get(action) or {}
        svg = plots.roc(
            curve["roc"],
            tree["pooled"][action]["auc"],
            curve["oracle_roc"],
            oracle.get("auc"),
            f"{holdout}: ROC curve of {action}",
        )
        drawn.append({"title": f"ROC of {action}", "svg": svg, "caption": ""})
    bins = curve["reliability"]
    if bins:
        svg = plots.reliability(bins, f"{holdout}: calibration of {action}")
        drawn.append(
            {
                "title": f"Calibration of {action}",
                "svg": svg,
                "caption": _calibration(bins, sampled),
            }
        )
    return drawn


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


def _schedule_word(entry: Tree) -> str:
    """Whether the item table trained in an epoch, or for which share of it."""
    share = (entry.get("trained") or {}).get("item")
    if not share:
        return "frozen"
    return "trains" if share >= 1 else f"trains {share:.0%}"


def _epoch(index: int, entry: Tree) -> dict[str, Any]:
    return {
        "number": index,
        "schedule": _schedule_word(entry),
        "losses": entry.get("losses") or {},
        "seconds": entry.get("seconds"),
        "metrics": entry.get("metrics") or {},
    }


def _epoch_heads(epochs: Sequence[Tree]) -> list[tuple[str, str]]:
    """Pairs of hold-out and primary action that the table of epochs has a column for."""
    last = (epochs[-1].get("metrics") or {}) if epochs else {}
    return [(holdout, next(iter(tree["pooled"]))) for holdout, tree in last.items()]


def _facts(model: Tree) -> dict[str, Any]:
    names = ("recipe", "epochs", "seed", "data_version", "num_rows", "thawline_version")
    facts = {name: model[name] for name in names if name in model}
    shape = model.get("model")
    if isinstance(shape, Mapping):
        facts["network"] = ", ".join(f"{key} {value}" for key, value in shape.items())
    return facts


def _dataset(manifest: Tree) -> dict[str, Any]:
    by_day = manifest["requests_by_day"]
    test = Window.model_validate(manifest["test"])
    drawn = plots.requests_by_day(by_day, [str(day) for day in test.days()]) if by_day else None
    return {**manifest, "plot": drawn}


def _figure(value: float | None) -> str:
    return UNDEFINED if value is None or not math.isfinite(value) else f"{value:.4f}"


def _count(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNDEFINED
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
