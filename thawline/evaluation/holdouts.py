"""Scoring the hold-outs of a dataset with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from thawline.config import Config
from thawline.data.batches import Batch, RequestReader
from thawline.data.ids import IdTableSpec
from thawline.data.manifest import Dataset, Split
from thawline.data.negatives import NegativeSampler
from thawline.data.trivial import trivial_scores
from thawline.evaluation.metrics import holdout_curves, holdout_metrics
from thawline.evaluation.retrieval import retrieval_metrics
from thawline.evaluation.scored import Scored, concat, from_batch
from thawline.evaluation.slices import slicings
from thawline.evaluation.users import read_user_ids
from thawline.model.bundle import Bundle
from thawline.progress import progress_bar

HOLDOUTS: tuple[Split, ...] = ("next", "in_window")
"""Never mixed: each is scored and reported apart."""

SAMPLER_SEED = 0
"""Evaluation negatives are the same for every model, whatever the seed of its training."""


def score_holdout(
    config: Config,
    dataset: Dataset,
    split: Split,
    score: Callable[[Batch], Tensor],
    *,
    limit: int | None = None,
    tables: Mapping[str, IdTableSpec] | None = None,
    users: bool = False,
) -> Scored | None:
    """Scores a hold-out.

    Args:
        config: Its `negatives` and `evaluation` sections are used.
        dataset: What holds the requests.
        split: `next` or `in_window`.
        score: From a batch to logits `[B, C, A]`.
        limit: At most this many requests, evenly spread; None scores all.
        tables: The model's ID tables beside `item`; None: the config's.
        users: Whether to read who asked (`Scored.user_id`).

    Returns:
        The scored candidates; None where the hold-out is empty.
    """
    reader = RequestReader(
        dataset,
        split,
        batch_size=config.evaluation.batch_size,
        sampler=evaluation_sampler(config, dataset),
        shuffle=False,
        limit=limit,
        id_columns=config.tables.others if tables is None else tables,
    )
    if reader.num_requests == 0:
        return None
    parts = []
    with progress_bar(f"score {split}", reader.num_batches) as show:
        for done, batch in enumerate(reader.epoch(0), start=1):
            parts.append(from_batch(dataset.manifest.actions, batch, score(batch)))
            show(done)
    scored = concat(parts)
    if users:
        scored = replace(scored, user_id=read_user_ids(dataset, split, scored.request_id))
    return scored


def evaluation_sampler(config: Config, dataset: Dataset) -> NegativeSampler | None:
    """The sampler of evaluation negatives; None where the log has impressions."""
    if dataset.manifest.impressions:
        return None
    # What stands beside a request in its batch must not change its score.
    settings = config.negatives.model_copy(update={"resample": False, "in_batch": 0})
    return NegativeSampler(dataset, settings, SAMPLER_SEED)


def all_metrics(
    config: Config,
    dataset: Dataset,
    score: Callable[[Batch], Tensor],
    *,
    limit: int | None = None,
    full: bool = False,
    tables: Mapping[str, IdTableSpec] | None = None,
    bundle: Bundle | None = None,
    on_scored: Callable[[Split, Scored], None] = lambda split, scored: None,
) -> dict[str, Any]:
    """The metrics tree of each hold-out that has requests, by its name.

    Args:
        config: Its `negatives` and `evaluation` sections are used.
        dataset: What holds the requests.
        score: From a batch to logits `[B, C, A]`.
        limit: At most this many requests a hold-out.
        full: Adds what takes longer or is long to read: figures by user, slices, intervals,
            scorers that know only trivial facts, and the curves of the report.
        tables: The model's ID tables beside `item`; None: the config's.
        bundle: The model, for `retrieval` over its catalog, which is the dataset's; None: without.
        on_scored: Gets each hold-out's scores before they are measured.
    """
    trees: dict[str, Any] = {}
    for split in HOLDOUTS:
        scored = score_holdout(
            config, dataset, split, score, limit=limit, tables=tables, users=full
        )
        if scored is None:
            continue
        on_scored(split, scored)
        trees[split] = _full(config, dataset, scored) if full else _light(config, dataset, scored)
        trees[split]["retrieval"] = (
            None
            if bundle is None
            else retrieval_metrics(
                bundle,
                dataset,
                split,
                requests=config.evaluation.retrieval_requests,
                k=config.evaluation.retrieval_at,
            )
        )
    return trees


def _light(config: Config, dataset: Dataset, scored: Scored) -> dict[str, Any]:
    return holdout_metrics(scored, dataset.catalog.tier, hit_at=config.evaluation.hit_at)


def _full(config: Config, dataset: Dataset, scored: Scored) -> dict[str, Any]:
    tree = holdout_metrics(
        scored,
        dataset.catalog.tier,
        hit_at=config.evaluation.hit_at,
        trivial=trivial_scores(dataset, scored.row, scored.candidate_timestamp, config.negatives),
        slicings=slicings(scored, dataset.manifest.context, dataset.catalog),
        resamples=config.evaluation.bootstrap,
    )
    return tree | {"curves": holdout_curves(scored)}


def flat_metrics(trees: Mapping[str, Any]) -> dict[str, float]:
    """The defined figures of metrics trees by flat names, as `next/cold/click/hit_at_3`."""
    flat: dict[str, float] = {}
    for holdout, tree in trees.items():
        for piece, actions in {"pooled": tree["pooled"], **tree["tiers"]}.items():
            for action, figures in actions.items():
                for name, value in figures.items():
                    if value is not None:
                        flat[f"{holdout}/{piece}/{action}/{name.replace('@', '_at_')}"] = value
    return flat
