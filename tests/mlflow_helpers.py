"""A config for tests, and a small model folder with its evaluation."""

import json
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from thawline.config import Config, parse_config
from thawline.config import Model as ModelSettings
from thawline.data.manifest import Catalog
from thawline.model.bundle import Bundle, Meta, save_bundle

INT_IDS = [700, 5, -3, 900_000_000_000, 42, 8]
STRING_IDS = ["N9", "n9", "", "héron", "N10", "x" * 300]


TIER_AUCS = {"head": 0.75, "torso": None, "cold": 0.5}


def make_config(workdir: Path, **tracking: str) -> Config:
    overrides = [f"workdir={workdir}", "events.path=log.parquet"]
    overrides += [f"tracking.{key}={json.dumps(value)}" for key, value in tracking.items()]
    return parse_config("", overrides)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_model(folder: Path, ids: list, *, broken: bool = False, tables=None) -> Bundle:
    """An untrained model over `ids`, with two actions, two context columns and histories of 6.

    `tables` are hashed ID tables of requests.
    """
    tables = tables or {}
    folder.mkdir(parents=True)
    count = len(ids)
    catalog = pa.table(
        {
            "item_id": pa.array(ids),
            "row": pa.array(range(2, count + 2), pa.int64()),
            "first_seen": pa.array(range(count), pa.timestamp("us", tz="UTC")),
            "pretrain_count": pa.array(range(count), pa.int64()),
            "support": pa.array(range(count), pa.int64()),
            "tier": pa.array([0] * count, pa.int8()),
        }
    )
    pq.write_table(catalog, folder / "source.parquet")
    meta = Meta(
        data_version="data-1",
        recipe="freeze-until-last",
        epochs=1,
        seed=0,
        actions=["save", "click"],
        context={"surface": ["home", "13"], "device": ["phone"]},
        history_length=6,
        num_rows=count + 2,
        model=ModelSettings(dim=8, heads=2, ffn=8, mlp=(8,), context_dim=4, adapter="full"),
        tables=tables,
    )
    torch.manual_seed(0)
    ranker = meta.make_ranker()
    for parameter in ranker.parameters():
        # Fresh ones are too small to tell inputs apart.
        torch.nn.init.normal_(parameter, std=0.3)
    if broken:
        ranker.heads.weight.data[0, 0] = torch.nan
    weights = {"item": torch.randn(meta.num_rows, 8)}
    weights |= {name: torch.randn(table.rows, table.dim) for name, table in tables.items()}
    catalog = Catalog.read(folder / "source.parquet")
    save_bundle(folder, Bundle(meta, ranker, weights, catalog), folder / "source.parquet")
    (folder / "source.parquet").unlink()
    (folder / "epochs.json").write_text("[]")
    return Bundle.load(folder)


def write_evaluation(folder: Path, *, passed: bool = True) -> Path:
    folder.mkdir(parents=True)
    saves = {"auc": 0.7123456789, "log_loss": 0.25, "calibration": 1.01}
    pooled = {"save": saves, "click": {"auc": 0.6}}
    tiers = {tier: {"save": {"auc": auc}} for tier, auc in TIER_AUCS.items()}
    tree = {
        "passed": passed,
        "reasons": [f"save AUC {'0.712 is over' if passed else '0.41 is under'} gate.min_auc 0.5"],
        "metrics": {
            "next": {"requests": 3, "pooled": pooled, "tiers": tiers},
            "in_window": {"requests": 0, "pooled": {"save": {"auc": None}, "click": {"auc": None}}},
        },
    }
    (folder / "evaluation.json").write_text(json.dumps(tree))
    return folder
