"""Aliases moved by a person: promote, roll back, list; versions are made without a model."""

import pytest
from mlflow_helpers import make_config
from typer.testing import CliRunner

from thawline.cli import app
from thawline.errors import TrackingError
from thawline.tracking.promotion import Promotion, list_versions, promote, rollback
from thawline.tracking.server import connect, tracking_uri

pytest_plugins = ["mlflow_fixtures"]
pytestmark = pytest.mark.usefixtures("no_mlflow_environment")

NAME = "thawline-ranker"


def add_version(config, **tags):
    client = connect(config)
    if not client.search_registered_models(f"name = '{NAME}'"):
        client.create_registered_model(NAME)
    tags = {f"thawline.{key}": value for key, value in tags.items()}
    made = client.create_model_version(NAME, "file:///nowhere", tags=tags)
    client.set_registered_model_alias(NAME, "challenger", made.version)
    return made


@pytest.fixture
def config(sqlite_config):
    """Three versions; the newest is the challenger."""
    for number in (1, 2, 3):
        add_version(
            sqlite_config,
            recipe=f"recipe-{number}",
            **{"auc.save.next": f"0.7{number}1177", "auc.save.next.cold": f"0.5{number}2222"},
        )
    return sqlite_config


def champion(config):
    return str(connect(config).get_model_version_by_alias(NAME, "champion").version)


def test_the_challenger_is_promoted_once_and_the_one_before_is_remembered(config):
    assert promote(config, "1") == Promotion(NAME, "1", "champion", "", moved=True)
    assert promote(config) == Promotion(NAME, "3", "champion", "1", moved=True)
    promoted_at = connect(config).get_model_version(NAME, "3").tags["thawline.promoted_at"]
    assert promote(config) == Promotion(NAME, "3", "champion", "1", moved=False)
    tags = connect(config).get_model_version(NAME, "3").tags
    assert tags["thawline.previous_champion"] == "1"
    assert tags["thawline.promoted_at"] == promoted_at
    assert champion(config) == "3"


def test_rollback_goes_back_one_promotion_at_a_time(config):
    for number in ("1", "2", "3"):
        promote(config, number)
    assert rollback(config) == Promotion(NAME, "2", "champion", "3", moved=True)
    assert rollback(config) == Promotion(NAME, "1", "champion", "2", moved=True)
    with pytest.raises(TrackingError, match=r"no version .* had the alias 'champion' before"):
        rollback(config)
    assert champion(config) == "1"


def test_an_older_version_named_by_its_number_can_be_taken_back_too(config):
    promote(config, "1")
    promote(config, "3")
    promote(config, "1")
    assert champion(config) == "1"
    assert rollback(config).version == "3"


def test_a_deleted_version_is_not_rolled_back_to(config):
    promote(config, "1")
    promote(config, "2")
    connect(config).delete_model_version(NAME, "1")
    with pytest.raises(
        TrackingError, match=r"version 1, which had the alias .*, is deleted"
    ) as told:
        rollback(config)
    assert "thawline promote --version N" in told.value.remedy
    assert champion(config) == "2"


def test_after_the_champion_is_deleted_nothing_is_guessed(config):
    promote(config, "2")
    connect(config).delete_model_version(NAME, "2")
    with pytest.raises(TrackingError, match="no version of thawline-ranker has the alias 'champ"):
        rollback(config)
    assert promote(config).version == "3"


@pytest.mark.parametrize(
    ("version", "alias", "message"),
    [
        ("7", "challenger", "there is no version 7 of thawline-ranker"),
        ("", "nobody", "no version of thawline-ranker has the alias 'nobody'"),
    ],
)
def test_what_is_not_there_is_not_promoted(config, version, alias, message):
    with pytest.raises(TrackingError, match=message) as told:
        promote(config, version, alias)
    assert "see `thawline versions`" in told.value.remedy


def test_without_any_model_each_command_says_so(sqlite_config):
    with pytest.raises(TrackingError, match="has the alias 'challenger'"):
        promote(sqlite_config)
    with pytest.raises(TrackingError, match="has the alias 'champion'"):
        rollback(sqlite_config)
    with pytest.raises(TrackingError, match="there is no version of thawline-ranker"):
        list_versions(sqlite_config)


def test_a_version_that_is_not_ready_is_not_promoted(config, monkeypatch):
    pending = connect(config).get_model_version(NAME, "2")
    monkeypatch.setattr(type(pending), "status", "PENDING_REGISTRATION")
    with pytest.raises(TrackingError, match="version 2 is PENDING_REGISTRATION"):
        promote(config, "2")


def test_the_alias_of_the_one_in_use_cannot_be_challenger(tmp_path):
    with pytest.raises(TrackingError, match=r"tracking\.alias 'challenger' is the alias of a"):
        promote(make_config(tmp_path, alias="challenger"))


def test_the_commands_list_promote_and_roll_back(config):
    def thawline(*arguments):
        options = ["--set", f"tracking.uri={tracking_uri(config)}"]
        asked = CliRunner().invoke(app, [*arguments, *options], env={"COLUMNS": "80"})
        assert asked.exit_code == 0, asked.output
        return asked.output

    assert thawline("promote", "--version", "1") == f"{NAME} version 1 is @champion\n"
    assert thawline("promote") == f"{NAME} version 3 is @champion, before: version 1\n"
    assert thawline("promote") == f"{NAME} version 3 is already @champion, before: version 1\n"
    listed = [line.split() for line in thawline("versions").splitlines() if "recipe-" in line]
    assert listed == [
        ["3", "challenger,", "champion", "recipe-3", "1", "0.7312", "0.5322"],
        ["2", "recipe-2", "0.7212", "0.5222"],
        ["1", "recipe-1", "0.7112", "0.5122"],
    ]
    assert thawline("rollback") == f"{NAME} version 1 is @champion again, not version 3\n"
