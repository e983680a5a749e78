"""The served model: how long a request takes, a load, and how many candidates a second in bulk.

A fresh model of `--rows` items is packed as `register` packs it and served from that folder: by
MLflow (`model.predict`, a DataFrame of one request) and by the model under it, beside what no
server can beat: the ranker's forward on a batch that is ready. They take turns request by request.
On a machine that does other things too, read the time of the cores.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from thawline.config import Config, Model
from thawline.data.batches import Batch
from thawline.data.manifest import Catalog
from thawline.model.bundle import Bundle, Meta, save_bundle
from thawline.stages import score
from thawline.tracking.packing import pack

CONTEXT = {"surface": ["home", "search", "detail"], "device": ["phone", "tablet", "desktop"]}


def main() -> None:
    """Runs everything and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--bulk", type=int, default=1_000, help="requests of the bulk file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--strings", action="store_true", help="item ids are strings")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pa.set_cpu_count(options.threads)
    config = Config.model_validate({"simulate": {}, "runtime": {"threads": options.threads}})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bundle = make_model(root / "model", options)
        pack(config, root / "packed", root / "model", bundle)
        started, cpu = time.perf_counter(), time.process_time()
        served = mlflow.pyfunc.load_model(str(root / "packed"))
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        Console().print(f"load of {options.rows:,} rows: {elapsed:.2f} s ({cpu:.2f} s of a core)")
        latencies(served, bundle, options)
        bulk(config, root, bundle, options)


def make_model(folder: Path, options: argparse.Namespace) -> Bundle:
    """A model folder with random rows over scattered ids."""
    folder.mkdir()
    count = options.rows - 2
    ids = np.random.default_rng(0).permutation(count) * 7 + 10**9
    catalog = pa.table(
        {
            "item_id": pa.array([f"item-{i}" for i in ids] if options.strings else ids),
            "row": pa.array(np.arange(2, count + 2)),
            "first_seen": pa.array(np.zeros(count, np.int64)).cast(pa.timestamp("us", tz="UTC")),
            "pretrain_count": pa.array(np.ones(count, np.int64)),
            "support": pa.array(np.ones(count, np.int64)),
            "tier": pa.array(np.zeros(count, np.int8)),
        }
    )
    pq.write_table(catalog, folder / "source.parquet")
    meta = Meta(
        data_version="benchmark",
        recipe="co-train",
        epochs=1,
        seed=0,
        actions=["click", "save"],
        context=CONTEXT,
        history_length=options.history,
        num_rows=options.rows,
        model=Model(dim=options.dim),
    )
    torch.manual_seed(0)
    ranker = meta.make_ranker()
    weights = {"item": torch.randn(options.rows, options.dim)}
    bundle = Bundle(meta, ranker.eval(), weights, Catalog.read(folder / "source.parquet"))
    save_bundle(folder, bundle, folder / "source.parquet")
    return bundle


def raw_requests(bundle: Bundle, options: argparse.Namespace, count: int) -> pd.DataFrame:
    """Requests with full histories, of ids drawn from the catalog."""
    rng = np.random.default_rng(1)
    ids = bundle.catalog.item_id.to_numpy(zero_copy_only=False)
    return pd.DataFrame(
        {
            "history": list(ids[rng.integers(len(ids), size=(count, options.history))]),
            "candidates": list(ids[rng.integers(len(ids), size=(count, options.candidates))]),
            "history_action": list(rng.integers(1, 4, size=(count, options.history))),
            "history_age": list(rng.exponential(24.0, size=(count, options.history))),
            "surface": rng.choice(CONTEXT["surface"], size=count),
            "device": rng.choice(CONTEXT["device"], size=count),
        }
    )


def ready_batch(bundle: Bundle, options: argparse.Namespace, seed: int) -> Batch:
    """One request as the ranker takes it."""
    rng = np.random.default_rng(seed)
    length, count = -(-options.history // 8) * 8, options.candidates
    rows = torch.from_numpy(rng.integers(2, options.rows, size=(1, length)))
    rows[:, options.history :] = 0
    return Batch(
        request_id=torch.zeros(1, dtype=torch.int64),
        timestamp=torch.zeros(1, dtype=torch.int64),
        history_row=rows,
        history_action=torch.ones_like(rows),
        history_age=torch.rand(1, length) * 24,
        candidate_row=torch.from_numpy(rng.integers(2, options.rows, size=(1, count))),
        candidate_mask=torch.ones(1, count, dtype=torch.bool),
        candidate_log_q=torch.zeros(1, count),
        labels=torch.zeros(1, count, len(bundle.meta.actions)),
        context=torch.ones(1, len(bundle.meta.context), dtype=torch.int64),
        oracle=None,
    )


def latencies(
    served: mlflow.pyfunc.PyFuncModel, bundle: Bundle, options: argparse.Namespace
) -> None:
    """Times of one request."""
    requests = raw_requests(bundle, options, 32)
    one = [requests.iloc[[place]] for place in range(32)]
    batches = [ready_batch(bundle, options, seed) for seed in range(32)]
    inner = served.unwrap_python_model()
    contestants: dict[str, Callable[[int], object]] = {
        "mlflow predict": lambda turn: served.predict(one[turn % 32]),
        "the model under it": lambda turn: inner.predict(None, one[turn % 32]),
        "forward alone": lambda turn: bundle.score(batches[turn % 32]).double().sigmoid(),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(options.requests + 10):
        for name, call in contestants.items():
            started, cpu = time.perf_counter(), time.process_time()
            call(turn)
            if turn >= 10:
                elapsed = time.perf_counter() - started
                times[name].append((1e3 * elapsed, 1e3 * (time.process_time() - cpu)))
    table = Table(title=f"one request of {options.candidates} candidates, ms")
    for heading in ("", "p50", "p99", "of the cores, p50"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, own in times.items():
        elapsed, busy = zip(*own, strict=True)
        p99 = statistics.quantiles(elapsed, n=100)[98]
        cells = (statistics.median(elapsed), p99, statistics.median(busy))
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    Console().print(table)


def bulk(config: Config, root: Path, bundle: Bundle, options: argparse.Namespace) -> None:
    """Candidates a second from file to file, and the memory that takes."""
    requests = raw_requests(bundle, options, options.bulk)
    pq.write_table(pa.Table.from_pandas(requests), root / "requests.parquet")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    score.run(config, str(root / "model"), root / "requests.parquet", root / "scores.parquet")
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    count = options.bulk * options.candidates
    Console().print(
        f"bulk: {count:,} candidates of {options.bulk:,} requests in {elapsed:.1f} s ({cpu:.1f} s "
        f"of a core, {count / cpu:,.0f} candidates a second of it), {grown:,.0f} MiB more at most"
    )


if __name__ == "__main__":
    main()
