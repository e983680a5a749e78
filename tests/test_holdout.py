"""Requests held out of training: their positives are no targets anywhere, by plain loops."""

import hashlib
from collections import Counter, defaultdict

import delayed_log
import pyarrow.parquet as pq
import pytest
from engine_helpers import assert_same, with_engine
from window_reference import (
    FINETUNE,
    PRETRAIN,
    Reference,
    config_for,
    digest63,
    every_request,
    random_log,
    read,
    write_log,
)

from thawline.config import Config, Runtime, Windows
from thawline.data.batches import RequestReader, SequenceReader
from thawline.data.engine import open_engine
from thawline.data.manifest import Dataset
from thawline.data.request_checks import holdout_leakage
from thawline.data.windows import build_dataset

pytest_plugins = ["engine_fixtures"]

SHARE = 0.3


def held(key):
    first = int(hashlib.md5(f"holdout:{key}".encode()).hexdigest()[:12], 16)  # noqa: S324
    return first / 16**12 < SHARE


def built(config, root):
    root.mkdir()
    build_dataset(config, root)
    return Dataset.open(root)


def by_request(config, **windows):
    tree = config.model_dump(mode="json")
    tree["windows"] |= {"holdout_by": "request", "holdout_users": SHARE, **windows}
    return Config.model_validate(tree)


def audited(dataset, tmp_path):
    with open_engine(Windows(), Runtime(threads=1), tmp_path / "scratch") as engine:
        return holdout_leakage(engine, dataset)


@pytest.fixture(scope="module", params=["impressions-text", "clicks-int"])
def case(request, tmp_path_factory):
    """The config of a log, its dataset, and the log by plain loops."""
    kind, ids = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    rows = random_log(ids)
    log = write_log(rows, folder / "log.parquet")
    config = by_request(config_for(log, kind == "impressions"))
    return config, built(config, folder / "dataset"), Reference(rows, kind == "impressions")


def key_of(reference, row):
    if reference.impressions:
        return str(row["number"])
    return f"{row['user']}|{row['time']}|{row['item']}"


def held_requests(reference):
    """The numbers of the requests that are held out."""
    return {row["number"] for row in reference.rows if held(key_of(reference, row))}


def test_a_share_of_the_requests_is_held_out_and_nothing_else_about_them_changes(case):
    _, dataset, reference = case
    out = held_requests(reference)
    found = every_request(dataset)
    expected = reference.requests()
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row["held_out"] == (row["request_id"] in out)
        for name, value in wanted.items():
            # Codes of the context are learned from what trains.
            if name not in ("held_out", "ctx_device"):
                assert row[name] == pytest.approx(value), name
    assert 0.2 < sum(row["held_out"] for row in found) / len(found) < 0.4


def test_no_positive_of_a_held_out_request_is_a_target_in_fine_tuning(case):
    _, dataset, reference = case
    out = held_requests(reference)
    for split, wanted in (("train", False), ("in_window", True), ("next", False)):
        reader = RequestReader(dataset, split, batch_size=16, sampler=None)
        numbers = [n for batch in reader.epoch(0) for n in batch.request_id.tolist()]
        assert len(numbers) == dataset.manifest.requests[split] > 10
        assert {number in out for number in numbers} == {wanted}


def positives_of(reference, window=PRETRAIN):
    """Rows of a window's positives by user, and whether they are held out, in time order."""
    out = held_requests(reference)
    found = defaultdict(list)
    for user in sorted(reference.positives):
        for row in reference.positives[user]:
            if window[0] <= row["time"] < window[1]:
                found[user].append((reference.row_of[row["item"]], row["number"] in out))
    return found


def pieces(items, length=4):
    while len(items) >= 2:
        yield items[:length]
        items = items[length - 1 :]


def test_pretraining_sequences_leave_held_out_positives_out_or_end_with_one(case):
    _, dataset, reference = case
    expected = []
    for user, items in positives_of(reference).items():
        for held_out, line in ((False, [item for item in items if not item[1]]), (True, items)):
            for piece in pieces(line):
                while held_out and piece and not piece[-1][1]:
                    piece = piece[:-1]
                if len(piece) >= 2:
                    rows = [row for row, _ in piece]
                    expected.append({"user_id": user, "held_out": held_out, "item_row": rows})
    assert read(dataset.sequence_files()) == expected
    assert {line["held_out"] for line in expected} == {False, True}


def test_a_held_out_positive_is_no_target_of_pretraining(case):
    _, dataset, reference = case
    allowed = Counter()
    for user, items in positives_of(reference).items():
        allowed.update((user, row) for row, out in items if not out)
    targets = Counter(
        (line["user_id"], row)
        for line in read(dataset.sequence_files())
        if not line["held_out"]
        for row in line["item_row"][1:]
    )
    assert targets
    assert all(count <= allowed[target] for target, count in targets.items())
    readers = [SequenceReader(dataset, held_out=out, batch_size=8) for out in (False, True)]
    counts = [sum(len(batch) for batch in reader.epoch(0)) for reader in readers]
    assert counts == [dataset.manifest.sequences[name] for name in ("train", "held_out")]


def test_later_histories_hold_held_out_positives(case):
    _, dataset, reference = case
    out = held_requests(reference)
    held_out = {
        (row["user"], reference.row_of[row["item"]])
        for row in reference.rows
        if row["action"] and row["number"] in out
    }
    seen = sum(
        (row["user_id"], item) in held_out
        for row in every_request(dataset)
        if not row["held_out"]
        for item in row["history_row"]
    )
    assert seen > 20


def test_support_counts_what_trains(case):
    _, dataset, reference = case
    for name, window in (("support", FINETUNE), ("pretrain_count", PRETRAIN)):
        counts = Counter()
        for items in positives_of(reference, window).values():
            counts.update(row for row, out in items if not out)
        expected = [counts[row + 2] for row in range(len(reference.catalog))]
        assert getattr(dataset.catalog, name).tolist() == expected


def test_the_audit_looks_at_requests(case, tmp_path):
    _, dataset, _ = case
    finding = audited(dataset, tmp_path)
    assert (finding.severity, finding.figures) == ("info", {"requests": 0})
    copy = tmp_path / "tampered"
    files = dataset.request_files("train")
    for file in files:
        other = copy / file.relative_to(dataset.root)
        other.parent.mkdir(parents=True, exist_ok=True)
        table = pq.read_table(file, partitioning=None)
        pq.write_table(table, other)
    first = pq.read_table(files[0], partitioning=None)
    leaked = first.filter(first["held_out"]).slice(0, 2)
    place = leaked.schema.get_field_index("held_out")
    leaked = leaked.set_column(place, leaked.schema.field(place), [[False] * 2])
    pq.write_table(leaked, (copy / files[0].relative_to(dataset.root)).with_name("part-9.parquet"))
    finding = audited(Dataset(copy, dataset.manifest), tmp_path)
    assert (finding.severity, finding.figures) == ("error", {"requests": 2})


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_spark_holds_the_same_requests_out(spark, case, tmp_path):
    config, dataset, _ = case
    assert_same(dataset, built(with_engine(config, "spark"), tmp_path / "spark"))


def test_held_out_users_are_warned_of_where_a_table_of_users_trains(tmp_path):
    log = write_log(random_log("int"), tmp_path / "log.parquet")
    config = config_for(log, True)
    tables = {"tables": {"user": {"column": "user_id"}}}
    config = Config.model_validate(config.model_dump(mode="json") | tables)
    finding = audited(built(config, tmp_path / "users"), tmp_path)
    assert finding.severity == "warning"
    assert "holdout_by: request" in finding.remedy
    finding = audited(built(by_request(config), tmp_path / "requests"), tmp_path)
    assert finding.severity == "info"


def joined_requests(rows, *, named):
    """Each event of a log of late actions, with the request whose target it may be.

    Returns:
        user, item, time, whether it is positive, the request's key (None: it joins none), and
        whether it names it.
    """
    begun = {}
    for user in {row[1] for row in rows}:
        times = sorted({row[3] for row in rows if row[1] == user and row[0] == "view"})
        for place, time in enumerate(times):
            close = place and time - times[place - 1] <= delayed_log.GAP * 10**6
            begun[user, time] = begun[user, times[place - 1]] if close else time
    events, views = defaultdict(set), defaultdict(list)
    for kind, user, item, time, request, position in rows:
        if not named and kind == "view":
            request = f"{user}|{begun[user, time]}"
        key = request and str(digest63(request))
        if kind == "view":
            views[user, item].append((time, int(key), position or 0))
        events[user, item, time, key if named else None].add((kind, key))
    found = []
    for (user, item, time, _), kinds in events.items():
        key = next((key for _, key in kinds if key), None)
        positive = any(kind != "view" for kind, _ in kinds)
        joined = key
        if key is None:
            before = [view for view in views[user, item] if view[0] <= time]
            joined = str(max(before)[1]) if before else None
        found.append((user, item, time, positive, joined, key is not None))
    return found


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.timeout(600)
def test_late_actions_of_held_out_requests_are_no_targets(named, engine, tmp_path):
    rows = delayed_log.random_log(3, named=named)
    log = delayed_log.write_log(rows, tmp_path / "log.parquet")
    config = delayed_log.config_for(log, named=named, hours=48.0)
    # The pretraining window holds the fine-tune window, and each user is one sequence.
    config = by_request(config, pretrain_overlap=True, pretrain_days=4, sequence_length=1_000)
    dataset = built(with_engine(config, engine), tmp_path / "dataset")
    items = dict(zip(dataset.catalog.item_id.to_pylist(), range(2, 10_000), strict=False))
    expected, late = defaultdict(Counter), 0
    for user, item, time, positive, joined, direct in joined_requests(rows, named=named):
        if positive and delayed_log.START <= time < delayed_log.FINETUNE[1]:
            out = joined is not None and held(joined)
            late += out and not direct
            if not out:
                expected[user][items[item]] += 1
    assert late > 10
    trained = {
        line["user_id"]: Counter(line["item_row"])
        for line in read(dataset.sequence_files())
        if not line["held_out"]
    }
    assert trained == {user: rows for user, rows in expected.items() if rows.total() >= 2}
    for request in every_request(dataset):
        assert request["held_out"] == held(str(request["request_id"]))
