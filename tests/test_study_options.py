"""Cross-fitted item rows and moved cold rows, as the fine-tuning stage offers them."""

import json

import pytest
import torch
from conftest import TINY_FEED
from pydantic import ValidationError

from thawline.config import Config, Finetune
from thawline.data.manifest import TIERS
from thawline.errors import ConfigError, TrainingError
from thawline.model.bundle import Bundle, load_rows, save_table
from thawline.stages import finetune
from thawline.stages.id_tables import make_tables
from thawline.tables import memory
from thawline.tables.repair import repair_cold_rows


@pytest.fixture(scope="module")
def table(tiny_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    generator = torch.Generator().manual_seed(0)
    save_table(
        folder / "item.safetensors",
        torch.randn(tiny_dataset.catalog.num_rows, 8, generator=generator),
    )
    return folder


@pytest.fixture
def train(tiny_dataset, table, tmp_path):
    """Fine-tunes with some options and gives epochs.json, and the model."""

    def run(name, tables=None, **options):
        config = configured(tmp_path, tables, **options)
        finetune.run(config, tiny_dataset.root, table, tmp_path / name)
        epochs = json.loads((tmp_path / name / "epochs.json").read_text())
        return epochs, Bundle.load(tmp_path / name)

    return run


def configured(workdir, tables=None, **options):
    tree = {
        **TINY_FEED,
        "workdir": str(workdir),
        "model": {"dim": 8, "ffn": 16, "mlp": [16], "layers": 1},
        "finetune": {"epochs": 2, "batch_size": 64, "recipe": "co-train", **options},
        "tables": tables or {},
    }
    return Config.model_validate(tree)


def cold_rows(dataset):
    tier = torch.tensor(dataset.catalog.tier.astype("int8"))
    return torch.cat([torch.zeros(2, dtype=torch.bool), tier == TIERS.index("cold")])


@pytest.mark.parametrize(
    ("how", "dtype"),
    [("mean-drift", "float32"), ("ridge", "bfloat16"), ("neighbours", "float32")],
)
def test_cold_rows_alone_are_moved_after_the_last_epoch_and_scored_anew(
    train, tiny_dataset, table, how, dtype
):
    tables = {"item": {"dtype": dtype}}
    epochs, plain = train("plain", tables)
    moved_epochs, moved = train("moved", tables, cold_rows=how)

    cold = cold_rows(tiny_dataset)
    before, after = plain.weights["item"], moved.weights["item"]
    first = load_rows(table, tiny_dataset.catalog, 8, seed=0).to(getattr(torch, dtype))
    expected = before.clone().to(first.dtype)
    warm = ~cold & (torch.arange(len(cold)) > 1)
    repair_cold_rows(expected, first, how, warm=warm, cold=cold)
    assert 0 < cold.sum() < len(cold) - 2
    assert torch.equal(after, expected.float())
    assert torch.equal(after[~cold], before[~cold])
    assert not torch.equal(after[cold], before[cold])

    assert [e["metrics"] for e in moved_epochs] == [e["metrics"] for e in epochs]
    assert "repaired" not in epochs[-1]
    repaired, unrepaired = moved_epochs[-1]["repaired"], epochs[-1]["metrics"]
    assert repaired.keys() == unrepaired.keys() == {"next", "in_window"}
    assert repaired != unrepaired
    assert (plain.meta.cold_rows, moved.meta.cold_rows) == ("keep", how)


def test_a_cross_fitted_model_keeps_the_mean_of_both_copies(train, tiny_dataset):
    _, plain = train("plain")
    epochs, crossed = train("crossed", cross_fit=True)

    assert crossed.meta.cross_fit
    assert not plain.meta.cross_fit
    assert crossed.weights["item"].shape == plain.weights["item"].shape
    assert not crossed.weights["item"][0].any()
    assert not torch.equal(crossed.weights["item"], plain.weights["item"])
    assert all(value > 0 for value in epochs[-1]["drift"]["item"].values())
    assert epochs[0]["metrics"].keys() == {"next", "in_window"}


def test_a_cross_fitted_frozen_run_is_the_plain_frozen_run(train):
    plain_epochs, plain = train("plain", recipe="frozen")
    crossed_epochs, crossed = train("crossed", recipe="frozen", cross_fit=True)

    assert torch.equal(crossed.weights["item"], plain.weights["item"])
    theirs = plain.ranker.state_dict()
    for name, value in crossed.ranker.state_dict().items():
        assert torch.equal(value, theirs[name])
    assert [e["metrics"] for e in crossed_epochs] == [e["metrics"] for e in plain_epochs]


@pytest.mark.parametrize("recipe", ["re-anchor", "re-init", "stratified"])
def test_recipes_treat_both_copies_alike(tiny_dataset, table, tmp_path, recipe):
    config = configured(tmp_path, cross_fit=True, recipe=recipe)
    item = make_tables(config, tiny_dataset, table, "cpu")["item"]
    trained = item.trained()

    count = tiny_dataset.catalog.num_rows
    for values in (item.first, trained.fresh(1), *trained.tiers.values()):
        assert len(values) == 2 * count
        assert torch.equal(values[:count], values[count:])
    assert not any(mask[0] for mask in trained.tiers.values())
    assert torch.equal(item.rows(), item.first[:count])


def test_cross_fitting_and_a_repair_can_be_had_together(train, tiny_dataset):
    _, crossed = train("crossed", cross_fit=True)
    epochs, both = train("both", cross_fit=True, cold_rows="ridge")

    cold = cold_rows(tiny_dataset)
    assert torch.equal(both.weights["item"][~cold], crossed.weights["item"][~cold])
    assert not torch.equal(both.weights["item"][cold], crossed.weights["item"][cold])
    assert epochs[-1]["repaired"]


def test_the_metrics_after_a_repair_are_logged(train, monkeypatch):
    logged = []

    class Run:
        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def log_params(self, params):
            assert params["cold_rows"] == "mean-drift"

        def log_metrics(self, metrics, step):
            logged.append((step, metrics))

        def log_artifact(self, path):
            pass

    monkeypatch.setattr(finetune, "stage_run", lambda *arguments: Run())

    epochs, _ = train("moved", cold_rows="mean-drift")

    assert [step for step, _ in logged] == [1, 2, 2]
    assert json.loads(json.dumps(logged[-1][1])) == {"repaired": epochs[-1]["repaired"]}


def test_a_repair_without_warm_rows_is_refused_before_training(
    tiny_dataset, table, tmp_path, monkeypatch
):
    config = configured(tmp_path, cold_rows="ridge")
    tables = make_tables(config, tiny_dataset, table, "cpu")
    tables["item"].tier.fill_(TIERS.index("cold"))
    monkeypatch.setattr(finetune, "make_tables", lambda *arguments: tables)

    with pytest.raises(TrainingError, match="no warm row"):
        finetune.run(config, tiny_dataset.root, table, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_the_memory_of_both_copies_is_counted(tiny_dataset, table, tmp_path, monkeypatch):
    count = tiny_dataset.catalog.num_rows
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 * count * 8 * 4)
    make_tables(configured(tmp_path), tiny_dataset, table, "cpu")

    with pytest.raises(ConfigError, match=f"`item` of {2 * count:,} rows"):
        make_tables(configured(tmp_path, cross_fit=True), tiny_dataset, table, "cpu")


def test_cross_fitting_takes_no_accumulation():
    with pytest.raises(ValidationError, match="cross_fit takes one micro-batch a step"):
        Finetune(cross_fit=True, accumulation={"micro_batches": 2})
