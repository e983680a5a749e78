"""The study's page: arms beside their baselines by hold-out and tier, and when each one trains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa

from thawline.evaluation import formatting, schedule
from thawline.evaluation.dots import Dot, Scale, dot_plot
from thawline.study.comparison import LEVEL, decided
from thawline.study.experiments import EXPERIMENTS, Experiment, Section
from thawline.study.explorer import explorer_section
from thawline.study.grid import ARM, as_text

REPORT = "study.html"
FOLDED = ("auc", "user_auc", "log_loss", "normalized_entropy", "calibration", "drift", "seconds")
"""Figures of all actions and slices that the page holds folded away; the Parquet file has all."""
LEAST_PAIRS = 3
"""Fewer make an interval that says nothing and hides the rest of the plot."""
DECIDING = 6
"""The least pairs with which the sign-flip test can come under 0.05."""

Tree = Mapping[str, Any]


def write_report(
    path: Path, facts: Tree, rows: Sequence[Tree], table: pa.Table | None = None
) -> None:
    """Writes the page to `path`; see `render`."""
    path.write_text(render(facts, rows, table), encoding="utf-8")


def render(facts: Tree, rows: Sequence[Tree], table: pa.Table | None = None) -> str:
    """The page as text, self-contained.

    Args:
        facts: `study.json`.
        rows: Of `comparison.compare_arms`.
        table: `trials.parquet`, for the explorer; None: the page has none.
    """
    metric, action = facts["metric"], facts["action"]
    told = [row for row in rows if (row["figure"], row["action"]) == (metric, action)]
    shown = [row for row in told if not row["contrast"]]
    failed = [trial for trial in facts["trials"] if trial["status"] == "failed"]
    size = f"{len(facts['arms'])} arms, {_seeds(facts)}"
    experiment = EXPERIMENTS.get(facts.get("experiment", ""))
    return _template().render(
        title=experiment.title if experiment else size,
        experiment=experiment,
        sections=_sections(experiment, facts, rows, table),
        explorer="" if table is None else explorer_section([("this study", facts, table)]),
        happened=_happened(facts),
        found=summary(facts, rows),
        worries=_worries(facts, rows, failed, experiment),
        metric=formatting.label(metric),
        action=action,
        holdouts=[
            {"name": name, "parts": _parts([row for row in shown if row["holdout"] == name])}
            for name in dict.fromkeys(row["holdout"] for row in shown)
        ],
        contrasts=_contrasts(facts, [row for row in told if row["contrast"]]),
        others=_others(rows),
        arms=_arms(facts["arms"]),
        timelines=_timelines(facts["arms"]),
        failed=failed,
        store=facts.get("store", ""),
        trials=[
            {**trial, "time": formatting.duration(trial["seconds"]), "epochs": _epochs(trial)}
            for trial in facts["trials"]
        ],
        facts={
            "data version": _versions(facts) or formatting.DASH,
            "pretrained rows": "shared by the seeds" if facts["pretrain"] == "once" else "by seed",
            **{
                f"grid: {key}": ", ".join(map(as_text, values))
                for key, values in facts["grid"].items()
            },
            "seeds": ", ".join(map(str, facts["seeds"])),
        },
    )


def main_rows(facts: Tree, rows: Sequence[Tree]) -> list[Tree]:
    """The rows of the study's own metric, of all candidates of its hold-out.

    One an arm, then one a contrast.
    """
    key = (facts["holdout"], facts["action"], "pooled", facts["metric"])
    return [row for row in rows if _key(row) == key]


def summary(facts: Tree, rows: Sequence[Tree]) -> list[str]:
    """What the study's own metric says, an arm or a contrast a sentence."""
    figure = f"{facts['action']} {formatting.label(facts['metric'])} on {facts['holdout']}"
    sentences = []
    for row in main_rows(facts, rows):
        if row["contrast"]:
            sentences.append(
                f"{row['arm']}: {formatting.signed(row['mean'])} {facts['action']} "
                f"{formatting.label(facts['metric'])} on {facts['holdout']}: {row['words']}."
            )
            continue
        text = f"{row['arm']}: {figure} {formatting.figure(row['mean'])}"
        if row["sd"] is not None:
            text += f" (sd {formatting.figure(row['sd'])} over {row['seeds']} seeds)"
        if row["baseline"] is None:
            sentences.append(f"{text}, the baseline.")
        elif row["difference"] is None:
            sentences.append(f"{text}; no pair of seeds with {row['baseline']}.")
        else:
            sentences.append(
                f"{text}, {formatting.signed(row['difference'])} against {row['baseline']}: "
                f"{row['words']}."
            )
    return sentences


def _sections(
    experiment: Experiment | None, facts: Tree, rows: Sequence[Tree], table: pa.Table | None
) -> list[Section]:
    """What an experiment says of its own figures."""
    if experiment is None or experiment.page is None or table is None:
        return []
    return experiment.page(facts, table, rows)


def _happened(facts: Tree) -> list[str]:
    states = [trial["status"] for trial in facts["trials"]]
    sentences = [
        f"{states.count('finished')} trials finished"
        + (f", {states.count('failed')} failed" if "failed" in states else "")
        + f": {len(facts['arms'])} arms, {_seeds(facts)}."
    ]
    if missing := _missing(facts):
        sentences.append(
            f"{missing} more {'has' if missing == 1 else 'have'} not been run to the end; the same "
            "command goes on."
        )
    shared = sum(trial.get("shared_epochs") or 0 for trial in facts["trials"])
    if shared:
        epochs = sum(trial["round"] for trial in facts["trials"] if trial["status"] == "finished")
        sentences.append(
            f"{shared} of {epochs} epochs were taken over from what several trials begin with; the "
            "times of training count them as if each had trained them."
        )
    dropped = [arm for arm in facts["arms"] if arm["dropped_after"]]
    if dropped:
        rounds = ", ".join(map(str, facts["rounds"]))
        names = "; ".join(f"{arm['name']} after {arm['dropped_after']}" for arm in dropped)
        sentences.append(f"Rounds of {rounds} epochs; dropped: {names}.")
    return sentences


def _missing(facts: Tree) -> int:
    """Trials of the last round that came to no end: the study was stopped."""
    ended = {(trial["arm"], trial["seed"], trial["round"]) for trial in facts["trials"]}
    return sum(
        (arm["name"], seed, arm["epochs"]) not in ended
        for arm in facts["arms"]
        if not arm["dropped_after"]
        for seed in facts["seeds"]
    )


def _worries(
    facts: Tree, rows: Sequence[Tree], failed: Sequence[Tree], experiment: Experiment | None
) -> list[str]:
    if experiment is not None:
        failed = [trial for trial in failed if not experiment.answers(trial["error"] or "")]
    worries = [f"{trial['arm']}, seed {trial['seed']} failed: {trial['error']}" for trial in failed]
    known = {row["arm"] for row in rows if row["contrast"]}
    worries += [
        f"The contrast {each['name']} has no seed with which all of its arms finished."
        for each in facts.get("contrasts", ())
        if each["name"] not in known
    ]
    pairs = len(facts["seeds"])
    if pairs < DECIDING:
        least = min(1.0, 2 / 2**pairs)
        worries.append(
            f"With {_seeds(facts)} the sign-flip test cannot come under p = {least:.3g}, however "
            f"far arms are apart; with {DECIDING} it can come under {LEVEL}."
        )
    return worries


def _parts(rows: Sequence[Tree]) -> list[dict[str, Any]]:
    """A table and a dot plot of differences for each slice, all on one scale."""
    dots = {
        piece: [_dot(row) for row in rows if row["slice"] == piece and row["baseline"]]
        for piece in dict.fromkeys(row["slice"] for row in rows)
    }
    scale = Scale.over([dot for own in dots.values() for dot in own], 0.0)
    return [
        {
            "slice": piece,
            "rows": [_cells(row) for row in rows if row["slice"] == piece],
            "plot": dot_plot(own, 0.0, scale, signed=True) if own else None,
        }
        for piece, own in dots.items()
    ]


def _contrasts(facts: Tree, rows: Sequence[Tree]) -> list[dict[str, Any]]:
    """A table and a dot plot for each hold-out and slice; what a contrast is, is in its hint."""
    made = {
        each["name"]: " ".join(
            f"{'-' if weight < 0 else '+'} {'' if abs(weight) == 1 else f'{abs(weight):g} x '}{arm}"
            for arm, weight in each["weights"].items()
        ).removeprefix("+ ")
        for each in facts.get("contrasts", ())
    }
    found = []
    for holdout in dict.fromkeys(row["holdout"] for row in rows):
        own = [row for row in rows if row["holdout"] == holdout]
        dots = [_dot(row, row["slice"], made[row["arm"]]) for row in own]
        names = dict.fromkeys(row["arm"] for row in own)
        scale = Scale.over(dots, 0.0)
        found.append(
            {
                "holdout": holdout,
                "parts": [
                    {
                        "name": name,
                        "sum": made[name],
                        "rows": [_cells(row) for row in own if row["arm"] == name],
                        "plot": dot_plot(
                            [dot for dot, row in zip(dots, own, strict=True) if row["arm"] == name],
                            0.0,
                            scale,
                            signed=True,
                        ),
                    }
                    for name in names
                ],
            }
        )
    return found


def _dot(row: Tree, name: str | None = None, hint: str | None = None) -> Dot:
    enough = row["n"] >= LEAST_PAIRS
    return Dot(
        name or row["arm"],
        row["difference"],
        row["low"] if enough else None,
        row["high"] if enough else None,
        kind={"better": "good", "worse": "bad"}.get(decided(row), ""),
        hint=hint or f"against {row['baseline']}",
    )


def _cells(row: Tree) -> dict[str, Any]:
    compared = row["baseline"] is not None or row["contrast"]
    p_value, needed = row.get("p_value"), row.get("pairs_needed")
    agreement = row.get("agreement")
    return {
        **row,
        "mean": formatting.figure(row["mean"]),
        "sd": formatting.figure(row["sd"]),
        "difference": formatting.signed(row["difference"]) if compared else "baseline",
        "difference_sd": formatting.figure(row.get("difference_sd")),
        "interval": formatting.interval((row.get("low"), row.get("high")), sign=True),
        "agreement": formatting.DASH if agreement is None else f"{agreement:.0%}",
        "p_value": formatting.figure(p_value, 3),
        "needed": formatting.count(needed),
        "words": row.get("words") or "",
        "kind": decided(row),
    }


def _others(rows: Sequence[Tree]) -> list[dict[str, Any]]:
    """Every action and slice, figure by figure."""
    kept = [row for row in rows if row["figure"] in FOLDED]
    return [
        {
            "holdout": holdout,
            "figure": formatting.label(figure),
            "rows": [
                _cells(row) for row in kept if (row["holdout"], row["figure"]) == (holdout, figure)
            ],
        }
        for holdout, figure in dict.fromkeys((row["holdout"], row["figure"]) for row in kept)
    ]


def _timelines(arms: Sequence[Tree]) -> list[dict[str, Any]]:
    """A drawing for each distinct schedule, with the arms that follow it."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        if arm["schedule"]:
            found.setdefault(json.dumps(arm["schedule"], sort_keys=True), []).append(arm["name"])
    return [
        {
            "arms": names,
            "svg": schedule.timeline(json.loads(text)),
            "words": schedule.words(json.loads(text)),
        }
        for text, names in found.items()
    ]


def _arms(arms: Sequence[Tree]) -> list[dict[str, str]]:
    """What named arms set; what a grid sets is in the names."""
    return [
        {
            "name": arm["name"],
            "baseline": formatting.DASH if arm["baseline"] == arm["name"] else arm["baseline"],
            "sets": ", ".join(f"{key}={as_text(own)}" for key, own in arm["changes"].items()),
        }
        for arm in arms
        if ARM in arm["values"]
    ]


def _versions(facts: Tree) -> str:
    """The versions of the data, with the arms of each where there are several."""
    found: dict[str, list[str]] = {}
    for arm, version in facts.get("data_versions", {}).items():
        found.setdefault(version, []).append(arm)
    if len(found) < 2:
        return facts["data_version"] or ""
    return "; ".join(f"{version} ({', '.join(arms)})" for version, arms in found.items())


def _epochs(trial: Tree) -> str:
    """How many a trial has, and how many of them it has taken over."""
    shared = trial.get("shared_epochs") or 0
    if not shared:
        return str(trial["round"])
    return f"{trial['round']}, {shared} epoch{'s' if shared > 1 else ''} shared"


def _key(row: Tree) -> tuple[Any, ...]:
    return (row["holdout"], row["action"], row["slice"], row["figure"])


def _seeds(facts: Tree) -> str:
    count = len(facts["seeds"])
    return "1 seed" if count == 1 else f"{count} seeds"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PackageLoader("thawline", "study"),
                jinja2.PackageLoader("thawline", "evaluation"),
            ]
        ),
    )
    environment.filters["figure"] = formatting.figure
    return environment.get_template("study.html.j2")
