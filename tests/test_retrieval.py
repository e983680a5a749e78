"""Retrieval over the catalog against plain loops over every item."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from thawline.config import Model
from thawline.data.batches import RequestReader
from thawline.data.manifest import FIRST_ROW
from thawline.evaluation import retrieval
from thawline.evaluation.retrieval import Queries, places, retrieval_metrics, summary
from thawline.model.bundle import Bundle, Meta

SETTINGS = Model(dim=8, heads=2, layers=1, ffn=16, mlp=(16,), context_dim=4, adapter="full")


@pytest.fixture(scope="module")
def bundle(tiny_config, tiny_dataset):
    """An untrained model whose vectors are far apart."""
    meta = Meta.of(tiny_dataset, tiny_config).model_copy(update={"model": SETTINGS})
    torch.manual_seed(0)
    ranker = meta.make_ranker().eval()
    for parameter in ranker.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Bundle(meta, ranker, {"item": torch.randn(meta.num_rows, 8)}, tiny_dataset.catalog)


def by_loops(bundle, dataset, split, limit, k):
    """Recall, NDCG and MRR, item by item."""
    reader = RequestReader(dataset, split, batch_size=64, sampler=None, shuffle=False, limit=limit)
    items = torch.nn.functional.normalize(bundle.ranker.adapter(bundle.weights["item"]), dim=-1)
    first_seen = dataset.catalog.first_seen
    recall, ndcg, mrr = [], [], []
    for batch in reader.epoch(0):
        vectors = bundle.ranker.user_vectors(batch, bundle.read(batch))
        scores = torch.nn.functional.normalize(vectors, dim=-1) @ items.T
        for number in range(len(batch)):
            taken = (batch.labels[number] > 0).any(-1) & batch.candidate_mask[number]
            positives = batch.candidate_row[number][taken].tolist()
            seen = set(batch.history_row[number].tolist())
            against = [
                row
                for row in range(FIRST_ROW, len(items))
                if row not in seen - set(positives)
                and (first_seen[row - FIRST_ROW] <= batch.timestamp[number] or row in positives)
            ]
            ranked = sorted(against, key=lambda row, own=scores[number]: -own[row].item())
            ranks = [ranked.index(row) + 1 for row in positives]
            if ranks:
                recall.append(np.mean([rank <= k for rank in ranks]))
                best = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(ranks), k) + 1))
                ndcg.append(sum(1 / math.log2(r + 1) for r in ranks if r <= k) / best)
                mrr.append(1 / min(ranks))
    return {f"recall@{k}": np.mean(recall), f"ndcg@{k}": np.mean(ndcg), "mrr": np.mean(mrr)}


@pytest.mark.parametrize(("at_once", "limit"), [(1 << 21, 1_000), (700, 30)])
@torch.inference_mode()
def test_places_among_the_catalog_equal_a_sort_of_it(
    bundle, tiny_dataset, monkeypatch, at_once, limit
):
    monkeypatch.setattr(retrieval, "AT_ONCE", at_once)
    found = retrieval_metrics(bundle, tiny_dataset, "next", requests=limit, k=10)
    expected = by_loops(bundle, tiny_dataset, "next", limit, 10)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < found["recall@10"] < 1
    assert found["k"] == 10


def test_nothing_is_retrieved_without_a_trained_user_vector(bundle, tiny_dataset):
    silent = bundle.meta.model.model_copy(update={"contrastive_weight": 0.0})
    untrained = replace(bundle, meta=bundle.meta.model_copy(update={"model": silent}))
    assert retrieval_metrics(untrained, tiny_dataset, "next", requests=10, k=5) is None
    assert retrieval_metrics(bundle, tiny_dataset, "next", requests=0, k=5) is None


@torch.inference_mode()
def test_a_model_that_knows_nothing_places_every_positive_in_the_middle(bundle):
    """Of 20 rows, 1 in the history and 4 of the future are out; the target stands among 14."""
    flat = replace(bundle, weights={"item": torch.ones(20 + FIRST_ROW, 8)})
    queries = Queries(
        vectors=torch.nn.functional.normalize(torch.ones(1, 8), dim=-1),
        timestamp=torch.tensor([15]),
        target=torch.tensor([[0, 2]]),
        known=torch.tensor([[0, 2], [0, 3]]),
        positives=np.array([1]),
    )
    assert places(queries, flat, torch.arange(20)).tolist() == [1 + 14 / 2]


def test_a_positive_that_the_catalog_does_not_know_is_missed():
    # Two positives, one of them known and in place 2; and one that is not known at all.
    found = summary(np.array([2, 1, 0]), np.array([0]), np.array([2.0]), 5)
    best = 1 + 1 / math.log2(3)
    assert found == {
        "recall@5": pytest.approx(0.25),
        "ndcg@5": pytest.approx(1 / math.log2(3) / best / 2),
        "mrr": pytest.approx(0.25),
        "k": 5,
        "requests": 2,
    }
    assert summary(np.array([0]), np.empty(0, int), np.empty(0), 5) is None


def test_a_weight_counts_as_so_many_copies_of_the_request():
    # Three requests with 2, 1 and 1 positives, of which the last is not known.
    positives, request = np.array([2, 1, 1]), np.array([0, 0, 1])
    place = np.array([1.0, 7.0, 3.0])
    found = summary(positives, request, place, 5, np.array([3.0, 2.0, 1.0]))
    copies = summary(
        np.array([2, 2, 2, 1, 1, 1]),
        np.array([0, 0, 1, 1, 2, 2, 3, 4]),
        np.array([1.0, 7.0, 1.0, 7.0, 1.0, 7.0, 3.0, 3.0]),
        5,
    )
    assert found | {"requests": 6} == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in copies.items()
    }


@torch.inference_mode()
def test_the_weights_of_a_dataset_s_requests_weigh_retrieval(bundle, tiny_dataset, monkeypatch):
    plain = retrieval_metrics(bundle, tiny_dataset, "next", requests=200, k=10)
    seen, epoch = [], RequestReader.epoch

    def with_weights(self, index):
        for batch in epoch(self, index):
            weight = (batch.request_id % 5 == 0).double() + 1e-9
            seen.append(weight)
            yield replace(batch, weight=weight)

    monkeypatch.setattr(RequestReader, "epoch", with_weights)
    found = retrieval_metrics(bundle, tiny_dataset, "next", requests=200, k=10)
    assert found["requests"] == plain["requests"]
    chosen = torch.cat(seen) > 0.5
    assert 5 < int(chosen.sum()) < len(chosen) - 5

    def those_chosen(self, index):
        for batch in epoch(self, index):
            yield batch.select(batch.request_id % 5 == 0)

    monkeypatch.setattr(RequestReader, "epoch", those_chosen)
    only = retrieval_metrics(bundle, tiny_dataset, "next", requests=200, k=10)
    for name in ("recall@10", "ndcg@10", "mrr"):
        assert found[name] == pytest.approx(only[name], abs=1e-5)
        assert found[name] != plain[name]
