"""Requests a second of the reader, beside a DataLoader over rows and a bare scan of the files.

The dataset is that of the news log where it is at hand (`--log`), else of a simulated feed, built
in a temporary folder, or an existing one (`--dataset`). A contestant reads the training requests in
batches of 512, each in a process of its own:

- thawline: `RequestReader`, shuffled; with and without negatives drawn at the time;
- scan: `pyarrow.dataset` reads the same columns and throws them away, on one thread (as the reader
  does) and on all;
- rows: `torch.utils.data.DataLoader` over a dataset of Parquet rows with the default collate.

Then the negatives' sampler alone, on one core.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from peers import news
from peers.measure import NEWS_LOG, measured, run_apart, show, verdict

BATCH = 512
EPOCHS = 3
ROWS_FOR_SECONDS = 15.0
DRAWS = {"batch": 4_096, "per_positive": 64, "seconds": 5.0}
CONTESTANTS = (
    "thawline",
    "thawline, negatives drawn",
    "scan, 1 thread",
    "scan, all threads",
    "rows, in the process",
    "rows, 2 workers",
)
POPULARITIES = ("as_of", "decayed", "window")


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, default=NEWS_LOG, help="the news log's Parquet file")
    parser.add_argument("--dataset", type=Path, help="a dataset folder, instead of a log")
    parser.add_argument("--events", type=int, default=3_000_000, help="impressions if simulated")
    parser.add_argument("--quick", action="store_true", help="small logs; no figure to quote")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
        return
    with tempfile.TemporaryDirectory(prefix="thawline-bench-") as folder:
        dataset = options.dataset or Path(folder) / "dataset"
        if options.dataset is None:
            if options.log.exists():
                source = f"news log, {'a twentieth' if options.quick else 'all'} of its users"
                share = "0.05" if options.quick else "1.0"
                run_apart(__file__, "--one", "build news", str(options.log), str(dataset), share)
            else:
                print(f"the news log is not at {options.log} (set --log); simulating a feed")
                source = "simulated feed"
                events = options.events // (30 if options.quick else 1)
                run_apart(__file__, "--one", "build feed", str(events), str(dataset))
        else:
            source = str(dataset)
        compare(dataset, source, options.quick)


def compare(dataset: Path, source: str, quick: bool) -> None:
    """Every contestant, then the sampler."""
    results = {name: run_apart(__file__, "--one", name, str(dataset)) for name in CONTESTANTS}
    if not results["thawline, negatives drawn"]:
        del results["thawline, negatives drawn"]
    rate = {name: result["requests"] / result["seconds"] for name, result in results.items()}
    show(
        f"training requests in batches of {BATCH}: {source}",
        [
            "",
            "requests/s",
            "thawline is faster by",
            "first batch, ms",
            "CPU us a request",
            "peak MiB",
        ],
        [
            [
                name,
                f"{rate[name]:,.0f}",
                f"{rate['thawline'] / rate[name]:.2f}x",
                f"{1e3 * result['first']:.0f}" if "first" in result else "",
                f"{1e6 * result['cpu'] / result['read']:.1f}" if "read" in result else "",
                f"{result['peak_mib']:,.0f}",
            ]
            for name, result in results.items()
        ],
    )
    rows = max(value for name, value in rate.items() if name.startswith("rows"))
    ours = rate["thawline"]
    print(verdict("times the faster DataLoader:", ours / rows, 20, least=True, quick=quick))
    for scan in ("scan, 1 thread", "scan, all threads"):
        print(verdict(f"share of the {scan}:", ours / rate[scan], 0.5, least=True, quick=quick))
        work = results[scan]["cpu"] / results["thawline"]["cpu"]
        print(f"CPU seconds of the {scan}, as a share of thawline's: {work:.2f}")
    draws = {
        name: run_apart(__file__, "--one", "draw", str(dataset), name) for name in POPULARITIES
    }
    show(
        "negatives available at the time, one core",
        ["popularity", "draws a CPU second", "peak MiB"],
        [
            [name, f"{result['draws'] / result['cpu']:,.0f}", f"{result['peak_mib']:,.0f}"]
            for name, result in draws.items()
        ],
    )
    for name, result in draws.items():
        millions = result["draws"] / result["cpu"] / 1e6
        print(verdict(f"{name} draws a second, millions:", millions, 5, least=True, quick=quick))


def run_one(name: str, *arguments: str) -> None:
    """One job, in the process made for it."""
    jobs = {
        "build news": news.build,
        "build feed": build_feed,
        "thawline": lambda dataset: read_thawline(dataset, negatives=False),
        "thawline, negatives drawn": lambda dataset: read_thawline(dataset, negatives=True),
        "scan, 1 thread": lambda dataset: scan(dataset, threads=False),
        "scan, all threads": lambda dataset: scan(dataset, threads=True),
        "rows, in the process": lambda dataset: read_rows(dataset, workers=0),
        "rows, 2 workers": lambda dataset: read_rows(dataset, workers=2),
        "draw": draw,
    }
    jobs[name](*arguments)


def build_feed(events: str, out: str) -> None:
    """The dataset of a simulated feed."""
    from thawline.config import parse_config
    from thawline.data.windows import build_dataset

    Path(out).mkdir()
    with measured():
        build_dataset(parse_config(f"simulate: {{impressions: {events}}}"), Path(out))


def read_thawline(dataset: str, *, negatives: bool) -> None:
    """Whole epochs of the reader; the fastest counts, as it does for the scan."""
    from thawline.config import Negatives
    from thawline.data.batches import RequestReader
    from thawline.data.manifest import Dataset
    from thawline.data.negatives import NegativeSampler

    data = Dataset.open(dataset)
    settings = Negatives(bucket_minutes=data.manifest.bucket_minutes)
    if negatives and data.manifest.impressions:
        print("{}")
        return
    sampler = NegativeSampler(data, settings, 0) if negatives else None
    reader = RequestReader(data, "train", batch_size=BATCH, sampler=sampler)
    seconds, firsts, requests = [], [], 0
    with measured() as result:
        for epoch in range(EPOCHS):
            started = time.perf_counter()
            batches = reader.epoch(epoch)
            requests = len(next(batches))
            firsts.append(time.perf_counter() - started)
            requests += sum(len(batch) for batch in batches)
            seconds.append(time.perf_counter() - started)
        result |= {"requests": requests, "seconds": min(seconds), "first": min(firsts)}
        result["read"] = EPOCHS * requests


def training_files(dataset: str) -> tuple[list[Path], list[str], int]:
    """Files of the training requests, the columns that the reader needs, the longest history."""
    from thawline.data.manifest import Dataset

    data = Dataset.open(dataset)
    manifest = data.manifest
    columns = ["request_id", "timestamp", "history_row", "history_action", "history_age"]
    columns += ["candidate_row", *(f"label_{action}" for action in manifest.actions)]
    columns += [f"ctx_{name}" for name in manifest.context]
    return data.request_files("train"), columns, manifest.history_length


def scan(dataset: str, *, threads: bool) -> None:
    """Decodes the same columns and does nothing with them."""
    import pyarrow.dataset as ds

    files, columns, _ = training_files(dataset)
    seconds = []
    with measured() as result:
        for _ in range(EPOCHS):
            started = time.perf_counter()
            table = ds.dataset([str(path) for path in files])
            scanner = table.scanner(columns=["held_out", *columns], use_threads=threads)
            requests = sum(batch["held_out"].false_count for batch in scanner.to_batches())
            seconds.append(time.perf_counter() - started)
        result |= {"requests": requests, "seconds": min(seconds), "read": EPOCHS * requests}


def read_rows(dataset: str, *, workers: int) -> None:
    """A DataLoader over rows, for a while."""
    from peers.rows import RowDataset
    from torch.utils.data import DataLoader

    files, columns, width = training_files(dataset)
    rows = RowDataset(files, columns, width)
    loader = DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=workers)
    with measured() as result:
        started = time.perf_counter()
        requests = 0
        for batch in loader:
            if not requests:
                result["first"] = time.perf_counter() - started
            requests += len(batch["request_id"])
            result["seconds"] = time.perf_counter() - started
            if result["seconds"] > ROWS_FOR_SECONDS:
                break
        result["requests"] = requests


def draw(dataset: str, popularity: str) -> None:
    """Draws negatives for real requests on one core; its CPU time is that of one thread."""
    import numpy as np

    from thawline.config import Negatives
    from thawline.data.batches import RequestReader
    from thawline.data.manifest import Dataset
    from thawline.data.negatives import NegativeSampler

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    data = Dataset.open(dataset)
    settings = Negatives.model_validate(
        {"popularity": popularity, "bucket_minutes": data.manifest.bucket_minutes}
    )
    sampler = NegativeSampler(data, settings, 0)
    reader = RequestReader(
        data, "train", batch_size=int(DRAWS["batch"]), sampler=None, limit=100_000
    )
    batches = [
        (batch.request_id.numpy(), batch.timestamp.numpy(), batch.candidate_row.numpy())
        for batch in reader.epoch(0)
    ]
    count, draws, epoch = int(DRAWS["per_positive"]), 0, 0
    with measured() as result:
        started = time.perf_counter()
        while time.perf_counter() - started < DRAWS["seconds"]:
            for batch in batches:
                draws += int(np.count_nonzero(sampler.draw(*batch, count, epoch)))
            epoch += 1
        result["draws"] = draws


if __name__ == "__main__":
    sys.exit(main())
