from pathlib import Path

import pytest

from thawline.config import PRESETS, Config, dump_config, load_config, parse_config
from thawline.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


def test_the_dumped_config_reads_back_equal():
    config = parse_config("simulate: {users: 10}\nfinetune: {recipe: co-train}\nseed: 7\n")

    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_valid_config(path):
    assert isinstance(load_config(path), Config)


def test_overrides_win_over_the_file_and_are_yaml():
    config = parse_config(
        "simulate: {}\nfinetune: {epochs: 5}\n",
        [
            "finetune.epochs=2",
            "windows.pretrain_overlap=true",
            "model.mlp=[8, 4]",
            "windows.end=null",
        ],
    )

    assert config.finetune.epochs == 2
    assert config.windows.pretrain_overlap is True
    assert config.model.mlp == (8, 4)
    assert config.windows.end is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_the_columns_and_keys_beside_it_win(preset):
    config = parse_config(
        f"events: {{preset: {preset}, path: log, columns: {{timestamp: when}}, timestamp_unit: ns}}"
    )

    assert config.events.columns.timestamp == "when"
    assert config.events.columns.user_id == PRESETS[preset]["columns"]["user_id"]
    assert config.events.timestamp_unit == "ns"
    assert list(config.events.actions) == list(PRESETS[preset]["actions"])


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("simulate: {}\nfinetun: {}", "finetun: unknown key", "did you mean finetune?"),
        (
            "simulate: {}\nfinetune: {epoch: 3}",
            "finetune.epoch: unknown key",
            "did you mean finetune.epochs?",
        ),
        ("simulate: {}\ngate: {zzz: 1}", "gate.zzz: unknown key", "known keys there: holdout"),
        ("simulate: {}\nfinetune: {epochs: 0}", "finetune.epochs", "config --schema"),
        ("simulate: {}\nmodel: {dim: 10, heads: 4}", "must be a multiple of heads", "--schema"),
        ("simulate: {}\nwindows: {tiers: {head: 5}}", "must be above torso", "--schema"),
        ("simulate: {}\nmodel: {gradient_paths: [history, history]}", "a path twice", "--schema"),
        (
            "simulate: {}\ntables: {user: {column: user_id, colum: x}}",
            "tables.user.colum: unknown key",
            "did you mean tables.user.column?",
        ),
        (
            "simulate: {}\nfinetune: {schedule: {item: {window: []}}}",
            "finetune.schedule.item.window: unknown key",
            "did you mean finetune.schedule.item.windows?",
        ),
        (
            "simulate: {}\ntables: {itme: {optimizer: sgd}}",
            "tables.itme.column: Field required",
            "did you mean tables.item?",
        ),
        (
            "simulate: {}\ntables: {user: {rows: 9}}",
            "tables.user.column: Field required",
            "config --schema",
        ),
        (
            "simulate: {}\ntables: {item: {learning_rate: .inf}}",
            "tables.item.learning_rate: Input should be a finite number",
            "config --schema",
        ),
        ("", "set events.path to a log", "--schema"),
        ("simulate: {}\nevents: {path: x}", "both set", "--schema"),
        ("[1, 2]", "holds a list", "write keys and values"),
        ("a: [", "is not YAML", "fix the syntax"),
    ],
)
def test_a_config_that_cannot_be_used_names_the_key_and_the_remedy(text, message, remedy):
    with pytest.raises(ConfigError) as error:
        parse_config(text)

    assert message in error.value.what
    assert remedy in error.value.remedy


@pytest.mark.parametrize("override", ["epochs", "=3", "a b=3", "seed.deeper=1", "seed=[", "a..b=1"])
def test_an_override_that_cannot_be_read_is_refused(override):
    with pytest.raises(ConfigError):
        parse_config("simulate: {}\nseed: 1\n", [override])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_every_key_is_described_or_has_a_plain_name():
    """The schema is the reference: a key whose default needs explaining has a description."""
    schema = Config.model_json_schema()
    described = [
        field
        for section in schema["$defs"].values()
        for field in section.get("properties", {}).values()
        if "description" in field
    ]
    assert len(described) > 30
    assert all(section.get("description") for section in schema["$defs"].values())
