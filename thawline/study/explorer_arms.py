"""The arms of a study as the explorer offers them: what varies, when tables train, exposure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from thawline.evaluation import schedule
from thawline.study.grid import as_text

ARM = "arm"
NETWORK = "network"
"""Kind of the lines of a schedule that are no ID table's."""
MOST_POINTS = 60
"""Of a drawn learning-rate curve."""

RESOLVED = {
    "recipe": "finetune.recipe",
    "table_learning_rate": "tables.item.learning_rate",
    "optimizer": "tables.item.optimizer",
    "adapter": "model.adapter",
    "epochs": "finetune.epochs",
    "staleness": "finetune.staleness",
}
"""Config keys of what `study.json` says of an arm as `resolved`."""

Tree = Mapping[str, Any]


def dimensions_of(facts: Tree) -> list[dict[str, Any]]:
    """What varies between the arms, each with its values as texts.

    Where several arms have the same values, or none varies, the one dimension is the arm's name.
    """
    values = [_texts(arm) for arm in facts["arms"]]
    keys = list(dict.fromkeys(key for own in values for key in own))
    varied = {
        key: list(dict.fromkeys(own.get(key, "") for own in values))
        for key in keys
        if len({own.get(key, "") for own in values}) > 1
    }
    places = {tuple(own.get(key, "") for key in varied) for own in values}
    if not varied or len(places) < len(values):
        varied = {ARM: [arm["name"] for arm in facts["arms"]]}
    ends = [key.rpartition(".")[2] for key in varied]
    return [{"key": key, "label": _label(key, ends), "values": own} for key, own in varied.items()]


def arms_of(facts: Tree) -> list[dict[str, Any]]:
    """Each arm: its place in the dimensions, its baseline's place, what is known of it."""
    names = [arm["name"] for arm in facts["arms"]]
    dimensions = dimensions_of(facts)
    finished = [
        (trial["arm"], trial["round"]) for trial in facts["trials"] if trial["status"] == "finished"
    ]
    return [
        {
            "name": arm["name"],
            "at": _places(arm, dimensions),
            "baseline": names.index(arm["baseline"]) if arm["baseline"] in names else None,
            "epochs": arm["epochs"],
            "dropped": arm.get("dropped_after"),
            "finished": finished.count((arm["name"], arm["epochs"])),
            "words": schedule.words(arm["schedule"]) if arm.get("schedule") else [],
            "exposure": exposure_of(arm),
            "settings": _settings(arm),
        }
        for arm in facts["arms"]
    ]


def exposure_of(arm: Tree) -> dict[str, list[dict[str, str]]]:
    """What a model sees of its own writing and of moving rows, in words, by ID table.

    Returns:
        `replayed` and `moving`, each with a `table`, `value` (the answer) and `words` an entry.
    """
    replayed: list[dict[str, str]] = []
    moving: list[dict[str, str]] = []
    components = (arm.get("schedule") or {}).get("components", {})
    given = arm.get("exposure") or {
        name: {"replayed": components[name]["replayed"]}
        for name in _tables(arm.get("schedule"))
        if "replayed" in components[name]
    }
    for table, own in given.items():
        trains = bool(components.get(table, {}).get("windows", True))
        for name, say, into in (("replayed", _replayed, replayed), ("moving", _moving, moving)):
            if own.get(name) is None:
                continue
            value, text = say(own[name], trains)
            if name == "replayed" and own.get("renewal") and own[name] > 0:
                text += ", but each epoch starts from other rows, which know nothing of it"
            parts = [
                f"{tier} rows: {say(shares[name], True)[0]}"
                for tier, shares in (own.get("tiers") or {}).items()
            ]
            words = "; ".join([text, *parts])
            into.append({"table": table, "value": value, "words": words})
    return {"replayed": replayed, "moving": moving}


def timelines_of(facts: Tree) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Each distinct schedule once, for drawing, and the one of each arm."""
    found: dict[str, int] = {}
    places: list[int | None] = []
    for arm in facts["arms"]:
        if not arm.get("schedule"):
            places.append(None)
            continue
        text = json.dumps(arm["schedule"], sort_keys=True)
        places.append(found.setdefault(text, len(found)))
    return [_timeline(json.loads(text)) for text in found], places


def _timeline(described: Tree) -> dict[str, Any]:
    """Lines of a schedule; components that train alike share one."""
    lines: dict[str, dict[str, Any]] = {}
    for track in schedule.tracks(described):
        spans = [_thinned(span) for span in track.spans]
        own = {"kind": track.kind, "spans": spans, "renewals": [*track.renewals]}
        line = lines.setdefault(json.dumps(own), {"names": [], **own})
        line["names"].append(track.name)
    own_lines = sorted(lines.values(), key=lambda line: line["kind"] == NETWORK)
    return {
        "epochs": int(described["epochs"]),
        "windows": [list(span) for span in schedule.item_windows(described)],
        "lines": [_named(line) for line in own_lines],
    }


def _tables(described: Tree | None) -> list[str]:
    """The ID tables of a schedule."""
    tracks = schedule.tracks(described) if described else []
    names = [track.name.partition(" ")[0] for track in tracks if track.kind != NETWORK]
    return list(dict.fromkeys(names))


def _named(line: dict[str, Any]) -> dict[str, Any]:
    names = line.pop("names")
    name = ", ".join(names)
    if line["kind"] == NETWORK:
        name = "network" if len(names) > 2 else name
    elif line["kind"] == "table":
        name += " tables" if len(names) > 1 else " table"
    else:
        name += " rows"
    return {"name": name, "of": ", ".join(names), **line}


def _thinned(span: Sequence[tuple[float, float]]) -> list[list[float]]:
    """A curve with fewer points, its ends kept."""
    step = -(-len(span) // MOST_POINTS)
    kept = [*span[:-1:step], span[-1]] if span else []
    return [[round(at, 4), round(rate, 4)] for at, rate in kept]


def _replayed(share: float, trains: bool) -> tuple[str, str]:
    if not trains:
        return "no", "no example is written into the rows, which stay as they were"
    if share <= 0:
        return "no", "no example is seen again after it was written into the rows"
    if share >= 1:
        return "every one", "every example is seen again after it was written into the rows"
    value = f"{share:.0%}"
    return value, f"{value} of the examples are seen again after they were written into the rows"


def _moving(share: float, trains: bool) -> tuple[str, str]:
    if not trains:
        return "never", "the network trains on rows that never move"
    before = "before the last epoch in which the table trains"
    if share <= 0:
        return "in one epoch", f"{before}, the network trains on fixed rows"
    if share >= 1:
        return "throughout", f"{before} too, the network trains on moving rows"
    value = f"{share:.0%}"
    return value, f"{before}, {value} of the network's training is on moving rows"


def _settings(arm: Tree) -> list[list[str]]:
    """What the arm's own config says, for a reader, and what else the arm sets."""
    known = {key: value for key, value in (arm.get("resolved") or {}).items() if value is not None}
    said = {RESOLVED[key] for key in known if key in RESOLVED}
    return [
        *([key.replace("_", " "), as_text(value)] for key, value in known.items()),
        *(
            [key, as_text(value)]
            for key, value in arm.get("changes", arm["values"]).items()
            if key not in said
        ),
    ]


def _texts(arm: Tree) -> dict[str, str]:
    return {key: as_text(value) for key, value in arm["values"].items()}


def _places(arm: Tree, dimensions: Sequence[Tree]) -> list[int]:
    if [each["key"] for each in dimensions] == [ARM]:
        return [dimensions[0]["values"].index(arm["name"])]
    own = _texts(arm)
    return [each["values"].index(own.get(each["key"], "")) for each in dimensions]


def _label(key: str, ends: Sequence[str]) -> str:
    """`tables.item.learning_rate` is the item table's learning rate."""
    section, _, rest = key.partition(".")
    table, _, own = rest.partition(".")
    if section == "tables" and own:
        return f"{table} table {own}".replace("_", " ")
    end = key.rpartition(".")[2]
    return (end if ends.count(end) == 1 else key).replace("_", " ")
