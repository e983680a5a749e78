"""Small evaluation folders: two models that see the same truth through more or less noise."""

import json

import numpy as np
import pyarrow as pa

from thawline.data.manifest import Catalog
from thawline.evaluation.score_file import write_scores
from thawline.evaluation.scored import Scored

ITEMS = Catalog(
    pa.array(range(8)), *(np.zeros(8, np.int64) for _ in range(3)), np.arange(8, dtype=np.int8) % 4
)


def scored(noise, requests=400):
    """Requests of 5 candidates by 80 users; less noise is a better model."""
    generator = np.random.default_rng(0)
    shape = (5 * requests, 1)
    truth = generator.normal(size=shape)
    labels = generator.random(shape) < 1 / (1 + np.exp(1 - 2 * truth))
    return Scored(
        actions=["save"],
        request_id=np.arange(requests),
        timestamp=np.zeros(requests, np.int64),
        offsets=np.arange(0, shape[0] + 1, 5),
        row=2 + generator.integers(0, 8, shape[0]),
        labels=labels.astype(np.int8),
        logits=(truth + noise * generator.normal(size=shape)).astype(np.float32),
        oracle=None,
        user_id=pa.array(generator.integers(0, 80, requests)),
    )


def evaluation(folder, noise, *, seed=0, data="d1", auc=None, scores=True):
    """An evaluation folder with scores and one figure."""
    folder.mkdir(parents=True)
    tree = {"pooled": {"save": {"auc": auc}}, "tiers": {}}
    facts = {"model": {"seed": seed, "data_version": data}, "metrics": {"next": tree}}
    (folder / "evaluation.json").write_text(json.dumps(facts))
    if scores:
        write_scores(
            folder / "scores" / "next.parquet", scored(noise), ITEMS, model="m", data_version=data
        )
    return folder
