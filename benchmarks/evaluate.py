"""What evaluation costs beside scoring: time, memory, and the bootstrap over users.

A hold-out of a million requests with 5 candidates and two actions is made up, and measured as the
evaluation stage does it: every figure, pooled, by tier and by six kinds of slices, and then the
intervals of 1,000 resamples of 100,000 users. Scoring is measured on `--sample` requests (history
50, a fresh ranker of the default shape over a million rows, batches that are ready) and
extrapolated to all of them. Then a table of a million rows is ranked for 2,000 requests, which is
retrieval's part.

Seconds of a busy machine say little; CPU seconds are printed beside them, and the ratio is theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from peers.measure import measured, run_apart, show, verdict

from thawline.config import Model
from thawline.data.batches import Batch
from thawline.data.manifest import Catalog
from thawline.evaluation.figures import Column, Measured
from thawline.evaluation.intervals import UserSums, intervals
from thawline.evaluation.metrics import holdout_curves, holdout_metrics
from thawline.evaluation.retrieval import Queries, places
from thawline.evaluation.scored import Scored, concat, from_batch
from thawline.evaluation.slices import slicings
from thawline.model.bundle import Bundle, Meta

ACTIONS = ["save", "click"]
CONTEXT = {name: [str(value) for value in range(9)] for name in ("surface", "device", "hour")}
DAY = 86_400_000_000
ITEMS = 1_000_000
HISTORY = 50
RESAMPLES = 1_000
RETRIEVED = 2_000


def main() -> None:
    """Runs each part in a process of its own and prints what it cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--sample", type=int, default=16_384, help="requests that are scored")
    parser.add_argument("--batch", type=int, default=2_048)
    parser.add_argument("--quick", action="store_true", help="a fiftieth; no figure to quote")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.requests, options.users, options.sample = 20_000, 2_000, 2_048
    if options.one:
        PARTS[options.one](options)
        return
    passed = [
        f"--{name}={getattr(options, name)}"
        for name in ("requests", "users", "candidates", "sample", "batch")
    ]
    found = {name: run_apart(__file__, "--one", name, *passed) for name in PARTS}
    scale = options.requests / options.sample
    scoring = {key: scale * found["score"][key] for key in ("seconds", "cpu")}
    rows = [
        (f"score (from {options.sample:,} requests)", scoring, found["score"]),
        *(
            (name, found[part], found[part])
            for part, name in (
                ("figures", "figures, slices, curves"),
                ("bootstrap", f"{RESAMPLES:,} resamples of {options.users:,} users"),
                ("retrieve", f"retrieval, {RETRIEVED:,} requests, {ITEMS:,} rows"),
            )
        ),
    ]
    show(
        f"evaluation of {options.requests:,} requests x {options.candidates} candidates",
        ["", "seconds", "CPU seconds", "before, MiB", "more at the peak, MiB"],
        [
            [
                name,
                f"{times['seconds']:,.1f}",
                f"{times['cpu']:,.1f}",
                f"{memory['before_mib']:,.0f}",
                f"{memory['peak_mib'] - memory['before_mib']:,.0f}",
            ]
            for name, times, memory in rows
        ],
    )
    share = 100 * found["figures"]["cpu"] / scoring["cpu"]
    with_intervals = share + 100 * found["bootstrap"]["cpu"] / scoring["cpu"]
    print(verdict("figures, % of scoring (CPU)", share, 10, least=False, quick=options.quick))
    print(
        verdict(
            "with intervals, % of scoring (CPU)",
            with_intervals,
            10,
            least=False,
            quick=options.quick,
        )
    )
    print(
        verdict("bootstrap, s", found["bootstrap"]["seconds"], 10, least=False, quick=options.quick)
    )


@contextmanager
def beyond_what_is_there() -> Iterator[dict[str, Any]]:
    """`measured`, and the memory before the block."""
    with measured(before_mib=psutil.Process().memory_info().rss / 2**20) as result:
        yield result


def made_up(options: argparse.Namespace) -> Scored:
    """A scored hold-out of which the model knows something, in order of time."""
    rng = np.random.default_rng(0)
    requests, count = options.requests, options.requests * options.candidates
    labels = rng.random((count, len(ACTIONS)), np.float32) < 0.2
    scores = rng.standard_normal((count, len(ACTIONS)), np.float32)
    return Scored(
        actions=ACTIONS,
        request_id=np.arange(requests),
        timestamp=np.sort(rng.integers(0, 3 * DAY, requests)),
        offsets=np.arange(0, count + 1, options.candidates),
        row=rng.integers(2, ITEMS + 2, count),
        labels=labels.astype(np.int8),
        logits=scores + labels - 1,
        oracle=None,
        history_length=rng.integers(0, HISTORY + 1, requests),
        context=rng.integers(0, 10, (requests, len(CONTEXT))),
        user_id=pa.array(rng.integers(0, options.users, requests)),
    )


def figures(options: argparse.Namespace) -> None:
    """Every figure that the evaluation stage makes of scores, but for intervals and retrieval."""
    scored = made_up(options)
    rng = np.random.default_rng(1)
    tier = rng.integers(0, 4, ITEMS).astype(np.int8)
    catalog: Any = SimpleNamespace(first_seen=rng.integers(-100 * DAY, 0, ITEMS))
    with beyond_what_is_there():
        cut = slicings(scored, CONTEXT, catalog)
        holdout_metrics(scored, tier, hit_at=3, slicings=cut)
        holdout_curves(scored)


def bootstrap(options: argparse.Namespace) -> None:
    """The intervals of every figure, pooled and by tier, of both actions."""
    scored = made_up(options)
    user = scored.user
    tiers = np.random.default_rng(1).integers(0, 4, ITEMS).astype(np.int8)[scored.row - 2]
    slices: dict[tuple[str, ...], Measured] = {}
    for index, action in enumerate(ACTIONS):
        column = Column(scored, scored.logits[:, index], scored.labels[:, index], 3)
        parts = [column.whole, *column.parts(tiers, 4)]
        for number, part in enumerate(parts):
            slices[action, str(number)] = column.measure(part)
            slices[action, str(number)].figures()
    with beyond_what_is_there():
        intervals({name: UserSums(own, user) for name, own in slices.items()}, RESAMPLES)


def make_bundle() -> Bundle:
    """A fresh model over `ITEMS` rows."""
    meta = Meta(
        data_version="",
        recipe="",
        epochs=0,
        seed=0,
        actions=ACTIONS,
        context=CONTEXT,
        history_length=HISTORY,
        num_rows=ITEMS + 2,
        model=Model(),
    )
    torch.manual_seed(0)
    nothing = np.zeros(0, np.int64)
    catalog = Catalog(pa.array([], pa.int64()), nothing, nothing, nothing, nothing)
    weights = {"item": torch.randn(meta.num_rows, meta.model.dim)}
    return Bundle(meta, meta.make_ranker().eval(), weights, catalog)


def score(options: argparse.Namespace) -> None:
    """The ranker's forward and the flattening of its scores."""
    bundle, batch = make_bundle(), make_batch(options)
    bundle.score(batch)
    with beyond_what_is_there():
        parts = [
            from_batch(ACTIONS, batch, bundle.score(batch))
            for _ in range(options.sample // options.batch)
        ]
        concat(parts)


def make_batch(options: argparse.Namespace) -> Batch:
    """Requests with full histories."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(2, ITEMS + 2, shape, generator=generator)

    size, count = options.batch, options.candidates
    return Batch(
        request_id=torch.arange(size),
        timestamp=torch.zeros(size, dtype=torch.int64),
        history_row=draw(size, HISTORY),
        history_action=torch.ones(size, HISTORY, dtype=torch.int64),
        history_age=torch.rand(size, HISTORY, generator=generator) * 100,
        candidate_row=draw(size, count),
        candidate_mask=torch.ones(size, count, dtype=torch.bool),
        candidate_log_q=torch.zeros(size, count),
        labels=torch.zeros(size, count, len(ACTIONS)),
        context=torch.ones(size, len(CONTEXT), dtype=torch.int64),
        oracle=None,
    )


@torch.inference_mode()
def retrieve(options: argparse.Namespace) -> None:
    """Places of one positive of each request among all rows."""
    bundle = make_bundle()
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(RETRIEVED, bundle.meta.model.dim, generator=generator)
    request = torch.arange(RETRIEVED)
    target = torch.randint(2, ITEMS + 2, (RETRIEVED,), generator=generator)
    known = torch.randint(2, ITEMS + 2, (RETRIEVED * HISTORY,), generator=generator)
    queries = Queries(
        torch.nn.functional.normalize(vectors, dim=-1),
        torch.zeros(RETRIEVED, dtype=torch.int64),
        torch.stack([request, target], dim=1),
        torch.stack([request.repeat(HISTORY), known], dim=1),
        np.ones(RETRIEVED, np.int64),
    )
    with beyond_what_is_there():
        places(queries, bundle, torch.zeros(ITEMS, dtype=torch.int64))


PARTS = {"score": score, "figures": figures, "bootstrap": bootstrap, "retrieve": retrieve}


if __name__ == "__main__":
    main()
