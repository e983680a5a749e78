"""A model on a dataset of other rows, codes and histories, against the served model on raw ids."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TINY_FEED, built

from thawline.config import Config, Gate, IdTableSettings
from thawline.data.batches import RequestReader
from thawline.data.content import read_content
from thawline.data.ids import hash_ids
from thawline.data.manifest import Catalog, RowFacts
from thawline.errors import DataError
from thawline.evaluation.gate import decide
from thawline.evaluation.holdouts import score_holdout
from thawline.model.bundle import Bundle, Meta, save_bundle
from thawline.model.ids import ModelIds
from thawline.model.translate import Translator, item_rows
from thawline.stages.champion import Champion, Match
from thawline.tracking.ids import bucket_of
from thawline.tracking.served import ServedRanker

NOBODY = 10**12
"""An item that no catalog knows."""

CONFIG = Config.model_validate(
    TINY_FEED
    | {
        "simulate": TINY_FEED["simulate"] | {"content_dim": 5, "authors": 20},
        "tables": {
            "user": {"column": "user_id", "rows": 40, "dim": 6},
            "regular": {"column": "user_id", "rows": 20, "dim": 3, "hashed": False},
            "author": {"column": "author_id", "of": "item", "rows": 12, "dim": 4},
        },
        "model": {"dim": 8, "ffn": 8, "layers": 1, "mlp": [8], "content_tower": [6]},
    }
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return built(CONFIG, tmp_path_factory.mktemp("translate") / "feed")


def made(folder, meta, catalog_file, ids, content):
    """A model of fresh weights, large enough to tell inputs apart, as a folder."""
    torch.manual_seed(0)
    ranker = meta.make_ranker()
    for parameter in ranker.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {"item": torch.randn(meta.num_rows, meta.model.dim), "content": content}
    weights |= {name: torch.randn(table.rows, table.dim) for name, table in meta.tables.items()}
    folder.mkdir(parents=True)
    save_bundle(
        folder, Bundle(meta, ranker, weights, Catalog.read(catalog_file), ids), catalog_file
    )
    return folder


@pytest.fixture(scope="module")
def own(data, tmp_path_factory):
    """A model of the dataset itself."""
    folder = tmp_path_factory.mktemp("own") / "model"
    meta = Meta.of(data, CONFIG)
    content = torch.from_numpy(read_content(data))
    ids = ModelIds.of(data, CONFIG.tables.others)
    return made(folder, meta, data.root / "catalog.parquet", ids, content)


@pytest.fixture(scope="module")
def stranger(data, tmp_path_factory):
    """A model that shares nothing but names with the dataset.

    Its catalog lacks every fifth item, holds items that the dataset does not know and numbers them
    otherwise; actions and context values have another order, one context column is unknown to the
    dataset and one of the dataset's to it; histories are shorter; a table reads ids that the
    dataset does not hold, and another one has its own vocabulary.
    """
    root = tmp_path_factory.mktemp("stranger")
    generator = np.random.default_rng(3)
    known = [item for item in data.catalog.item_id.to_pylist() if item % 5]
    ids = [int(item) for item in generator.permutation([*known, *range(10**6, 10**6 + 30)])]
    count = len(ids)
    catalog = pa.table(
        {
            "item_id": pa.array(ids, pa.int64()),
            "row": pa.array(range(2, count + 2), pa.int64()),
            "first_seen": pa.array([0] * count, pa.timestamp("us", tz="UTC")),
            "pretrain_count": pa.array([0] * count, pa.int64()),
            "support": pa.array([0] * count, pa.int64()),
            "tier": pa.array([0] * count, pa.int8()),
        }
    )
    pq.write_table(catalog, root / "catalog.parquet")
    own = Meta.of(data, CONFIG)
    (first, values), *rest = own.context.items()
    tables = {
        "regular": own.tables["regular"],
        "session": IdTableSettings(column="session_id", rows=9, dim=3),
        "author": own.tables["author"],
    }
    meta = own.model_copy(
        update={
            "actions": own.actions[::-1],
            "context": {"weather": ["rain"], first: ["elsewhere", *values[::-1][1:]]}
            | dict(rest[1:]),
            "history_length": 5,
            "num_rows": count + 2,
            "tables": tables,
        }
    )
    users = hash_ids([str(user) for user in range(10, 25)])
    author = torch.from_numpy(generator.integers(0, 12, count + 2))
    content = torch.from_numpy(generator.normal(size=(count + 2, 5)).astype(np.float32))
    model_ids = ModelIds({"regular": users}, {"author": author})
    return made(root / "model", meta, root / "catalog.parquet", model_ids, content)


def batches(data, tables, sampler=None):
    reader = RequestReader(
        data, "next", batch_size=32, sampler=sampler, shuffle=False, id_columns=tables
    )
    return reader.epoch(0)


def raw(data, batch, actions):
    """The requests of a batch in raw ids and values, history actions in the bits of `actions`."""
    items = [NOBODY, NOBODY, *data.catalog.item_id.to_pylist()]
    stored = pq.ParquetDataset(data.request_files("next")).read().to_pylist()
    users = {row["request_id"]: row["user_id"] for row in stored}
    rows = []
    for place, request_id in enumerate(batch.request_id.tolist()):
        real = batch.history_row[place] != 0
        names = [
            [name for bit, name in enumerate(data.manifest.actions) if code >> bit & 1]
            for code in batch.history_action[place][real].tolist()
        ]
        candidates = batch.candidate_row[place][batch.candidate_mask[place]].tolist()
        row = {
            "history": [items[row] for row in batch.history_row[place][real].tolist()],
            "history_action": [sum(1 << actions.index(name) for name in own) for own in names],
            "history_age": batch.history_age[place][real].tolist(),
            "candidates": [items[row] for row in candidates],
            "user_id": users[request_id],
        }
        for column, (name, values) in enumerate(data.manifest.context.items()):
            row[name] = [None, *values][int(batch.context[place, column])]
        rows.append(row)
    return pd.DataFrame(rows)


def test_a_model_on_its_own_dataset_scores_bit_for_bit_as_without_a_translation(data, own):
    bundle = Bundle.load(own)
    translator = Translator(bundle, data)
    assert translator.notes == []
    tables = {**CONFIG.tables.others, **translator.id_columns}
    for batch in batches(data, tables):
        assert torch.equal(translator.score(batch), bundle.score(batch))


def test_a_model_of_another_catalog_scores_as_it_is_served_on_raw_ids(data, stranger):
    served = ServedRanker()
    served.load(stranger)
    translator = Translator(Bundle.load(stranger), data)
    longest = 0
    for batch in batches(data, translator.id_columns):
        found = translator.score(batch)
        wanted = served.predict(None, raw(data, batch, served.bundle.meta.actions))
        longest = max(longest, int((batch.history_row != 0).sum(1).max()))
        for head, action in enumerate(data.manifest.actions):
            mine = found[..., head][batch.candidate_mask].double().sigmoid().numpy()
            np.testing.assert_allclose(mine, np.concatenate(wanted[action].to_list()), atol=1e-6)
    # Else no history was cut to the model's 5 items.
    assert longest == 12


def test_what_a_model_cannot_see_is_said(data, stranger):
    notes = Translator(Bundle.load(stranger), data).notes
    ids = data.catalog.item_id.to_pylist()
    missing = sum(item % 5 == 0 for item in ids)
    assert notes == [
        f"{missing} of the catalog's {len(ids)} items have no row of their own in it",
        "the dataset lacks the context column weather that it reads",
        "the dataset lacks the ids of its table session",
    ]


def catalog_of(ids, buckets=0, first=2):
    """Items, `buckets` lines without an id from row `first` on."""
    lines = list(ids)
    lines[first - 2 : first - 2] = [None] * buckets
    none = np.zeros(len(lines), np.int64)
    facts = RowFacts(first_bucket=first, buckets=buckets)
    return Catalog(pa.array(lines, pa.string()), none, none, none, none.astype(np.int8), facts)


def test_items_find_their_row_or_their_bucket_by_id():
    known = catalog_of(["b", "a"], buckets=2)
    # Rows of `known`: 2 and 3 are buckets, "b" is 4 and "a" is 5.
    rows = item_rows(catalog_of(["a", "x", "b", ""]), known)
    assert rows.tolist() == [0, 1, 5, 2 + bucket_of("x", 2), 4, 2 + bucket_of("", 2)]
    assert item_rows(catalog_of(["a", "x"]), catalog_of(["b", "a"])).tolist() == [0, 1, 3, 1]


@pytest.mark.parametrize(("own", "there"), [(4, [2, 3, 2, 3]), (3, [1, 1, 1])])
def test_a_bucket_is_known_by_its_number_where_the_numbers_divide(own, there):
    known = catalog_of(["a"], buckets=2)
    assert item_rows(catalog_of(["a"], buckets=own), known).tolist() == [0, 1, *there, 4]


def test_ids_of_another_type_and_models_of_other_actions_are_refused(data, own):
    bundle = Bundle.load(own)
    with pytest.raises(DataError, match="int64 in the dataset, but string in the model's catalog"):
        Translator(replace(bundle, catalog=catalog_of(["a"])), data)
    other = bundle.meta.model_copy(update={"actions": ["share"]})
    with pytest.raises(DataError, match=r"the model predicts share, .* holds save, click"):
        Translator(replace(bundle, meta=other), data)


def test_an_action_that_the_model_does_not_know_has_no_score(data, own):
    bundle = Bundle.load(own)
    meta = bundle.meta.model_copy(update={"actions": ["share", "click"]})
    translator = Translator(replace(bundle, meta=meta), data)
    assert translator.actions == ["click"]
    batch = next(iter(batches(data, {**CONFIG.tables.others, **translator.id_columns})))
    whole = bundle.score(translator.translate(batch))
    scores = translator.score(batch)
    assert torch.equal(scores[..., 1], whole[..., 1])
    assert scores[..., 0].isnan().all()
    # save is unknown to it: click where it was there, else the last action (share, click: click).
    codes = translator.translate(batch).history_action[batch.history_row != 0]
    assert set(codes.tolist()) == {2}


def test_a_champion_without_the_primary_action_leaves_its_rules_undecided(data, own):
    bundle = Bundle.load(own)
    tables = CONFIG.tables.others
    scored = score_holdout(CONFIG, data, "next", bundle.score, tables=tables, users=True)
    meta = bundle.meta.model_copy(update={"actions": ["share", "click"]})
    champion = Champion("old", "1", Translator(replace(bundle, meta=meta), data))
    match = Match.of(CONFIG, data, champion)
    match.play("next", scored)
    assert {row["action"] for row in match.comparison["next"]} == {"click"}
    assert set(match.metrics["next"]["pooled"]) == {"click"}
    gate = Gate(min_auc=0.0, undecided="refuse")
    metrics = {"next": {"pooled": {"save": {"auc": 0.7}}}}
    decision = decide(gate, metrics, ["save", "click"], figures=match.figures, without=None)
    assert not decision.passed
    assert decision.reasons[1] == "undecided: save AUC on next: the champion does not predict save"
