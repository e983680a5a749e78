"""Datasets that follow one another: built days are taken over, late events told, kills survived."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logs import (
    DAY,
    SCHEMA,
    START,
    built,
    config_for,
    contents,
    days_built,
    events_of,
    write,
    write_days,
)

from thawline.data.manifest import SCHEMA_VERSION, Dataset, Late
from thawline.data.windows import build_dataset, inputs_version, unchanged
from thawline.errors import BusyError, DataError
from thawline.folders import resumable_folder
from thawline.stages import windows as stage

BOTH = pytest.mark.parametrize("impressions", [True, False], ids=["impressions", "clicks"])

pytest_plugins = ["engine_fixtures"]


def model_folder(dataset, root):
    """What a model folder says of a dataset's rows and codes; it has no days to take."""
    root.mkdir()
    shutil.copy(dataset.root / "catalog.parquet", root / "catalog.parquet")
    text = json.dumps({"context": dataset.manifest.context})
    (root / "model.json").write_text(text, encoding="utf-8")
    return root


def part_files(dataset, day):
    return sorted((dataset.root / "requests" / f"day={day}").glob("*"))


def inodes(dataset, days):
    return [file.stat().st_ino for day in days for file in part_files(dataset, day)]


def written(root):
    return {
        file: (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in root.rglob("*")
        if file.name != "audit.json"
    }


@BOTH
def test_moving_the_window_one_day_builds_one_day(tmp_path, impressions):
    log = write_days(tmp_path / "log", range(7))
    first, steps = built(config_for(log, impressions=impressions), tmp_path / "first")
    assert days_built(steps) == ["2026-03-04", "2026-03-05", "2026-03-06", "2026-03-07"]

    write_days(log, [7])
    moved = config_for(
        log, impressions=impressions, end="2026-03-08", previous=str(tmp_path / "first")
    )
    second, steps = built(moved, tmp_path / "second")
    assert days_built(steps) == ["2026-03-08"]
    kept = ["2026-03-05", "2026-03-06", "2026-03-07"]
    assert inodes(second, kept) == inodes(first, kept)
    assert second.manifest.late == {}

    # The same dataset, with every day built from the log.
    previous = str(model_folder(first, tmp_path / "model"))
    windows = moved.windows.model_copy(update={"previous": previous})
    whole, steps = built(moved.model_copy(update={"windows": windows}), tmp_path / "whole")
    assert days_built(steps) == [*kept, "2026-03-08"]
    assert contents(whole.root) == contents(second.root)
    assert whole.manifest == second.manifest


def test_days_are_taken_from_an_earlier_dataset_even_without_a_previous_catalog(tmp_path):
    log = write_days(tmp_path / "log", range(8))
    config = config_for(log, context=False)
    first, _ = built(config, tmp_path / "first")
    moved = config_for(log, context=False, end="2026-03-08")
    second, steps = built(moved, tmp_path / "second", [first.root])
    assert days_built(steps) == ["2026-03-08"]
    whole, _ = built(moved, tmp_path / "whole")
    assert contents(whole.root) == contents(second.root)
    assert whole.manifest == second.manifest


def test_a_context_value_keeps_its_code_and_a_new_one_has_one_from_the_next_day_on(tmp_path):
    log = write_days(tmp_path / "log", range(6))
    new = [row | {"device": "a-new-one"} for row in events_of(6)]
    write(new, log / "06.parquet")
    first, _ = built(config_for(log), tmp_path / "first")
    assert first.manifest.context == {"device": ["tv", "web"]}
    write([row | {"device": "a-new-one"} for row in events_of(7)], log / "07.parquet")
    moved = config_for(log, end="2026-03-08", previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    assert second.manifest.context == {"device": ["tv", "web", "a-new-one"]}
    assert days_built(steps) == ["2026-03-08"]

    def codes(day):
        table = pq.read_table(part_files(second, day), partitioning=None)
        return set(table["ctx_device"].to_pylist())

    assert codes("2026-03-06") == {0, 1, 2}
    assert codes("2026-03-07") == {0}
    assert codes("2026-03-08") == {3}


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        ({"history_length": 4}, 4),
        ({"tiers": {"head": 9, "torso": 5}}, 0),
        ({"pretrain_days": 2}, 0),
    ],
    ids=["histories", "tiers", "pretraining"],
)
def test_a_day_is_taken_only_where_the_config_makes_the_same_of_it(tmp_path, change, rebuilt):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    second, steps = built(config_for(log, **change), tmp_path / "second", [first.root])
    assert len(days_built(steps)) == rebuilt
    whole, _ = built(config_for(log, **change), tmp_path / "whole")
    assert contents(whole.root) == contents(second.root)


def test_a_day_that_has_lost_a_file_is_built_again(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    part_files(first, "2026-03-05")[0].unlink()
    _, steps = built(config_for(log), tmp_path / "second", [first.root])
    assert days_built(steps) == ["2026-03-05"]


def test_a_request_that_ran_past_midnight_is_finished_when_the_window_moves(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    shown = {"user": 3, "item": 5, "request": 9999, "click": True, "device": "tv"}
    late_evening, morning = START + 7 * DAY - 2, START + 7 * DAY + 5
    write([shown | {"time": late_evening, "position": 0}], log / "evening.parquet")
    first, _ = built(config_for(log), tmp_path / "first")

    write_days(log, [7])
    write([shown | {"item": 6, "time": morning, "position": 1}], log / "morning.parquet")
    moved = config_for(log, end="2026-03-08", previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    assert days_built(steps) == ["2026-03-08"]

    # While 7 March ends its window, what comes after it counts for nothing; later it does.
    write_days(log, [8])
    moved = config_for(log, end="2026-03-09", previous=str(second.root))
    third, steps = built(moved, tmp_path / "third")
    assert days_built(steps) == ["2026-03-07", "2026-03-09"]
    assert third.manifest.late == {}
    rows = pq.read_table(part_files(third, "2026-03-07"), partitioning=None).to_pylist()
    assert [len(row["candidate_row"]) for row in rows if row["request_id"] == 9999] == [2]


def test_the_days_that_labels_may_still_come_for_are_built_again(tmp_path):
    log = write_days(tmp_path / "log", range(8))
    events = {
        "impression": {"column": "kind", "equals": "view"},
        "actions": {"click": {"column": "kind", "equals": "click"}},
        "attribution_hours": 24.0,
    }
    for file in log.iterdir():
        table = pq.read_table(file)
        kinds = ["click" if click else "view" for click in table["click"].to_pylist()]
        pq.write_table(table.append_column("kind", pa.array(kinds)), file)

    def config(**windows):
        plain = config_for(log, **windows)
        tree = plain.model_dump(mode="json", exclude_none=True)
        tree["events"] |= events
        return type(plain).model_validate(tree)

    first, _ = built(config(), tmp_path / "first")
    second, steps = built(config(end="2026-03-08", previous=str(first.root)), tmp_path / "second")
    # The labels of 6 March, which ended the fine-tune window, may now come from 7 March.
    assert days_built(steps) == ["2026-03-06", "2026-03-08"]
    previous = str(model_folder(first, tmp_path / "model"))
    whole, _ = built(config(end="2026-03-08", previous=previous), tmp_path / "whole")
    assert contents(whole.root) == contents(second.root)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_takes_the_same_days_and_gives_the_same_rows_as_duckdb(spark, tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    write_days(log, [7])
    settings = {"end": "2026-03-08", "previous": str(first.root)}
    one, _ = built(config_for(log, **settings), tmp_path / "duckdb")
    other, steps = built(config_for(log, **settings, engine="spark"), tmp_path / "spark")
    assert days_built(steps) == ["2026-03-08"]
    assert other.manifest == one.manifest
    assert contents(other.root) == contents(one.root)


# The same inputs.


@pytest.fixture
def runs(monkeypatch):
    class Recorder:
        def __init__(self):
            self.metrics = {}

        def log_params(self, params): ...

        def log_metrics(self, metrics):
            self.metrics |= metrics

        def log_artifact(self, path): ...

    record = Recorder()
    monkeypatch.setattr(stage, "stage_run", lambda *_: contextlib.nullcontext(record))
    return record


def test_the_same_inputs_give_the_same_version_and_no_work(tmp_path, runs, monkeypatch):
    log = write_days(tmp_path / "log", range(7))
    first = stage.run(config_for(log), tmp_path / "dataset")
    before = written(tmp_path / "dataset")
    elsewhere = stage.run(config_for(log, memory_limit="1GB"), tmp_path / "elsewhere")
    assert elsewhere == first

    monkeypatch.setattr(stage, "build_dataset", None)
    assert stage.run(config_for(log), tmp_path / "dataset") == first
    assert written(tmp_path / "dataset") == before


def test_a_dataset_that_extends_itself_has_no_work_until_the_log_grows(tmp_path, runs, monkeypatch):
    log = write_days(tmp_path / "log", range(7))
    out = tmp_path / "dataset"
    first = stage.run(config_for(log), out)
    config = config_for(log, previous=str(out))
    with monkeypatch.context() as patch:
        patch.setattr(stage, "build_dataset", None)
        assert stage.run(config, out) == first
    write_days(log, [7])
    moved = config_for(log, previous=str(out), end="2026-03-08")
    second = stage.run(moved, out)
    assert second.data_version != first.data_version
    assert second.days["2026-03-07"] == first.days["2026-03-07"]
    with monkeypatch.context() as patch:
        patch.setattr(stage, "build_dataset", None)
        assert stage.run(moved, out) == second


def test_a_simulated_dataset_is_not_simulated_again(tmp_path, runs, monkeypatch, tiny_config):
    first = stage.run(tiny_config, tmp_path / "dataset")
    monkeypatch.setattr(stage, "build_dataset", None)
    assert stage.run(tiny_config, tmp_path / "dataset") == first


def test_the_registered_champion_is_extended_once_there_is_one(tmp_path, runs, monkeypatch):
    log = write_days(tmp_path / "log", range(7))
    config = config_for(log, previous="models:/ranker@champion")
    monkeypatch.setattr(stage, "fetch_catalog", lambda *_: None)
    first = stage.run(config, tmp_path / "first")
    assert first.parent == ""
    model = model_folder(Dataset.open(tmp_path / "first"), tmp_path / "model")
    asked = []

    def fetch(config, uri, folder):
        asked.append(uri)
        return model

    monkeypatch.setattr(stage, "fetch_catalog", fetch)
    write_days(log, [7])
    moved = config_for(log, end="2026-03-08", previous="models:/ranker@champion")
    second = stage.run(moved, tmp_path / "second")
    assert asked == ["models:/ranker@champion"]
    assert second.parent != ""
    new = Dataset.open(tmp_path / "second").catalog
    assert new.extends(Dataset.open(tmp_path / "first").catalog)


def test_another_previous_catalog_is_another_input(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    config = config_for(log)
    first, _ = built(config, tmp_path / "first")
    version = inputs_version(config)
    assert unchanged(config, first.root, version) == first.manifest
    itself = config_for(log, previous=str(model_folder(first, tmp_path / "model")))
    assert inputs_version(itself) == version
    assert unchanged(itself, first.root, version) == first.manifest
    second, _ = built(config_for(log, end="2026-03-06"), tmp_path / "second")
    other = config_for(log, previous=str(second.root))
    assert inputs_version(other) == version
    assert unchanged(other, first.root, version) is None


# Late events.


def add_late(log):
    """Three events of 5 March, two of them positives, that were not there before."""
    rows = [row | {"request": row["request"] + 500} for row in events_of(4)[:3]]
    for row, click in zip(rows, (True, True, False), strict=True):
        row["click"], row["time"] = click, row["time"] + 7
    write(rows, log / "late.parquet")


@BOTH
def test_late_events_are_reported_and_their_day_stays(tmp_path, runs, impressions):
    log = write_days(tmp_path / "log", range(7))
    config = config_for(log, impressions=impressions)
    out = tmp_path / "dataset"
    first = stage.run(config, out)
    files = contents(out / "requests")
    add_late(log)
    second = stage.run(config, out)
    assert second.late == {"2026-03-05": Late(built=120, now=123)}
    assert runs.metrics["late_events"] == 3
    assert contents(out / "requests") == files
    assert second.days == first.days
    # What is not by days counts them: the catalog, popularity, sequences.
    assert second.data_version != first.data_version
    # And it is said again as long as it is so.
    write_days(log, [7])
    moved = config_for(log, impressions=impressions, end="2026-03-08", previous=str(out))
    assert stage.run(moved, out).late == second.late


@BOTH
def test_late_events_are_built_into_their_day_and_the_histories_after_it_on_request(
    tmp_path, runs, impressions
):
    log = write_days(tmp_path / "log", range(7))
    out = tmp_path / "dataset"
    stage.run(config_for(log, impressions=impressions), out)
    add_late(log)
    stage.run(config_for(log, impressions=impressions), out)
    before = Dataset.open(out)
    kept = inodes(before, ["2026-03-04"])
    rebuilt = stage.run(config_for(log, impressions=impressions, late="rebuild"), out)
    assert rebuilt.late == {}
    whole, _ = built(config_for(log, impressions=impressions), tmp_path / "whole")
    assert contents(whole.root) == contents(out)
    assert whole.manifest == rebuilt
    assert inodes(Dataset.open(out), ["2026-03-04"]) == kept


def test_late_events_before_the_windows_are_reported_for_the_histories_that_miss_them(
    tmp_path, runs
):
    log = write_days(tmp_path / "log", range(7))
    out = tmp_path / "dataset"
    stage.run(config_for(log), out)
    row = events_of(1)[0] | {"request": 77_777, "click": True}
    write([row], log / "late.parquet")
    manifest = stage.run(config_for(log), out)
    assert manifest.late == {"before 2026-03-04": Late(built=360, now=361)}
    rebuilt = stage.run(config_for(log, late="rebuild"), out)
    assert rebuilt.late == {}
    whole, _ = built(config_for(log), tmp_path / "whole")
    assert contents(whole.root) == contents(out)


def test_days_that_have_left_the_log_are_not_late(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    (log / "00.parquet").unlink()
    write_days(log, [7])
    moved = config_for(log, end="2026-03-08", pretrain_days=2, previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    assert days_built(steps) == ["2026-03-08"]
    assert second.manifest.late == {}


# Kills.


class Killed(BaseException):
    """Stands for a signal: no handler of ours catches it."""


class Killing:
    """Builds, but is killed at a step; keeps the steps that it began."""

    def __init__(self, at):
        self.at, self.steps = at, []

    def __call__(self, config, root, on_step, **settings):
        return build_dataset(config, root, self.step, **settings)

    def step(self, text):
        self.steps.append(text)
        if len(self.steps) == self.at:
            raise Killed


def test_a_build_killed_at_any_step_shows_nothing_and_goes_on(tmp_path, runs, monkeypatch):
    log = write_days(tmp_path / "log", range(8))
    out = tmp_path / "dataset"
    stage.run(config_for(log, history_length=3), out)
    earlier = contents(out)
    config = config_for(log)
    whole, steps = built(config, tmp_path / "whole")
    finished = []
    for at in range(1, len(steps) + 1):
        build = Killing(at)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(stage, "build_dataset", build)
            stage.run(config, out)
        if len(build.steps) < at:
            break
        assert contents(out) == earlier
        # A day is finished once the next one has begun.
        finished += days_built(build.steps)[:-1]
    assert finished
    assert len(finished) == len(set(finished))
    assert stage.run(config, out) == whole.manifest
    assert contents(out) == contents(whole.root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "log", "whole"]


KILLED = """
import os, signal, sys
from pathlib import Path
from thawline.config import parse_config
from thawline.data.windows import build_dataset
from thawline.folders import resumable_folder

def step(text):
    if text == "writing the requests of 2026-03-06":
        os.kill(os.getpid(), signal.SIGKILL)

with resumable_folder(sys.argv[2]) as folder:
    build_dataset(parse_config(Path(sys.argv[1]).read_text()), folder, step)
"""


def test_a_killed_process_leaves_its_finished_days_to_the_next_one(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    config, out = config_for(log), tmp_path / "dataset"
    (tmp_path / "config.yaml").write_text(config.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.yaml"), str(out)]
    ended = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    assert not out.exists()
    steps = []
    with resumable_folder(out) as folder:
        build_dataset(config, folder, steps.append)
    assert days_built(steps) == ["2026-03-06", "2026-03-07"]
    whole, _ = built(config, tmp_path / "whole")
    assert contents(out) == contents(whole.root)
    assert Dataset.open(out).manifest == whole.manifest


def test_a_killed_build_of_other_inputs_is_not_gone_on_with(tmp_path):
    log = write_days(tmp_path / "log", range(7))

    def step(text):
        if text == "writing the requests of 2026-03-06":
            raise Killed

    with pytest.raises(Killed), resumable_folder(tmp_path / "dataset") as folder:
        build_dataset(config_for(log, history_length=3), folder, step)
    with resumable_folder(tmp_path / "dataset") as folder:
        build_dataset(config_for(log), folder)
    whole, _ = built(config_for(log), tmp_path / "whole")
    assert contents(tmp_path / "dataset") == contents(whole.root)


def test_a_full_disk_is_named_and_what_is_finished_stays(tmp_path):
    log, out = write_days(tmp_path / "log", range(7)), tmp_path / "dataset"

    def step(text):
        if text == "writing the requests of 2026-03-06":
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(DataError, match="no space is left on its disk"),
        resumable_folder(out) as folder,
    ):
        build_dataset(config_for(log), folder, step)
    assert not out.exists()
    steps = []
    with resumable_folder(out) as folder:
        build_dataset(config_for(log), folder, steps.append)
    assert days_built(steps) == ["2026-03-06", "2026-03-07"]


def test_a_swap_that_was_killed_half_way_is_undone_or_cleaned_up(tmp_path):
    out = tmp_path / "dataset"
    out.mkdir()
    (out / "model.json").touch()
    out.rename(tmp_path / ".dataset.123.old")
    with pytest.raises(DataError), resumable_folder(out):
        raise DataError("no", "none")
    assert [file.name for file in out.iterdir()] == ["model.json"]
    (tmp_path / ".dataset.123.old").mkdir()
    with resumable_folder(out) as folder:
        (folder / "new").touch()
    assert [file.name for file in out.iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["dataset"]


def test_two_builds_of_one_folder_at_once_are_refused(tmp_path):
    with (
        resumable_folder(tmp_path / "dataset"),
        pytest.raises(BusyError, match="another process builds"),
        resumable_folder(tmp_path / "dataset"),
    ):
        pass


# Bad input.


def test_an_empty_day_inside_the_window_is_built_and_taken_over_empty(tmp_path):
    log = write_days(tmp_path / "log", [0, 1, 2, 3, 5, 6])
    first, steps = built(config_for(log), tmp_path / "first")
    assert "2026-03-05" in days_built(steps)
    assert first.manifest.requests_by_day["2026-03-05"] == 0
    assert part_files(first, "2026-03-05") == []
    write_days(log, [7])
    moved = config_for(log, end="2026-03-08", previous=str(first.root))
    second, steps = built(moved, tmp_path / "second")
    assert days_built(steps) == ["2026-03-08"]
    assert second.manifest.requests_by_day["2026-03-05"] == 0
    # Events that come for it later are late.
    write_days(log, [4])
    third, _ = built(moved, tmp_path / "third", [second.root])
    assert third.manifest.late == {"2026-03-05": Late(built=0, now=120)}


def test_two_files_that_hold_the_same_day_count_it_once(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    once, _ = built(config_for(log), tmp_path / "once")
    write(events_of(4), log / "04-again.parquet")
    with pytest.raises(DataError, match="120 duplicate"):
        built(config_for(log), tmp_path / "refused")
    twice, _ = built(config_for(log, max_rejected=0.2), tmp_path / "twice", [once.root])
    assert twice.manifest.rejected == {"duplicate": 120}
    assert twice.manifest.days == once.manifest.days
    assert twice.manifest.late == {}


def test_two_files_that_share_a_day_are_one_day(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    whole, _ = built(config_for(log), tmp_path / "whole")
    rows = events_of(4)
    (log / "04.parquet").unlink()
    write(rows[:60], log / "a" / "day=2026-03-05" / "part.parquet")
    write(rows[60:], log / "b" / "day=2026-03-05" / "part.parquet")
    split, _ = built(config_for(log), tmp_path / "split")
    assert split.manifest.data_version == whole.manifest.data_version


def test_ids_equal_to_the_padding_and_unknown_rows_are_items_like_others(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    dataset, _ = built(config_for(log), tmp_path / "dataset")
    ids = dataset.catalog.item_id.to_pylist()
    assert {0, 1} <= set(ids)
    files = dataset.request_files("train")
    rows = pq.read_table(files, columns=["candidate_row"], partitioning=None).to_pylist()
    shown = {row for request in rows for row in request["candidate_row"]}
    assert min(shown) >= 2
    assert {ids.index(0) + 2, ids.index(1) + 2} <= shown


def test_a_previous_dataset_of_another_schema_version_is_refused_by_name(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    first, _ = built(config_for(log), tmp_path / "first")
    path = first.root / "manifest.json"
    tree = json.loads(path.read_text(encoding="utf-8")) | {"schema_version": 1}
    path.write_text(json.dumps(tree), encoding="utf-8")
    expected = f"schema version 1; this Thawline reads {SCHEMA_VERSION}"
    with pytest.raises(DataError, match=expected):
        Dataset.open(first.root)
    with pytest.raises(DataError, match=expected):
        built(config_for(log, previous=str(first.root)), tmp_path / "second")
    # Where it only stands in the place of the new one, it is replaced.
    _, steps = built(config_for(log), tmp_path / "third", [first.root])
    assert len(days_built(steps)) == 4


def test_a_previous_folder_that_is_neither_dataset_nor_model_is_refused(tmp_path):
    log = write_days(tmp_path / "log", range(7))
    with pytest.raises(DataError, match=r"windows\.previous: .*nowhere holds neither"):
        built(config_for(log, previous=str(tmp_path / "nowhere")), tmp_path / "dataset")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.json").write_text("[]", encoding="utf-8")
    write([], tmp_path / "model" / "catalog.parquet")
    with pytest.raises(DataError, match=r"catalog\.parquet has no column 'item_id'"):
        built(config_for(log, previous=str(tmp_path / "model")), tmp_path / "dataset")


def test_the_log_schema_of_these_tests_has_the_padding_rows_id():
    assert SCHEMA.field("item").type == pa.int64()
    assert 0 in {row["item"] for row in events_of(0)}
