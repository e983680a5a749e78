import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow_helpers import INT_IDS, STRING_IDS, write_evaluation, write_model

from thawline.data.previous import read_previous
from thawline.errors import DataError, TrackingError
from thawline.model.bundle import Bundle
from thawline.stages import fetch, register, score
from thawline.tracking import packing, registry, runs
from thawline.tracking.server import connect, tracking_uri

pytest_plugins = ["mlflow_fixtures"]
pytestmark = pytest.mark.usefixtures("no_mlflow_environment")

NAME = "thawline-ranker"


@pytest.fixture
def folders(tmp_path):
    write_model(tmp_path / "model", INT_IDS)
    write_evaluation(tmp_path / "evaluation")
    return tmp_path / "model", tmp_path / "evaluation", tmp_path / "registration"


def versions(config):
    return sorted(
        int(version.version) for version in connect(config).search_model_versions(f"name='{NAME}'")
    )


def champion(config):
    return int(connect(config).get_model_version_by_alias(NAME, "champion").version)


def test_a_version_carries_its_origin_and_the_alias(sqlite_config, folders, monkeypatch):
    monkeypatch.setenv("THAWLINE_GIT_COMMIT", "abc123")
    parent = runs.start_parent(sqlite_config, "retrain", {"thawline.pipeline_run_id": "workflow-7"})
    with runs.stage_run(sqlite_config, "finetune", parent) as finetuned:
        pass
    registration = register.run(sqlite_config, *folders, parent_run_id=parent)
    assert registration == registry.Registration(NAME, "1", "champion")
    assert json.loads((folders[2] / "registration.json").read_text()) == {
        "name": NAME,
        "version": "1",
        "alias": "champion",
        "uri": f"models:/{NAME}/1",
    }
    version = connect(sqlite_config).get_model_version_by_alias(NAME, "champion")
    assert version.status == "READY"
    assert version.tags == {
        "thawline.parent_run_id": parent,
        "thawline.data_version": "data-1",
        "thawline.recipe": "freeze-until-last",
        "thawline.version": "0.1.0",
        "thawline.git_commit": "abc123",
        "thawline.gate": "passed",
        "thawline.gate.reasons": "save AUC 0.712 is over gate.min_auc 0.5",
        "thawline.auc.save.next": "0.712346",
        "thawline.log_loss.save.next": "0.250000",
        "thawline.calibration.save.next": "1.010000",
        "thawline.auc.save.next.head": "0.750000",
        "thawline.auc.save.next.cold": "0.500000",
        "thawline.pipeline_run_id": "workflow-7",
        "thawline.run.finetune": finetuned.run_id,
        "thawline.promoted_at": version.tags["thawline.promoted_at"],
        "thawline.aliased": "champion",
    }
    run = connect(sqlite_config).get_run(version.run_id)
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["thawline.model_version"] == f"{NAME}/1"
    (output,) = run.outputs.model_outputs
    logged = connect(sqlite_config).get_logged_model(output.model_id)
    assert logged.status == "READY"
    assert logged.artifact_location == version.source


def test_one_pipeline_run_registers_one_version_however_often_it_tries(sqlite_config, folders):
    parent = runs.start_parent(sqlite_config, "retrain")
    first = register.run(sqlite_config, *folders, parent_run_id=parent)
    again = register.run(sqlite_config, *folders, parent_run_id=parent)
    assert first == again
    assert versions(sqlite_config) == [1]
    assert champion(sqlite_config) == 1


def test_a_later_run_takes_the_alias_and_a_repeated_older_one_does_not_take_it_back(
    sqlite_config, folders
):
    older, newer = (runs.start_parent(sqlite_config, "retrain") for _ in range(2))
    register.run(sqlite_config, *folders, parent_run_id=older)
    register.run(sqlite_config, *folders, parent_run_id=newer)
    assert (versions(sqlite_config), champion(sqlite_config)) == ([1, 2], 2)
    again = register.run(sqlite_config, *folders, parent_run_id=older)
    assert again.version == "1"
    assert (versions(sqlite_config), champion(sqlite_config)) == ([1, 2], 2)


def test_a_version_left_without_its_alias_gets_it_on_the_next_try(
    sqlite_config, folders, monkeypatch
):
    parent = runs.start_parent(sqlite_config, "retrain")

    def down(*_):
        raise ConnectionError("Connection refused")

    client = type(connect(sqlite_config))
    with monkeypatch.context() as broken:
        broken.setattr(client, "set_registered_model_alias", down)
        with pytest.raises(TrackingError, match="giving thawline-ranker version 1 the alias"):
            register.run(sqlite_config, *folders, parent_run_id=parent)
    assert not folders[2].exists()
    registration = register.run(sqlite_config, *folders, parent_run_id=parent)
    assert registration.version == "1"
    assert (versions(sqlite_config), champion(sqlite_config)) == ([1], 1)


def test_a_model_that_did_not_pass_is_refused_with_the_reasons(sqlite_config, folders, tmp_path):
    failed = write_evaluation(tmp_path / "failed", passed=False)
    with pytest.raises(TrackingError, match=r"did not pass the gate.*AUC 0\.41 is under"):
        register.run(sqlite_config, folders[0], failed, folders[2])
    assert connect(sqlite_config).search_registered_models() == []


def test_where_a_person_promotes_a_version_waits_as_challenger(sqlite_config, folders):
    tracking = sqlite_config.tracking.model_copy(update={"promote": "manual"})
    manual = sqlite_config.model_copy(update={"tracking": tracking})
    parent = runs.start_parent(manual, "retrain")
    for _ in range(2):
        registration = register.run(manual, *folders, parent_run_id=parent)
        assert registration == registry.Registration(NAME, "1", "challenger")
    assert list(connect(manual).get_registered_model(NAME).aliases) == ["challenger"]
    tags = connect(manual).get_model_version(NAME, "1").tags
    assert "thawline.promoted_at" not in tags
    assert tags["thawline.aliased"] == "challenger"


def test_a_version_names_what_it_was_compared_with_and_made_from(sqlite_config, folders, tmp_path):
    def stage(name, data_version, parent=""):
        with runs.stage_run(sqlite_config, name, parent) as run:
            run.log_params({"data_version": data_version})
        return run.run_id

    # The pipeline took the dataset and the table of an earlier run from its cache.
    stage("windows", "data-0")
    windows, pretrain = stage("windows", "data-1"), stage("pretrain", "data-1")
    stage("pretrain", "data-0")
    parent = runs.start_parent(sqlite_config, "retrain")
    first, last = (stage("finetune", "data-1", parent) for _ in range(2))
    assert first != last
    path = folders[1] / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["champion"] = {"name": NAME, "version": "41"}
    evaluation["reasons"] = ["save AUC of the cold tier: undecided, " + "x" * 6000]
    path.write_text(json.dumps(evaluation))
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "registered.json").write_text(json.dumps({"name": NAME, "version": "40"}))
    config = sqlite_config.model_copy(
        update={
            "pretrain": sqlite_config.pretrain.model_copy(
                update={"start_from": str(tmp_path / "start")}
            )
        }
    )
    register.run(config, *folders, parent_run_id=parent)
    tags = connect(config).get_model_version(NAME, "1").tags
    assert {key: value for key, value in tags.items() if key.startswith("thawline.run.")} == {
        "thawline.run.windows": windows,
        "thawline.run.pretrain": pretrain,
        "thawline.run.finetune": last,
    }
    assert tags["thawline.compared_with"] == f"{NAME}/41"
    assert tags["thawline.table_started_from"] == f"models:/{NAME}/40"
    assert tags["thawline.gate.reasons"].startswith("save AUC of the cold tier: undecided, xxx")
    assert len(tags["thawline.gate.reasons"]) == 5000


def test_a_model_that_is_too_large_is_refused_before_anything_is_uploaded(sqlite_config, folders):
    size = sum(file.stat().st_size for file in folders[0].rglob("*") if file.is_file())

    def allowing(gigabytes, **changes):
        changes = {"max_upload_gb": gigabytes, **changes}
        tracking = sqlite_config.tracking.model_copy(update=changes)
        return sqlite_config.model_copy(update={"tracking": tracking})

    # Of 6 items of 8 floats there are 200 bytes and more beside the model.
    with pytest.raises(TrackingError, match=r"tracking\.max_upload_gb allows") as told:
        register.run(allowing((size + 100) / 1e9), *folders)
    assert "tracking.log_vectors=false" in told.value.remedy
    assert connect(sqlite_config).search_registered_models() == []
    register.run(allowing((size + 100) / 1e9, log_vectors=False), *folders)
    version = connect(sqlite_config).get_model_version(NAME, "1")
    assert connect(sqlite_config).list_artifacts(version.run_id, "vectors") == []


def test_the_tables_of_a_version_are_registered_with_it(sqlite_config, folders, tmp_path):
    register.run(sqlite_config, *folders)
    uri = f"models:/{NAME}@champion"
    with pytest.MonkeyPatch.context() as patch:
        # The file that was registered is taken, not made anew.
        patch.setattr(fetch, "local_model", None)
        fetch.table(sqlite_config, uri, "item", tmp_path / "item.parquet")
    assert pq.read_table(tmp_path / "item.parquet").column("item_id").to_pylist() == INT_IDS
    with pytest.raises(DataError, match="no table 'user'"):
        fetch.table(sqlite_config, uri, "user", tmp_path / "user.parquet")
    fetch.model(sqlite_config, uri, tmp_path / "fetched")
    assert Bundle.load(tmp_path / "fetched").meta == Bundle.load(folders[0]).meta
    with pytest.raises(TrackingError, match="no registered version is"):
        fetch.model(sqlite_config, f"models:/{NAME}@other", tmp_path / "other")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "other"))]


@pytest.mark.parametrize("text", ["", "[]", '{"passed": "yes", "metrics": {}}', '{"passed": true}'])
def test_a_damaged_evaluation_is_named(sqlite_config, folders, tmp_path, text):
    (tmp_path / "evaluation" / "evaluation.json").write_text(text)
    with pytest.raises(TrackingError, match=r"evaluation\.json cannot be read"):
        register.run(sqlite_config, *folders)


def test_a_model_that_scores_nan_reaches_neither_the_registry_nor_the_server(
    sqlite_config, folders, tmp_path
):
    write_model(tmp_path / "broken", INT_IDS, broken=True)
    with pytest.raises(TrackingError, match=r"scores save of its example as .*nan"):
        register.run(sqlite_config, tmp_path / "broken", folders[1], folders[2])
    client = connect(sqlite_config)
    assert client.search_registered_models() == []
    experiment = client.get_experiment_by_name("thawline").experiment_id
    assert list(client.search_logged_models([experiment])) == []


def test_a_name_with_spaces_is_refused_before_anything_is_uploaded(sqlite_config, folders):
    tracking = sqlite_config.tracking.model_copy(update={"model_name": "my model"})
    config = sqlite_config.model_copy(update={"tracking": tracking})
    with pytest.raises(TrackingError, match=r"set tracking\.model_name=my-model"):
        register.run(config, *folders)
    assert connect(config).search_registered_models() == []


def test_registering_leaves_the_import_path_as_it_was(sqlite_config, folders):
    before = list(sys.path)
    register.run(sqlite_config, *folders)
    assert sys.path == before


SCORE_ELSEWHERE = """
    import importlib.util, json, sys
    # As on a machine without Thawline.
    find = importlib.machinery.PathFinder.find_spec
    sys.path = [folder for folder in sys.path if find("thawline", [folder]) is None]
    sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
    assert importlib.util.find_spec("thawline") is None
    import mlflow, pandas
    model = mlflow.pyfunc.load_model(sys.argv[1])
    scores = model.predict(pandas.DataFrame(json.loads(sys.argv[2])))
    import thawline
    heavy = {"ibis", "duckdb", "matplotlib", "kfp", "torchrec"} & set(sys.modules)
    print(json.dumps([thawline.__file__, sorted(heavy), scores.to_dict("list")]))
"""


def score_elsewhere(config, uri, requests, cwd):
    """Scores in a fresh process that may not unpickle and does not know Thawline."""
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": tracking_uri(config),
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    asked = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCORE_ELSEWHERE), uri, json.dumps(requests)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


def by_hand(bundle, requests):
    """The same requests scored one by one through the bundle, rows looked up in a dict."""
    from test_served import expected

    class Loaded:
        pass

    loaded = Loaded()
    loaded.bundle = bundle
    catalog = bundle.catalog.item_id.to_pylist()
    return [expected(loaded, catalog, request) for request in requests]


def test_a_fresh_process_without_pickle_and_without_thawline_scores_the_same(
    sqlite_config, folders, tmp_path
):
    bundle = write_model(tmp_path / "strings", STRING_IDS)
    register.run(sqlite_config, tmp_path / "strings", folders[1], folders[2])
    requests = [
        {
            "history": STRING_IDS * 3,
            "candidates": STRING_IDS[:4],
            "history_action": [1, 2, 3] * 6,
            "history_age": [float(age) for age in range(18, 0, -1)],
            "surface": "home",
        },
        {
            "history": [],
            "candidates": ["nobody knows this", "N9"],
            "history_action": [],
            "history_age": [],
            "surface": "13",
        },
    ]
    file, heavy, scores = score_elsewhere(
        sqlite_config, f"models:/{NAME}@champion", requests, folders[0]
    )
    assert file.startswith(str(tmp_path / "work" / "mlartifacts"))
    assert heavy == []
    for row, wanted in enumerate(by_hand(bundle, requests)):
        found = np.array([scores["save"][row], scores["click"][row]]).T
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_catalog_of_the_champion_is_fetched_without_its_weights(
    sqlite_config, folders, tmp_path
):
    uri = f"models:/{NAME}@champion"
    assert registry.fetch_catalog(sqlite_config, uri, tmp_path / "none") is None
    register.run(sqlite_config, *folders)
    assert registry.fetch_catalog(sqlite_config, f"models:/{NAME}@other", tmp_path) is None
    for number, name in enumerate((uri, f"models:/{NAME}/1")):
        (tmp_path / str(number)).mkdir()
        folder = registry.fetch_catalog(sqlite_config, name, tmp_path / str(number))
        assert sorted(file.name for file in folder.iterdir()) == ["catalog.parquet", "model.json"]
        previous = read_previous(folder)
        assert previous.catalog.item_id.to_pylist() == INT_IDS
    with pytest.raises(TrackingError, match=f"there is no version 7 of {NAME}"):
        registry.fetch_catalog(sqlite_config, f"models:/{NAME}/7", tmp_path)


def test_a_registered_model_is_fetched_whole_with_its_tags(sqlite_config, folders, tmp_path):
    uri = f"models:/{NAME}@champion"
    assert registry.fetch_model(sqlite_config, uri, tmp_path / "none") is None
    register.run(sqlite_config, *folders)
    assert registry.fetch_model(sqlite_config, f"models:/{NAME}@other", tmp_path) is None
    for number, name in enumerate((uri, f"models:/{NAME}/1")):
        fetched = registry.fetch_model(sqlite_config, name, tmp_path / str(number))
        assert (fetched.name, fetched.version) == (NAME, "1")
        assert fetched.tags["thawline.data_version"] == "data-1"
        assert fetched.folder.is_relative_to(tmp_path / str(number))
        again, given = Bundle.load(fetched.folder), Bundle.load(folders[0])
        assert again.meta == given.meta
        assert torch.equal(again.weights["item"], given.weights["item"])
        names = {file.relative_to(fetched.folder) for file in fetched.folder.rglob("*")}
        given = {file.relative_to(folders[0]) for file in folders[0].rglob("*")}
        assert names == given | {Path("registered.json")}
    with pytest.raises(TrackingError, match=f"there is no version 7 of {NAME}"):
        registry.fetch_model(sqlite_config, f"models:/{NAME}/7", tmp_path)


@pytest.mark.parametrize("uri", ["", "runs/feed/model", f"models:/{NAME}", "models:/a/b@champion"])
def test_a_uri_of_another_form_is_refused(sqlite_config, tmp_path, uri):
    with pytest.raises(TrackingError, match=r"models:/<name>@<alias> or models:/<name>/<version>"):
        registry.fetch_model(sqlite_config, uri, tmp_path)


def test_the_registered_model_holds_no_pickle(sqlite_config, folders, tmp_path):
    register.run(sqlite_config, *folders)
    stored = list((tmp_path / "work" / "mlartifacts").rglob("artifacts/MLmodel"))
    assert len(stored) == 1
    files = [path for path in stored[0].parent.rglob("*") if path.is_file()]
    assert len(files) > 20
    # A pickle starts with 0x80, what torch.save and numpy write with PK and 0x93.
    assert [path for path in files if path.read_bytes()[:1] in (b"\x80", b"P", b"\x93")] == [
        path for path in files if path.suffix == ".parquet"
    ]


def test_the_code_in_a_model_is_what_it_imports_and_finds_the_rest_where_it_is_installed(tmp_path):
    code = packing.copy_code(tmp_path)
    names = {file.relative_to(code).as_posix() for file in code.rglob("*")}
    assert {"tracking/served.py", "tracking/scorer.py", "model/ranker.py"} <= names
    assert not {"data/findings.py", "stages", "evaluation", "tracking/registry.py"} & names
    asked = "import thawline.data.findings as rest, thawline; print(rest.__file__, thawline)"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {asked}"],
        capture_output=True,
        text=True,
        check=True,
    )
    elsewhere, package = found.stdout.split(" ", 1)
    assert not elsewhere.startswith(str(tmp_path))
    assert str(tmp_path) in package


def test_the_signature_fixes_no_length_and_needs_two_columns_only(tmp_path):
    for ids, kind in ((INT_IDS, "long"), (STRING_IDS, "string")):
        bundle = write_model(tmp_path / kind, ids)
        signature = packing.signature(bundle)
        assert {column.name: column.required for column in signature.inputs} == {
            "history": True,
            "candidates": True,
            "history_action": False,
            "history_age": False,
            "surface": False,
            "device": False,
        }
        assert str(signature.inputs.input_dict()["history"].type) == f"Array({kind})"
        assert [column.name for column in signature.outputs] == ["save", "click"]


def test_the_example_of_a_catalog_with_one_item_can_be_scored(sqlite_config, folders, tmp_path):
    write_model(tmp_path / "one", [5])
    registration = register.run(sqlite_config, tmp_path / "one", folders[1], folders[2])
    assert registration.version == "1"


def test_a_model_that_is_not_registered_is_not_scored_with(sqlite_config, tmp_path):
    pq.write_table(pa.table({"history": [[5]], "candidates": [[8]]}), tmp_path / "requests.parquet")
    files = tmp_path / "requests.parquet", tmp_path / "scores.parquet"
    with pytest.raises(TrackingError, match=r"no registered version is models:/ranker@champion"):
        score.run(sqlite_config, "models:/ranker@champion", *files)
    assert not files[1].exists()
