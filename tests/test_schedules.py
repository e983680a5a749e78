"""Cron expressions, and recurring runs that follow a file, against an API on loopback."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from pipelines import schedules
from pipelines.cron import parse
from pipelines.schedule_spec import read_schedules
from thawline.errors import ConfigError

pytest_plugins = ["kfp_fixtures"]

EXAMPLE = Path(__file__).parent.parent / "k8s" / "schedule.yaml"
NOW = datetime(2026, 11, 30, 14, 0, tzinfo=UTC)
"""A Monday."""
BY_HAND = {
    "recurring_run_id": "by-hand",
    "display_name": "weekly",
    "description": "made in the UI",
    "status": "ENABLED",
}


def runs(text, count=3, after=NOW):
    return [f"{moment:%m-%d %H:%M:%S}" for moment in parse(text).next_runs(count, after)]


@pytest.mark.parametrize(
    ("text", "fields", "next_runs"),
    [
        # A crontab's five fields: Kubeflow would take them for seconds, minutes, hours, ...
        ("30 3 * * MON", "0 30 3 * * MON", ["12-07 03:30:00", "12-14 03:30:00"]),
        ("0 30 3 * * 1", "0 30 3 * * 1", ["12-07 03:30:00", "12-14 03:30:00"]),
        ("15,45 * * * *", "0 15,45 * * * *", ["11-30 14:15:00", "11-30 14:45:00"]),
        ("*/20 * * * * ?", "*/20 * * * * ?", ["11-30 14:00:20", "11-30 14:00:40"]),
        ("5/50 * * * *", "0 5/50 * * * *", ["11-30 14:05:00", "11-30 14:55:00"]),
        ("0 0 2-7/3 jan ?", "0 0 0 2-7/3 jan ?", ["01-02 00:00:00", "01-05 00:00:00"]),
        ("0 6 * * sat-sat", "0 0 6 * * sat-sat", ["12-05 06:00:00", "12-12 06:00:00"]),
        # Both kinds of day: either suffices. The first of December is a Tuesday.
        ("0 0 1 * FRI", "0 0 0 1 * FRI", ["12-01 00:00:00", "12-04 00:00:00"]),
        # But a star with a step is still a star: Mondays among the 1st, 11th, 21st and 31st.
        ("0 0 */10 * MON", "0 0 0 */10 * MON", ["12-21 00:00:00", "01-11 00:00:00"]),
        ("0 0 31 * *", "0 0 0 31 * *", ["12-31 00:00:00", "01-31 00:00:00", "03-31 00:00:00"]),
        ("@Daily", "0 0 0 * * *", ["12-01 00:00:00", "12-02 00:00:00"]),
        ("0 0 29 2 *", "0 0 0 29 2 *", ["02-29 00:00:00"]),
    ],
)
def test_an_expression_means_what_kubeflow_takes_it_for(text, fields, next_runs):
    assert parse(text).text == fields
    assert runs(text, len(next_runs)) == next_runs


def test_the_next_run_is_strictly_later_and_not_after_the_end():
    noon = datetime(2026, 12, 1, 12, tzinfo=UTC)
    assert runs("0 12 * * *", 1, noon) == ["12-02 12:00:00"]
    assert parse("0 12 * * *").next_runs(3, NOW, until=noon) == [noon]
    berlin = datetime.fromisoformat("2026-12-01T12:59:59+01:00")
    assert runs("0 12 * * *", 1, berlin) == ["12-01 12:00:00"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("60 3 * * *", "minutes '60' is not 0 to 59"),
        ("61 0 3 * * *", "seconds '61' is not 0 to 59"),
        ("0 24 * * *", "hours '24' is not 0 to 23"),
        ("0 0 0 * *", "day of month '0' is not 1 to 31"),
        ("0 0 * 13 *", "month '13' is not 1 to 12 or JAN to DEC"),
        ("0 0 * MAI *", "month 'MAI' is not 1 to 12"),
        ("0 0 * * 7", "day of week '7' is not 0 to 6 or SUN to SAT"),
        ("0 0 * * FRI-MON", "day of week 'FRI-MON' ends before it starts"),
        ("0 0 L * *", "day of month 'L'"),
        ("0 0 * * MON#2", "day of week 'MON#2'"),
        ("*/0 * * * *", "minutes '*/0': the step has to be 1 to 59"),
        ("*/90 * * * *", "minutes '*/90': the step has to be 1 to 59"),
        ("1,,2 * * * *", "minutes ''"),
        ("0 0 31 2 *", "day of month 31 is never in month 2"),
        ("0 0 31 apr,6 ?", "day of month 31 is never in month apr,6"),
        ("0 3 * *", "4 fields"),
        ("", "0 fields"),
        ("TZ=Europe/Berlin 0 3 * * *", "Kubeflow counts in UTC"),
        ("@every 1h", "@every is unknown"),
    ],
)
def test_a_malformed_expression_is_refused_with_the_field(text, field):
    with pytest.raises(ConfigError) as caught:
        parse(text, "weekly.cron")
    assert field in str(caught.value)
    assert str(caught.value).startswith(f"weekly.cron: {text!r}")


@pytest.fixture(autouse=True)
def by_hand(kfp):
    kfp.recurring["by-hand"] = dict(BY_HAND)


@pytest.fixture
def schedule(endpoint, invoke):
    return lambda *arguments: invoke("schedule", *arguments)


@pytest.fixture
def write(tmp_path):
    """A file of schedules, of a small pipeline that lies beside it."""
    declared = {
        "config": {"parameterType": "STRING", "isOptional": True},
        "rounds": {"parameterType": "NUMBER_INTEGER", "isOptional": True},
    }
    root = {"inputDefinitions": {"parameters": declared}, "dag": {"tasks": {}}}
    pipeline = {"pipelineInfo": {"name": "small"}, "root": root}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(pipeline))

    def written(owner=None, **entries):
        tree = {
            **(owner or {}),
            "schedules": {
                name: {"cron": "0 3 * * MON", "pipeline": "small.yaml", **entry}
                for name, entry in entries.items()
            },
        }
        path = tmp_path / "schedule.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return written


def made(kfp):
    return [each for each in kfp.recurring.values() if each["recurring_run_id"] != "by-hand"]


def told(out):
    return [line.split(";")[0] for line in out.splitlines()]


def test_a_new_schedule_becomes_a_recurring_run_without_overlap_or_catchup(
    kfp, schedule, write, tmp_path
):
    (tmp_path / "my.yaml").write_text("simulate: {}\n")
    entry = {
        "about": "Retrains.",
        "config": "my.yaml",
        "inputs": {"rounds": 2},
        "start": "2096-12-01",
        "end": "2097-06-01T00:00:00+02:00",
    }
    code, out, _ = schedule(write(weekly=entry))
    assert code == 0
    (body,) = kfp.bodies("/recurringruns")
    description = body.pop("description")
    assert re.fullmatch(
        r"Retrains\. \[thawline set=thawline name=weekly spec=[0-9a-f]{16}\]", description
    )
    assert body == {
        "display_name": "weekly",
        "pipeline_version_reference": {
            "pipeline_id": next(iter(kfp.pipelines)),
            "pipeline_version_id": "v0",
        },
        "experiment_id": next(iter(kfp.experiments)),
        "runtime_config": {"parameters": {"rounds": 2, "config": "simulate: {}\n"}},
        "trigger": {
            "cron_schedule": {
                "cron": "0 0 3 * * MON",
                "start_time": "2096-12-01T00:00:00Z",
                "end_time": "2097-05-31T22:00:00Z",
            }
        },
        "max_concurrency": "1",
        "no_catchup": True,
        "mode": "ENABLE",
        "service_account": "thawline-runner",
    }
    # The first three Mondays after the start.
    assert out == (
        "weekly: created; next (UTC): Mon 2096-12-03 03:00:00, Mon 2096-12-10 03:00:00, "
        "Mon 2096-12-17 03:00:00\n"
    )


def test_an_unchanged_schedule_makes_no_writing_call(kfp, schedule, write):
    file = write(weekly={}, daily={"cron": "0 4 * * *"})
    assert schedule(file)[0] == 0
    done = len(kfp.writes())
    code, out, _ = schedule(file)
    assert (code, told(out)) == (0, ["weekly: unchanged", "daily: unchanged"])
    assert len(kfp.writes()) == done


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cron": "0 5 * * MON"}, "cron"),
        ({"inputs": {"rounds": 3}}, "rounds"),
        ({"max_concurrency": 2, "catchup": True}, "max_concurrency, catchup"),
        ({"end": "2097-01-01"}, "end"),
        ({"about": "Other words."}, "about"),
    ],
)
def test_a_changed_schedule_is_created_anew_before_the_old_one_goes(
    change, named, kfp, schedule, write
):
    schedule(write(weekly={}))
    (old,) = made(kfp)
    done = len(kfp.writes())
    code, out, _ = schedule(write(weekly=change))
    assert (code, told(out)) == (0, [f"weekly: replaced ({named})"])
    old_path = f"/recurringruns/{old['recurring_run_id']}"
    assert [call[:2] for call in kfp.writes()[done:]] == [
        ("POST", "/recurringruns"),
        ("DELETE", old_path),
    ]
    # What is under way goes on.
    assert kfp.queries[-1]["propagation_policy"] == ["ORPHAN"]
    assert schedule(write(weekly=change))[1].startswith("weekly: unchanged")


def test_a_changed_pipeline_or_config_replaces_the_schedule(kfp, schedule, write, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("simulate: {}\n")
    file = write(weekly={"config": "my.yaml"})
    schedule(file)
    config.write_text("simulate: {}\nseed: 3\n")
    assert told(schedule(file)[1]) == ["weekly: replaced (config)"]
    pipeline = tmp_path / "small.yaml"
    pipeline.write_text(pipeline.read_text() + "# another\n")
    assert told(schedule(file)[1]) == ["weekly: replaced (pipeline or experiment)"]
    assert len(kfp.bodies("/pipelines/upload_version")) == 2
    assert [each["status"] for each in made(kfp)] == ["ENABLED"]


def test_one_that_was_taken_out_is_disabled_once(kfp, schedule, write):
    schedule(write(weekly={}, daily={}))
    done = len(kfp.writes())
    _, out, _ = schedule(write(weekly={}))
    assert told(out) == ["weekly: unchanged", "daily: disabled (no longer in the file)"]
    (daily,) = [each for each in made(kfp) if each["display_name"] == "daily"]
    path = f"/recurringruns/{daily['recurring_run_id']}:disable"
    assert [call[:2] for call in kfp.writes()[done:]] == [("POST", path)]
    assert told(schedule(write(weekly={}))[1]) == ["weekly: unchanged"]
    assert told(schedule(write(weekly={}, daily={}))[1])[1] == "daily: enabled"
    assert len(kfp.writes()) == done + 2


def test_one_that_is_paused_in_the_file_is_disabled_and_goes_on_later(kfp, schedule, write):
    schedule(write(weekly={}))
    assert told(schedule(write(weekly={"enabled": False}))[1]) == ["weekly: disabled"]
    assert told(schedule(write(weekly={"enabled": False}))[1]) == ["weekly: unchanged"]
    assert told(schedule(write(weekly={}))[1]) == ["weekly: enabled"]
    assert len(kfp.bodies("/recurringruns")) == 1
    schedule(write(other={"enabled": False}))
    assert kfp.bodies("/recurringruns")[-1]["mode"] == "DISABLE"


def test_others_schedules_are_left_alone(kfp, schedule, write):
    schedule(write(owner={"set": "theirs"}, weekly={}))
    done = len(kfp.writes())
    assert told(schedule(write(weekly={}))[1]) == ["weekly: created"]
    assert told(schedule(write(daily={}))[1])[1] == "weekly: disabled (no longer in the file)"
    theirs = next(each for each in made(kfp) if "set=theirs" in each["description"])
    assert theirs["status"] == "ENABLED"
    assert kfp.recurring["by-hand"] == BY_HAND
    touched = [path for _, path, _ in kfp.writes()[done:]]
    assert not [path for path in touched if theirs["recurring_run_id"] in path or "by-hand" in path]


def test_what_an_interrupted_replacement_left_is_cleared(kfp, schedule, write):
    schedule(write(weekly={"cron": "0 1 * * *"}))
    (old,) = made(kfp)
    kept = dict(old)
    file = write(weekly={})
    schedule(file)
    kfp.recurring[kept["recurring_run_id"]] = kept
    assert told(schedule(file)[1]) == ["weekly: cleared of doubles"]
    assert len(made(kfp)) == 1
    assert told(schedule(file)[1]) == ["weekly: unchanged"]


def test_a_dry_run_says_what_would_change_and_writes_nothing(kfp, schedule, write):
    schedule(write(weekly={}, daily={}, gone={}))
    done, before = len(kfp.writes()), [dict(each) for each in kfp.recurring.values()]
    file = write(weekly={"cron": "0 5 * * MON"}, daily={"enabled": False}, fresh={})
    code, out, _ = schedule(file, "--dry-run")
    assert (code, told(out)) == (
        0,
        [
            "weekly: would be replaced (cron)",
            "daily: would be disabled",
            "fresh: would be created",
            "gone: would be disabled (no longer in the file)",
        ],
    )
    assert len(kfp.writes()) == done
    assert list(kfp.recurring.values()) == before


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"cron": "0 3 * * 8"}, "weekly.cron: '0 3 * * 8': day of week '8' is not 0 to 6"),
        ({"cron": 5}, "schedules.weekly.cron"),
        ({"cronn": "0 3 * * *"}, "schedules.weekly.cronn"),
        ({"inputs": {"round": 1}}, "weekly: the pipeline small has no input 'round'"),
        ({"inputs": {"rounds": True}}, "weekly: rounds: True is not a whole number"),
        ({"inputs": {"config": 3}}, "weekly: config: 3 is not a text"),
        ({"inputs": {"config": "x"}, "config": "my.yaml"}, "config is given twice"),
        ({"config": "absent.yaml"}, "absent.yaml"),
        ({"max_concurrency": 11}, "max_concurrency"),
        ({"start": "2027-01-02", "end": "2027-01-01"}, "end is not after start"),
        ({"image": "x:1"}, "compile it with that image"),
        ({"pipeline": "absent.yaml"}, "absent.yaml"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_call(
    entry, message, kfp, schedule, write
):
    code, _, error = schedule(write(weekly=entry, daily={}))
    assert code == 2
    assert message in " ".join(error.split())
    assert kfp.calls == []


@pytest.mark.parametrize("text", ["schedules: [", "[]", "schedules: {Bad_Name: {cron: '@daily'}}"])
def test_a_malformed_file_is_refused(text, schedule, tmp_path, kfp):
    path = tmp_path / "schedule.yaml"
    path.write_text(text)
    assert schedule(path)[0] == 2
    assert schedule(tmp_path / "absent.yaml")[0] == 2
    assert kfp.calls == []


def test_an_ended_schedule_says_that_it_never_runs_again(schedule, write):
    _, out, _ = schedule(write(weekly={"end": "2020-01-01"}))
    assert out == "weekly: created; next (UTC): never again\n"
    _, out, _ = schedule(write(owner={"set": "none"}))
    assert out == "no schedule\n"


def test_the_example_is_read_and_shows_every_key(monkeypatch):
    owner, wanted = read_schedules(EXAMPLE)
    assert [(each.name, each.entry.enabled) for each in wanted] == [
        ("weekly", True),
        ("monthly-anew", False),
    ]
    assert wanted[0].values["step0_start_from_champion"] is True
    assert wanted[0].package.version.startswith("gpu-")
    assert [change.kind for change in schedules.plan(wanted, [], owner.set)] == ["create", "create"]
    text = EXAMPLE.read_text()
    for key in (*type(owner).model_fields, *type(wanted[0].entry).model_fields):
        assert re.search(rf"^ *(# )?{key}:", text, re.MULTILINE), key
