"""Requests from logs whose actions come later, or that have no request ids, against plain loops."""

import datetime
import hashlib
from collections import defaultdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delayed_log import (
    ACTIONS,
    DAY,
    FINETUNE,
    GAP,
    HOUR,
    START,
    TEST,
    WINDOWS,
    config_for,
    random_log,
    write_log,
)

from thawline.config import Config, parse_config
from thawline.data.manifest import Dataset
from thawline.data.windows import build_dataset
from thawline.errors import ConfigError


def built(config, root):
    root.mkdir()
    build_dataset(config, root)
    return Dataset.open(root)


def requests_of(dataset):
    rows = []
    for file in sorted((dataset.root / "requests").glob("day=*/part-*.parquet")):
        table = pq.read_table(file, partitioning=None)
        place = table.schema.get_field_index("timestamp")
        times = table["timestamp"].cast(pa.int64())
        rows += table.set_column(place, "timestamp", times).to_pylist()
    return rows


def digest63(text):
    return int(hashlib.md5(text.encode()).hexdigest()[:16], 16) // 2  # noqa: S324


def end_of(start):
    return FINETUNE[1] if start < FINETUNE[1] else TEST[1]


class Reference:
    """The requests of a log of views, clicks and saves, one plain loop at a time."""

    def __init__(self, rows, *, named, hours):
        events = {}
        for kind, user, item, time, request, position in rows:
            if time >= TEST[1]:
                continue
            key = (user, item, time, request)
            event = events.setdefault(
                key, {"user": user, "item": item, "time": time, "kinds": set(), "position": None}
            )
            event["request"] = None if request is None else digest63(request)
            event["kinds"].add(kind)
            if kind == "view":
                # Of the same item on two places at the same time, the first place stays.
                places = [p for p in (event["position"], position) if p is not None]
                event["position"] = min(places, default=None)
        self.events = list(events.values())
        self.views = [event for event in self.events if "view" in event["kinds"]]
        if not named:
            self.group_by_gap()
        first = defaultdict(lambda: TEST[1])
        for event in self.events:
            first[event["item"]] = min(first[event["item"]], event["time"])
        items = sorted(first, key=lambda item: (first[item], item))
        self.row = {item: index + 2 for index, item in enumerate(items)}
        self.start = defaultdict(lambda: TEST[1])
        for event in self.events:
            if event["request"] is not None:
                request = event["request"]
                self.start[request] = min(self.start[request], event["time"])
        self.labels = {id(view): view["kinds"] - {"view"} for view in self.views}
        for event in self.events:
            if "view" not in event["kinds"]:
                self.attribute(event, hours)

    def group_by_gap(self):
        by_user = defaultdict(list)
        for view in self.views:
            by_user[view["user"]].append(view)
        for user, views in by_user.items():
            begun, before = None, None
            for view in sorted(views, key=lambda view: view["time"]):
                if before is None or view["time"] - before > GAP * 1_000_000:
                    begun = view["time"]
                before = view["time"]
                view["request"] = digest63(f"{user}|{begun}")

    def attribute(self, event, hours):
        earlier = [
            view
            for view in self.views
            if (view["user"], view["item"]) == (event["user"], event["item"])
            and view["time"] <= event["time"]
            and event["request"] in (None, view["request"])
        ]
        if not earlier:
            return
        view = max(earlier, key=lambda view: (view["time"], view["request"]))
        on_time = event["time"] - view["time"] <= hours * HOUR
        if on_time and event["time"] < end_of(self.start[view["request"]]):
            self.labels[id(view)] |= event["kinds"]

    def order(self, event):
        ties = [event["request"], event["position"]]
        return (event["time"], *((tie is None, tie or 0) for tie in ties), self.row[event["item"]])

    def requests(self):
        shown = defaultdict(list)
        for view in self.views:
            start = self.start[view["request"]]
            if FINETUNE[0] <= start < TEST[1] and view["time"] < end_of(start):
                shown[view["request"]].append(view)
        found = []
        for request, views in shown.items():
            start, user = self.start[request], views[0]["user"]
            views.sort(key=lambda v: (v["position"], v["time"], self.row[v["item"]]))
            before = sorted(
                (
                    event
                    for event in self.events
                    if event["user"] == user
                    and event["kinds"] & set(ACTIONS)
                    and event["time"] < start
                ),
                key=self.order,
            )[-6:]
            found.append(
                {
                    "request_id": request,
                    "user_id": user,
                    "timestamp": start,
                    "history_row": [self.row[event["item"]] for event in before],
                    "history_action": [
                        ("save" in event["kinds"]) + 2 * ("click" in event["kinds"])
                        for event in before
                    ],
                    "candidate_row": [self.row[view["item"]] for view in views],
                    **{
                        f"label_{name}": [int(name in self.labels[id(view)]) for view in views]
                        for name in ACTIONS
                    },
                }
            )
        return sorted(found, key=lambda request: (request["timestamp"], request["request_id"]))


@pytest.mark.parametrize("named", [True, False], ids=["request ids", "gaps"])
@pytest.mark.parametrize("hours", [0.0, 6.0, 40.0])
def test_requests_and_their_delayed_labels_equal_plain_loops(tmp_path, named, hours):
    rows = random_log(int(hours), named=named)
    config = config_for(write_log(rows, tmp_path / "log.parquet"), named=named, hours=hours)
    found = requests_of(built(config, tmp_path / "dataset"))
    expected = Reference(rows, named=named, hours=hours).requests()
    kept = [{name: request[name] for name in expected[0]} for request in found]
    assert kept == expected
    assert len(expected) > 50
    delayed = sum(sum(request["label_save"]) for request in expected)
    assert delayed > (0 if hours == 0 else 10)


@pytest.mark.parametrize("named", [True, False], ids=["request ids", "gaps"])
def test_what_comes_after_the_fine_tune_window_changes_nothing_in_it(tmp_path, named):
    rows = random_log(1, named=named)
    other = random_log(2, named=named)
    before = [row for row in rows if row[3] < FINETUNE[1]]
    changed = before + [
        (kind, user, item, time, request and f"other-{request}", position)
        for kind, user, item, time, request, position in other
        if time >= FINETUNE[1]
    ]
    built_from = []
    for name, log in (("one", rows), ("two", changed)):
        config = config_for(write_log(log, tmp_path / f"{name}.parquet"), named=named, hours=40)
        requests = requests_of(built(config, tmp_path / name))
        built_from.append([r for r in requests if r["timestamp"] < FINETUNE[1]])
    assert built_from[0] == built_from[1]
    assert len(built_from[0]) > 50


def test_a_save_joins_the_latest_impression_within_its_hours_by_hand(tmp_path):
    noon = FINETUNE[0] + 12 * HOUR
    late = FINETUNE[1] - HOUR
    rows = [
        *(("view", 1, item, START + HOUR * item, "p", 0) for item in (1, 2, 3)),
        *(("click", 1, item, START + HOUR * item, "p", 0) for item in (1, 2, 3)),
        ("view", 1, 1, noon, "a", 0),
        ("view", 1, 2, noon, "a", 1),
        ("view", 1, 1, noon + HOUR, "b", 0),
        ("save", 1, 1, noon + 3 * HOUR, None, None),  # of b: the latest
        ("click", 1, 1, noon + 4 * HOUR, "a", None),  # names a
        ("save", 1, 2, noon + 6 * HOUR, None, None),  # six hours: just in time
        ("click", 1, 2, noon + 6 * HOUR + 1, None, None),  # too late
        ("view", 1, 3, late, "c", 0),
        ("click", 1, 3, late + HOUR - 1, None, None),  # the window's last microsecond
        ("save", 1, 3, late + HOUR, None, None),  # after the window
        ("view", 1, 3, TEST[0] + 2 * HOUR, "d", 0),
    ]
    config = config_for(write_log(rows, tmp_path / "log.parquet"), named=True, hours=6.0)
    config = config.model_copy(
        update={"windows": config.windows.model_copy(update={"holdout_users": 0.0})}
    )
    found = {r["request_id"]: r for r in requests_of(built(config, tmp_path / "dataset"))}
    labels = {
        name: (found[digest63(name)]["label_save"], found[digest63(name)]["label_click"])
        for name in "abcd"
    }
    assert labels == {
        "a": ([0, 1], [1, 0]),
        "b": ([1], [0]),
        "c": ([0], [1]),
        "d": ([0], [0]),
    }
    # In the history, each action is of its own time.
    assert found[digest63("d")]["history_row"][-2:] == [4, 4]
    assert found[digest63("d")]["history_action"][-2:] == [2, 1]


def test_a_click_and_a_save_of_one_moment_are_one_positive(tmp_path):
    rows = [
        ("click", user, user % 3, START + DAY * day, None, None)
        for user in range(9)
        for day in range(5)
    ]
    rows += [("save", 1, 1, START + 2 * DAY, None, None)]
    config = config_for(
        write_log(rows, tmp_path / "log.parquet"),
        named=False,
        impression=None,
        request_gap_seconds=None,
    )
    found = requests_of(built(config, tmp_path / "dataset"))
    both = [r for r in found if r["user_id"] == 1 and r["timestamp"] == START + 2 * DAY]
    assert [(r["label_save"], r["label_click"]) for r in both] == [([1], [1])]
    later = [r for r in found if r["user_id"] == 1 and r["timestamp"] == START + 3 * DAY]
    assert later[0]["history_action"] == [2, 2, 3]


def test_impressions_without_actions_of_their_own_are_grouped_by_gaps(tmp_path):
    """A log of shown items with a flag each, and nothing to tell its requests."""
    rows = []
    for user in range(12):
        for hour in range(0, 5 * 24, 5):
            for number in range(4):
                seconds = hour * 3_600 + [0, 10, 1_810, 3_611][number]
                rows.append((user, number, START + seconds * 1_000_000, number == 1))
    names = ("user_id", "item_id", "timestamp", "clicked")
    columns = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    columns["timestamp"] = pa.array(columns["timestamp"], pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    config = Config.model_validate(
        {
            "events": {
                "path": str(tmp_path / "log.parquet"),
                "actions": {"click": {"column": "clicked"}},
                "request_gap_seconds": GAP,
            },
            "windows": WINDOWS,
        }
    )
    dataset = built(config, tmp_path / "dataset")
    assert dataset.manifest.impressions
    # The third comes exactly 1,800 s after the second, the fourth a second too late.
    found = {tuple(r["candidate_row"]): r["label_click"] for r in requests_of(dataset)}
    assert found == {(2, 3, 4): [0, 1, 0], (5,): [0]}


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("request_gap_seconds: 9, columns: {request_id: r}", "drop request_gap_seconds"),
        ("impression: {column: e, equals: view}", "set columns.request_id or request_gap"),
        ("actions: {click: {column: e, equals: c, at_least: 1}}", "equals and at_least are both"),
        ("actions: {click: {equals: c}}", "name the column"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(lines, named):
    with pytest.raises(ConfigError, match=named):
        parse_config(f"events: {{path: x, {lines}}}")


@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "flags"])
def test_days_taken_from_a_window_that_ended_earlier_are_as_if_built_anew(tmp_path, delayed):
    """Requests around midnight are cut where their window ends, and it has moved."""
    rows = random_log(3, named=True)
    if not delayed:
        rows = [(*row[:4], row[4] or f"{row[1:4]}", row[5] or 0) for row in rows]
    path = write_log(rows, tmp_path / "log.parquet")
    kinds = {name: {"column": "event", "equals": name} for name in ("save", "click", "view")}
    shown = {} if delayed else {"impression": None, "actions": kinds}
    config = config_for(path, named=True, hours=30, **shown)

    def ending(end, name, sources=()):
        windows = config.windows.model_copy(update={"end": datetime.date(2026, 3, end)})
        root = tmp_path / name
        root.mkdir()
        build_dataset(config.model_copy(update={"windows": windows}), root, sources=sources)
        return {r["request_id"]: r for r in requests_of(Dataset.open(root))}

    earlier = ending(4, "earlier")
    moved, anew = ending(5, "moved", [tmp_path / "earlier"]), ending(5, "anew")
    assert moved == anew
    last = [r for r in earlier if r in anew and FINETUNE[0] + DAY > anew[r]["timestamp"]]
    assert any(earlier[r] != anew[r] for r in last)
