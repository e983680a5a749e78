"""The tables of a fine-tuning run."""

import pytest
import torch

from thawline.config import Config
from thawline.data.manifest import TIERS
from thawline.errors import ConfigError, DataError
from thawline.model.bundle import save_table
from thawline.stages.id_tables import make_tables, tier_of


def configured(config, **sections):
    tree = config.model_dump(mode="json")
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def table_folder(tiny_dataset, tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    shape = (tiny_dataset.catalog.num_rows, tiny_config.model.dim)
    save_table(folder / "item.safetensors", torch.randn(shape))
    return folder


def test_the_item_table_starts_frozen_at_the_given_rows_with_the_catalogs_tiers(
    tiny_config, tiny_dataset, table_folder
):
    item = make_tables(tiny_config, tiny_dataset, table_folder, "cpu")["item"]

    assert not item.table.trainable
    assert torch.equal(item.table.weight, item.first)
    assert item.table.weight.data_ptr() != item.first.data_ptr()
    assert not item.first[0].any()
    tiers = item.tiers()
    assert sum(mask.long() for mask in tiers.values()).tolist() == [0] + [1] * (len(item.first) - 1)
    for name, mask in tiers.items():
        rows = (mask.nonzero().squeeze(1) - 2).numpy()
        rows = rows[rows >= 0]
        assert (tiny_dataset.catalog.tier[rows] == TIERS.index(name)).all()
    assert item.drift() == dict.fromkeys([*TIERS, "pooled"], 0.0)
    # Of all rows, the one that moved by as much as all were long in sum.
    moved = item.first.clone()
    moved[5, 0] += torch.linalg.vector_norm(item.first, dim=1).sum()
    assert item.drift(moved)["pooled"] == pytest.approx(1.0, rel=1e-5)


def test_rows_can_be_kept_in_bfloat16(tiny_config, tiny_dataset, table_folder):
    config = configured(tiny_config, tables={"item": {"dtype": "bfloat16"}})

    item = make_tables(config, tiny_dataset, table_folder, "cpu")["item"]

    assert item.table.weight.dtype == torch.bfloat16


def test_tiers_follow_the_support():
    tiers = tier_of(torch.tensor([0, 1, 3, 4, 9, 10, 11]), head=10, torso=4)

    assert [TIERS[index] for index in tiers] == [
        *("cold", "tail", "tail", "torso", "torso", "head", "head")
    ]


def test_a_table_larger_than_memory_says_what_it_would_need(
    tiny_config, tiny_dataset, table_folder
):
    user = {"column": "user_id", "rows": 10**12, "dim": 64}
    config = configured(tiny_config, tables={"user": user})

    with pytest.raises(ConfigError, match=r"`user` of 1,000,000,000,000 rows x 64"):
        make_tables(config, tiny_dataset, table_folder, "cpu")


def test_rows_of_another_width_are_refused(tiny_config, tiny_dataset, table_folder):
    config = configured(tiny_config, model={"dim": 32})

    with pytest.raises(DataError, match=r"has shape \[\d+, 64\]; \[\d+, 32\] is needed"):
        make_tables(config, tiny_dataset, table_folder, "cpu")


def test_a_folder_without_item_rows_says_which_one_to_name(tiny_config, tiny_dataset, tmp_path):
    for folder in (tmp_path / "nowhere", tiny_dataset.root):
        with pytest.raises(DataError, match=rf"{folder} holds no item rows.*\n.*thawline pretrain"):
            make_tables(tiny_config, tiny_dataset, folder, "cpu")
