"""What a report says and draws of a schedule, from `schedule.json` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from thawline.config.training import RESERVED_TABLES
from thawline.evaluation import epoch_plots
from thawline.theory.timing import written_then_replayed
from thawline.training.schedule import Curve, Plan, TrainingWindow, Windows

MOST_SPANS = 4
"""More than so many are not named one by one."""

Tree = Mapping[str, Any]

POINTS = 120
"""Points of a learning-rate curve over a run, or a little more."""


def timeline(schedule: Tree) -> Markup:
    """When each component trains and how fast, a line for it or for each of its tiers."""
    return epoch_plots.timeline(
        tracks(schedule),
        int(schedule["epochs"]),
        " ".join(["When each component trains.", *words(schedule)]),
    )


def tracks(schedule: Tree, *, tables_only: bool = False) -> list[epoch_plots.Track]:
    """The lines of a drawn schedule: of every component, or of the ID tables alone."""
    epochs = int(schedule["epochs"])
    return [
        track
        for name, described in schedule["components"].items()
        if _is_table(name) or not tables_only
        for track in _tracks(name, _plan(described), epochs)
    ]


def item_windows(schedule: Tree) -> list[tuple[float, float]]:
    """Spans in epochs in which the item table trains."""
    item = schedule["components"].get("item")
    return [(start, end) for start, end in item["windows"]] if item else []


def words(schedule: Tree) -> list[str]:
    """For each ID table when it trains, and whether examples are seen again after that.

    The share of such examples is that of the timing law (`theory.timing`): it bounds what
    memorised rows can touch.
    """
    epochs = int(schedule["epochs"])
    fresh = schedule.get("examples") == "fresh"
    tables: dict[tuple[Any, ...], list[str]] = {}
    for name, described in schedule["components"].items():
        if _is_table(name):
            plan = _plan(described)
            tables.setdefault((plan.windows, plan.tiers, plan.renewal), []).append(name)
    sentences = []
    for (windows, tiers, renewal), names in tables.items():
        of, one = _and(names), len(names) == 1
        if not windows:
            sentences.append(
                f"The {of} {'table is' if one else 'tables are'} frozen: no example is written "
                f"into {'its' if one else 'their'} rows."
            )
        for tier, own in tiers or (("", windows),):
            if own:
                what = f"{tier} rows of the {of}" if tier else of
                noun = "table" if one else "tables"
                verb = "trains" if one and not tier else "train"
                sentences.append(
                    f"The {what} {noun} {verb} {_when(own, epochs)}; "
                    f"{_seen_again(own, epochs, renewal, fresh=fresh)}."
                )
    return sentences


def drifts(epochs: Sequence[Tree]) -> dict[str, list[tuple[int, Tree]]]:
    """By ID table, the drift of its tiers (`training.drift`) after each epoch, from 1 on."""
    found: dict[str, list[tuple[int, Tree]]] = {}
    for number, entry in enumerate(epochs, start=1):
        for name, tiers in (entry.get("drift") or {}).items():
            if tiers:
                found.setdefault(name, []).append((number, tiers))
    return found


def _is_table(component: str) -> bool:
    return component not in RESERVED_TABLES and not component.startswith("ctx_")


def _plan(described: Tree) -> Plan:
    return Plan(
        _windows(described["windows"]),
        tuple((tier, _windows(spans)) for tier, spans in described["tiers"].items()),
        described["renewal"],
        Curve(**described["curve"]),
        described["reset_state"],
    )


def _windows(spans: Iterable[Sequence[float]]) -> Windows:
    return tuple(TrainingWindow(start, end) for start, end in spans)


def _tracks(name: str, plan: Plan, epochs: int) -> list[epoch_plots.Track]:
    renewed = []
    if plan.renewal:
        renewed = [epoch for epoch in range(1, epochs) if plan.trains(epoch, 1)]
    return [
        epoch_plots.Track(
            f"{name} {tier}".rstrip(),
            tier or ("table" if _is_table(name) else "network"),
            [_rates(window, plan, epochs) for window in windows],
            renewed,
        )
        for tier, windows in (plan.tiers or (("", plan.windows),))
    ]


def _rates(window: TrainingWindow, plan: Plan, epochs: int) -> list[tuple[float, float]]:
    """(epoch, learning rate as a factor on the component's own) along a window."""
    if plan.curve.kind == "constant" and not plan.curve.warm_up:
        return [(window.start, 1.0), (window.end, 1.0)]
    per_epoch = max(8, POINTS // epochs)
    # Steps of so many an epoch that each window of the plan has one.
    shortest = min(own.end - own.start for own in plan.windows)
    per_epoch = max(per_epoch, round(2 / shortest))
    steps = window.steps(per_epoch)
    rates = [(step / per_epoch, plan.factor(step, per_epoch)) for step in steps]
    return [*rates, (window.end, rates[-1][1])] if rates else []


def _when(windows: Windows, epochs: int) -> str:
    spans = [(window.start, window.end) for window in windows]
    if spans == [(0, epochs)]:
        return "throughout" if epochs == 1 else f"in all {epochs} epochs"
    if len(spans) > MOST_SPANS:
        trained = sum(end - start for start, end in spans)
        return f"in {len(spans)} spans, {trained:.4g} of {epochs} epochs in all"
    if all(start == int(start) and end == int(end) for start, end in spans):
        named = [
            f"{start + 1:.0f}" if end == start + 1 else f"{start + 1:.0f} to {end:.0f}"
            for start, end in spans
        ]
        one = len(spans) == 1 and spans[0][1] == spans[0][0] + 1
        return f"in {'epoch' if one else 'epochs'} {_and(named)} of {epochs} only"
    parts = [f"from {start:.4g} to {end:.4g}" for start, end in spans]
    return f"{_and(parts)} of {epochs} epochs only"


def _seen_again(windows: Windows, epochs: int, renewal: str | None, *, fresh: bool) -> str:
    share = written_then_replayed([(w.start, w.end) for w in windows], epochs)
    if share <= 0 or fresh:
        return "no example is seen again after its rows were written"
    seen = "every example is" if share >= 1 else f"{share:.0%} of the examples are"
    whose = "its" if share >= 1 else "their"
    text = f"{seen} seen again after {whose} rows were written"
    if renewal == "first":
        text += ", but each epoch starts from the first rows, which know nothing of it"
    elif renewal == "random":
        text += ", but each epoch starts from new random rows, which know nothing of it"
    return text


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
