"""Lines on standard error, for people and for a cluster."""

import json
import sys
from datetime import UTC, datetime

import pytest
from mlflow_helpers import make_config

from thawline import cli, logs, progress
from thawline.errors import ConfigError, DataError
from thawline.tracking import runs

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    monkeypatch.delenv(logs.IN_A_POD, raising=False)


@pytest.fixture
def lines(capsys):
    """What was written since, as JSON."""

    def read():
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    return read


def test_a_line_has_its_time_level_stage_message_and_run(monkeypatch, lines):
    monkeypatch.setenv("THAWLINE_LOG", "json")
    before = datetime.now(UTC)
    with logs.stage("finetune", "0123"):
        logs.say("goes on\nafter step 4", "warning")
    logs.say("héron")
    inside, outside = lines()
    assert list(inside) == ["time", "level", "stage", "message", "run_id"]
    assert abs((datetime.fromisoformat(inside.pop("time")) - before).total_seconds()) < 30
    assert inside == {
        "level": "warning",
        "stage": "finetune",
        "message": "goes on\nafter step 4",
        "run_id": "0123",
    }
    assert (outside["stage"], outside["run_id"], outside["message"]) == ("", "", "héron")


@pytest.mark.parametrize(
    ("chosen", "in_a_pod", "terminal", "expected"),
    [
        ("", False, False, False),
        ("", True, False, True),
        ("", True, True, False),
        ("json", False, True, True),
        ("text", True, False, False),
    ],
)
def test_json_is_for_clusters_unless_the_variable_says_otherwise(
    monkeypatch, chosen, in_a_pod, terminal, expected
):
    if chosen:
        monkeypatch.setenv("THAWLINE_LOG", chosen)
    if in_a_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert logs.as_json() is expected


def test_another_word_for_the_variable_is_refused_and_does_not_hide_the_error(monkeypatch, capsys):
    monkeypatch.setenv("THAWLINE_LOG", "xml")
    with pytest.raises(ConfigError, match="THAWLINE_LOG is 'xml'"):
        logs.say("anything")
    logs.fail(DataError("no [file] there", "make one"))
    assert "Error: no [file] there\n  What to do: make one" in capsys.readouterr().err


def test_secrets_of_the_environment_and_of_uris_are_in_no_line(monkeypatch, lines):
    monkeypatch.setenv("THAWLINE_LOG", "json")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse")
    monkeypatch.setenv("KFP_HEADERS", "X-Auth: battery-staple\nX-Other: abc")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key.json")
    logs.say("postgresql://me:p@db refused correct-horse, battery-staple, abc and /etc/key.json")
    assert lines()[0]["message"] == "postgresql://***@db refused ***, ***, abc and /etc/key.json"


def test_a_commands_error_is_a_line_with_its_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("THAWLINE_LOG", "json")
    monkeypatch.setattr("sys.argv", ["thawline", "config", "-c", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["level"] == "error"
    assert "none.yaml" in told["message"]
    assert "\n  What to do: " in told["message"]


def test_progress_is_a_line_now_and_then(monkeypatch, lines):
    monkeypatch.setenv("THAWLINE_LOG", "json")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress_bar("pretrain", 2_000) as show:
        show(500)
    assert [line["message"] for line in lines()] == ["pretrain: 500 of 2,000 (25%)"]


def test_a_stage_says_when_it_begins_and_how_it_ends(sqlite_config, monkeypatch, lines):
    monkeypatch.setenv("THAWLINE_LOG", "json")
    with runs.stage_run(sqlite_config, "windows") as run:
        logs.say("inside")
    told = lines()
    assert [line["message"] for line in told] == [
        "windows begins",
        "inside",
        "windows ends: FINISHED",
    ]
    assert {(line["stage"], line["run_id"]) for line in told} == {("windows", run.run_id)}
    with (
        pytest.raises(DataError),
        runs.stage_run(make_config(sqlite_config.workdir), "windows"),
    ):
        raise DataError("the log is empty", "look at events.path")
    last = lines()[-1]
    assert last["level"] == "error"
    assert last["message"] == (
        "windows ends: FAILED: DataError: the log is empty\n  What to do: look at events.path"
    )


def test_for_people_a_stage_says_nothing_of_the_kind(sqlite_config, capsys):
    with runs.stage_run(sqlite_config, "windows"):
        pass
    assert capsys.readouterr().err == ""
