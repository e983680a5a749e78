"""The report: one self-contained HTML page, made from `evaluation.json` alone.

Hold-outs are in `report_holdout`, the gate and the champion in `report_verdict`, words on the
metrics in `findings`, what words mean in `legend`, drawings in `plots`, `epoch_plots` and `dots`,
the page in `report*.j2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from thawline.data.manifest import TIERS, Window
from thawline.evaluation import (
    dots,
    epoch_plots,
    findings,
    formatting,
    plots,
    report_holdout,
    report_verdict,
    schedule,
)
from thawline.evaluation.diagnostics import test_loss
from thawline.evaluation.finding import primary
from thawline.evaluation.legend import legend

Tree = Mapping[str, Any]


def write_report(path: str | Path, evaluation: Tree) -> None:
    """Writes the page to `path` as UTF-8.

    Args:
        path: The file, usually `report.html`.
        evaluation: What `evaluation.json` holds. Every key but `metrics` may be absent:

            - `metrics`: the metrics tree of each hold-out (`metrics.holdout_metrics`), with
              `metrics.holdout_curves` under the key `curves` where ROC and calibration are wanted.
            - `title`: the heading, usually the model's name.
            - `passed`, `reasons`: the gate's verdict; `gate`: its rules.
            - `champion`: the comparison with it; None where there is none.
            - `epochs`: entries of `epochs.json` in order, with `metrics` and, where known, `losses`
              by objective, `course` (the head's within the epoch), `seconds`, `phases`, `trained`
              (share of the epoch in which each component trained) and `drift` (by ID table and
              tier).
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
    tracks = schedule.tracks(planned, tables_only=True) if planned else []
    sampled = dataset is not None and not dataset["impressions"]
    found = findings.findings(
        metrics, epochs, sampled, audit=evaluation.get("audit"), schedule=planned
    )
    champion: Tree | None = evaluation.get("champion")
    action = next(filter(None, map(primary, metrics.values())), None)
    happened = findings.summary(
        metrics,
        len(epochs),
        recipe=model.get("recipe"),
        data_version=_short(model.get("data_version") or (dataset or {}).get("data_version")),
    )
    if dataset is not None and dataset.get("weighted"):
        happened.append("Requests count by the weights that the log gives them.")
    better = report_verdict.is_better(evaluation, list(metrics), action)
    worries = [
        *report_verdict.worries(evaluation, sampled=sampled),
        *(finding.text for finding in found if finding.level == "warning"),
    ]
    tiles = [tile for name, tree in metrics.items() if (tile := report_holdout.tile(name, tree))]
    beside = ["AUC, pooled, head"] * bool(tiles)
    beside += ["oracle"] * any(tile["oracle"] is not None for tile in tiles)
    rules = report_verdict.gate_view(evaluation.get("gate"))
    beside += [str(rule["status"]) for rule in rules]
    return _template().render(
        title=evaluation.get("title") or "Ranker",
        happened=happened,
        better=better,
        worries=worries,
        legend=legend([*happened, *better, *worries, *beside]),
        passed=evaluation.get("passed"),
        reasons=evaluation.get("reasons") or (),
        rules=rules,
        champion=report_verdict.champion_view(champion, action) if champion else None,
        tiles=tiles,
        holdouts=[
            report_holdout.holdout_view(name, tree, epochs, windows, tracks, sampled=sampled)
            | {"notes": [item for item in found if item.level == "note" and item.holdout == name]}
            for name, tree in metrics.items()
        ],
        epochs=[_epoch(index, entry) for index, entry in enumerate(epochs, start=1)],
        epoch_heads=_epoch_heads(epochs),
        shaded=bool(windows),
        stairs=_stairs(epochs, windows, planned),
        timeline=schedule.timeline(planned) if planned else None,
        exposure=schedule.words(planned) if planned else (),
        drifts=schedule.drifts(epochs),
        tiers=TIERS,
        losses=list(epochs[-1].get("losses") or {}) if epochs else [],
        facts=_facts(model) | dict(evaluation.get("facts") or {}),
        dataset=_dataset(dataset) if dataset else None,
        audit=(evaluation.get("audit") or {}).get("findings") or (),
        sampled=sampled,
        thin=dots.THIN,
        max_trivial=findings.MAX_TRIVIAL,
        timings=dict(evaluation.get("timings") or {}) | _training_times(epochs),
        config=evaluation.get("config") or "",
        terms=formatting.TERMS,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.PackageLoader("thawline", "evaluation"),
    )
    environment.filters.update(
        figure=formatting.figure, count=formatting.count, duration=formatting.duration
    )
    return environment.get_template("report.html.j2")


def _short(version: str | None) -> str | None:
    return version and version[: report_verdict.SHORT]


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


def _stairs(
    epochs: Sequence[Tree], windows: Sequence[tuple[float, float]], planned: Tree | None
) -> Markup | None:
    """Training and test losses, each a sum over actions; None where no training loss is known."""
    trained = [entry.get("course") or [(entry.get("losses") or {}).get("head")] for entry in epochs]
    if all(loss is None for parts in trained for loss in parts):
        return None
    names = dict.fromkeys(name for entry in epochs for name in entry.get("metrics") or {})
    return epoch_plots.losses_by_epoch(
        trained,
        {name: [test_loss(entry, name) for entry in epochs] for name in names},
        windows,
        "Training loss within each epoch, and the loss on each hold-out after it",
        schedule.tracks(planned, tables_only=True) if planned else (),
    )


def _training_times(epochs: Sequence[Tree]) -> dict[str, float]:
    """Seconds of fine-tuning in all and by phase of a step."""
    seconds = [entry["seconds"] for entry in epochs if entry.get("seconds") is not None]
    if not seconds:
        return {}
    what = f"fine-tuning, {len(seconds)} epoch{'s' if len(seconds) > 1 else ''}"
    shared = sum(bool(entry.get("shared")) for entry in epochs)
    if shared:
        what += f", {shared} of them shared with other trials"
    times = {what: sum(seconds)}
    for entry in epochs:
        for phase, own in (entry.get("phases") or {}).items():
            name = f"of which {phase}"
            times[name] = times.get(name, 0.0) + own
    return times


def _facts(model: Tree) -> dict[str, Any]:
    names = (
        "recipe",
        "epochs",
        "exported_epoch",
        "seed",
        "staleness",
        "accumulation",
        "data_version",
        "num_rows",
        "thawline_version",
    )
    facts = {name: model[name] for name in names if model.get(name) not in (None, "")}
    shape = model.get("model")
    if isinstance(shape, Mapping):
        facts["network"] = ", ".join(f"{key} {value}" for key, value in shape.items())
    return facts


def _dataset(manifest: Tree) -> dict[str, Any]:
    by_day = manifest["requests_by_day"]
    test = Window.model_validate(manifest["test"])
    drawn = plots.requests_by_day(by_day, [str(day) for day in test.days()]) if by_day else None
    return {**manifest, "plot": drawn}
