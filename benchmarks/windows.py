"""Time and memory of the dataset stage, beside pandas and hand-written SQL, and as the log grows.

First the news log (3 M clicks, history 50): the whole dataset by Thawline and by pandas, written
plainly and carefully, and its requests alone by hand-written DuckDB SQL. All must give the same
requests. It is skipped where the log is not at hand (`--log`). Then a simulated feed, and one of
ten times the users, under a memory limit that makes the larger one spill.

Each contestant runs in a process of its own; seconds leave imports out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import news
from peers.measure import NEWS_LOG, measured, run_apart, show, verdict

CONTESTANTS = ("thawline", "sql", "pandas, careful", "pandas, plain")
SIMULATED = {
    "simulate": {"users": 15_000, "items": 50_000, "days": 30},
    "windows": {"test_days": 2, "finetune_days": 10, "pretrain_days": 18},
}


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, default=NEWS_LOG, help="the news log's Parquet file")
    parser.add_argument("--events", type=int, default=3_000_000, help="simulated impressions")
    parser.add_argument("--growth", type=int, default=10, help="how many times as many at the end")
    parser.add_argument("--memory-limit", default="1GB", help="of the engine, on the simulated log")
    parser.add_argument("--skip", choices=["news", "growth"], action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="small logs; no figure to quote")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(*options.one)
        return
    with tempfile.TemporaryDirectory(prefix="thawline-bench-") as folder:
        if "news" not in options.skip:
            compare_on_news(options, Path(folder))
        if "growth" not in options.skip:
            grow(options, Path(folder))


def compare_on_news(options: argparse.Namespace, folder: Path) -> None:
    """Every contestant on the news log."""
    if not options.log.exists():
        print(f"skipped: the news log is not at {options.log}; set --log")
        return
    log = options.log
    if options.quick:
        log = folder / "some_users.parquet"
        run_apart(__file__, "--one", "thin", str(options.log), str(log))
    results = {}
    for name in CONTESTANTS:
        out = folder / name.replace(", ", "-")
        took = run_apart(__file__, "--one", name, str(log), str(out))
        results[name] = run_apart(__file__, "--one", "checksum", str(out)) | took
        shutil.rmtree(out)
    ours = results["thawline"]
    show(
        f"news log: {ours['requests']:,} requests, history {news.HISTORY}",
        ["", "seconds", "CPU seconds", "thawline is faster by", "peak MiB", "the same requests"],
        [
            [
                name,
                f"{result['seconds']:.1f}",
                f"{result['cpu']:.1f}",
                f"{result['seconds'] / ours['seconds']:.2f}x",
                f"{result['peak_mib']:,.0f}",
                "yes" if same(result, ours) else "NO",
            ]
            for name, result in results.items()
        ],
    )
    plain, careful, sql = (
        results[name]["seconds"] for name in ("pandas, plain", "pandas, careful", "sql")
    )
    print(
        verdict(
            "times as fast as plain pandas:",
            plain / ours["seconds"],
            5,
            least=True,
            quick=options.quick,
        )
    )
    print(
        verdict(
            "times as fast as careful pandas:",
            careful / ours["seconds"],
            5,
            least=True,
            quick=options.quick,
        )
    )
    print(
        verdict(
            "times as long as SQL:", ours["seconds"] / sql, 1.5, least=False, quick=options.quick
        )
    )
    print(
        verdict("peak memory, GiB:", ours["peak_mib"] / 1024, 4, least=False, quick=options.quick)
    )


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two contestants wrote the same requests."""
    return all(one[name] == other[name] for name in ("requests", "hash", "megahours"))


def grow(options: argparse.Namespace, folder: Path) -> None:
    """Thawline on a simulated log and on one with more users."""
    events = options.events // (30 if options.quick else 1)
    small, large = folder / "small.parquet", folder / "large.parquet"
    made = run_apart(__file__, "--one", "simulate", str(small), str(events))
    run_apart(__file__, "--one", "multiply", str(small), str(large), str(options.growth))
    results = [
        run_apart(__file__, "--one", "grown", str(log), str(folder / "out"), options.memory_limit)
        for log in (small, large)
    ]
    show(
        f"simulated feed, memory_limit {options.memory_limit}",
        ["events", "seconds", "CPU seconds", "events/s", "peak MiB", "most spilled MiB"],
        [
            [
                f"{count:,}",
                f"{result['seconds']:.1f}",
                f"{result['cpu']:.1f}",
                f"{count / result['seconds']:,.0f}",
                f"{result['peak_mib']:,.0f}",
                f"{result['spilled_mib']:,.0f}",
            ]
            for count, result in zip(
                (made["events"], made["events"] * options.growth), results, strict=True
            )
        ],
    )
    time, memory = (results[1][name] / results[0][name] for name in ("seconds", "peak_mib"))
    limit = 1.2 * options.growth
    print(
        verdict(
            f"{options.growth}x the events, times as long:",
            time,
            limit,
            least=False,
            quick=options.quick,
        )
    )
    print(
        verdict(
            f"{options.growth}x the events, times the memory:",
            memory,
            1.5,
            least=False,
            quick=options.quick,
        )
    )


def run_one(name: str, *arguments: str) -> None:
    """One job, in the process made for it."""
    jobs = {
        "thawline": news.build,
        "sql": build_sql,
        "pandas, plain": lambda log, out: build_pandas(log, out, "histories_by_user"),
        "pandas, careful": lambda log, out: build_pandas(log, out, "histories_by_position"),
        "checksum": checksum,
        "thin": thin,
        "simulate": simulate_feed,
        "multiply": multiply,
        "grown": build_grown,
    }
    jobs[name](*arguments)


def build_sql(log: str, out: str) -> None:
    """Its requests by DuckDB SQL."""
    from peers import sql

    Path(out).mkdir()
    with measured():
        sql.build(Path(log), Path(out))


def build_pandas(log: str, out: str, histories: str) -> None:
    """The whole dataset by pandas."""
    from peers import frames

    Path(out).mkdir()
    with measured():
        frames.build(Path(log), Path(out), getattr(frames, histories))


def checksum(out: str) -> None:
    """What tells whether two folders hold the same requests."""
    import duckdb

    context = ", ".join(f"ctx_{name}" for name in news.CONTEXT)
    query = news.CHECKSUM.format(out=out, context=context)
    (found,) = duckdb.sql(query).fetchall()
    with measured(**dict(zip(("requests", "hash", "megahours"), found, strict=True))):
        pass


def thin(log: str, out: str) -> None:
    """A twentieth of the log's users."""
    import duckdb

    with measured():
        duckdb.sql(
            f"copy (select * from '{log}' where hash(user_id) % 20 = 0) to '{out}' (format parquet)"
        )


def simulate_feed(log: str, events: str) -> None:
    """A simulated feed's events."""
    from thawline.config import Simulate
    from thawline.data.simulate import simulate

    folder = Path(log).with_suffix("")
    settings = Simulate.model_validate(SIMULATED["simulate"] | {"impressions": int(events)})
    with measured(events=int(events)):
        made = simulate(settings, folder)
        made.events.rename(log)
        shutil.rmtree(folder)


def multiply(log: str, out: str, times: str) -> None:
    """The same feed with more users: copies of it, each with users and requests of its own."""
    import duckdb

    with measured():
        duckdb.sql(
            f"""
            copy (
                select * exclude (copy) replace (
                    user_id + copy * (select max(user_id) from '{log}') as user_id,
                    request_id + copy * (select max(request_id) from '{log}') as request_id
                )
                from '{log}', range({times}) as copies(copy)
            ) to '{out}' (format parquet)
            """
        )


def build_grown(log: str, out: str, memory_limit: str) -> None:
    """A simulated log by the dataset stage; the folder is removed afterwards."""
    from thawline.config import Config
    from thawline.data.windows import build_dataset

    config = Config.model_validate(
        {
            "events": {"preset": "feed", "path": log},
            "windows": SIMULATED["windows"] | {"memory_limit": memory_limit},
        }
    )
    Path(out).mkdir()
    spilled = 0

    def watch(_: str) -> None:
        nonlocal spilled
        spilled = max(spilled, folder_size(Path(out) / ".scratch"))

    with measured() as result:
        build_dataset(config, Path(out), watch)
        result["spilled_mib"] = spilled / 2**20
    shutil.rmtree(out)


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(entry.stat().st_size for entry in os.scandir(folder)) if folder.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
