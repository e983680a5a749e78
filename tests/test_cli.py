import json
import os
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from thawline import __version__, cli

TINY = {
    "simulate": {"impressions": 20_000, "users": 200, "items": 400, "days": 12},
    "windows": {
        "test_days": 2,
        "finetune_days": 5,
        "pretrain_days": 5,
        "tiers": {"head": 20, "torso": 5},
        "holdout_users": 0.2,
    },
    "model": {"dim": 8, "ffn": 8, "layers": 1, "mlp": [8]},
    "pretrain": {"epochs": 1},
    "finetune": {"epochs": 2, "batch_size": 64},
    "gate": {"min_auc": 0.0},
    "tracking": {"model_name": "tiny-ranker"},
}


SCORE = """
import json, mlflow, pandas as pd
model = mlflow.pyfunc.load_model("models:/tiny-ranker@champion")
scores = model.predict(pd.DataFrame({"history": [[1, 2, 3]], "candidates": [[4, 5]]}))
print(json.dumps({action: scores[action][0] for action in scores.columns}))
"""
"""What another process does with the registered model."""


@pytest.fixture
def invoke(monkeypatch, capfd):
    """Runs the command as a shell would: exit code, standard output, standard error."""

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["thawline", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"workdir": str(tmp_path / "runs")}))
    return path


def test_help_lists_every_stage():
    result = CliRunner().invoke(cli.app, ["--help"])

    assert result.exit_code == 0
    for command in (
        "run", "simulate", "windows", "pretrain", "finetune", "evaluate", "register", "config",
        "compile",
    ):  # fmt: skip
        assert f" {command} " in result.stdout


def test_the_version_is_printed(invoke):
    assert invoke("--version") == (0, f"{__version__}\n", "")


def test_the_config_is_printed_with_its_defaults_and_overrides(invoke, tiny):
    code, out, _ = invoke("config", "--config", tiny, "--set", "finetune.recipe=co-train")

    config = yaml.safe_load(out)
    assert code == 0
    assert config["finetune"]["recipe"] == "co-train"
    assert config["pretrain"]["epochs"] == 1
    assert config["evaluation"]["hit_at"] == 3


def test_the_schema_is_json(invoke):
    code, out, _ = invoke("config", "--schema")

    assert code == 0
    assert "finetune" in json.loads(out)["properties"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "finetun.epochs=3"], "did you mean finetune?"),
        (["--set", "finetune.recipe=freeze-until-lst"], "did you mean freeze-until-last?"),
        (["--set", "tracking.model_name=my ranker"], "tracking.model_name"),
        (["--runner", "nowhere"], "no runner 'nowhere'"),
    ],
)
def test_an_error_of_the_user_is_printed_without_a_traceback_before_any_work(
    invoke, tiny, tmp_path, arguments, message
):
    code, _, err = invoke("run", "--config", tiny, *arguments)

    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "runs" / "dataset").exists()


@pytest.mark.parametrize("kept", ["manifest.json", "thesis.tex"])
def test_a_folder_of_something_else_is_not_replaced(invoke, tiny, tmp_path, kept):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / kept).write_text("years of work")

    for place in ("mine", f"mine/{kept}"):
        code, _, err = invoke("finetune", "-c", tiny, "--model", tmp_path / place)
        assert code == 2
        assert "something else than a model" in " ".join(err.split())
    assert (tmp_path / "mine" / kept).read_text() == "years of work"


@pytest.mark.slow
def test_run_goes_from_nothing_to_a_registered_model_that_scores_and_again_to_the_next_version(
    invoke, tiny, tmp_path
):
    for version in ("1", "2"):
        code, out, err = invoke("run", "--config", tiny)

        assert code == 0, err
        assert f"models:/tiny-ranker@champion (version {version})" in out
        assert "freeze-until-last, 2 epochs" in out

    workdir = tmp_path / "runs"
    evaluation = json.loads((workdir / "evaluation" / "evaluation.json").read_text())
    assert set(evaluation["metrics"]) == {"next", "in_window"}
    # The second run was gated against the first, which is the same model.
    assert evaluation["champion"]["version"] == "1"
    assert "the champion's" in evaluation["reasons"][1]
    assert evaluation["gate"]["rules"][1]["value"] == 0
    assert evaluation["metrics"]["next"]["oracle"]["click"]["auc"] > 0.6
    assert evaluation["schedule"]["components"]["item"]["windows"] == [[1.0, 2.0]]
    assert (workdir / "evaluation" / "report.html").stat().st_size > 10_000

    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{workdir / 'mlflow.db'}"}
    scored = subprocess.run(
        [sys.executable, "-c", SCORE], env=environment, capture_output=True, text=True, check=True
    )
    scores = json.loads(scored.stdout)
    assert set(scores) == {"save", "click"}
    assert all(0 < value < 1 for values in scores.values() for value in values)


@pytest.mark.slow
def test_the_stages_run_one_by_one_and_the_same_seed_gives_the_same_model(invoke, tiny, tmp_path):
    for command in ("windows", "pretrain", "finetune", "evaluate", "register"):
        code, out, err = invoke(command, "--config", tiny)
        assert code == 0, err
        if command == "finetune":
            assert "  ············|━━━━━━━━━━━━  item\n" in out
    assert "tiny-ranker version 1 @champion" in out
    again = tmp_path / "again"

    assert invoke("finetune", "--config", tiny, "--model", again)[0] == 0

    for name in ("ranker.safetensors", "tables/item.safetensors"):
        first = tmp_path / "runs" / "model" / name
        assert first.read_bytes() == (again / name).read_bytes()


@pytest.mark.slow
def test_a_model_below_the_gate_is_reported_and_not_registered(invoke, tiny, tmp_path):
    code, out, _ = invoke("run", "--config", tiny, "--set", "gate.min_auc=1.0")

    assert code == 0
    assert "refused" in out
    assert "below gate.min_auc 1" in " ".join(out.split())
    assert not (tmp_path / "runs" / "registration").exists()
