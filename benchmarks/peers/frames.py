"""The dataset of the news log built with pandas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from .news import (
    BUCKET_US,
    CONTEXT,
    DAY_US,
    END,
    FINETUNE,
    HELD_OUT_BELOW,
    HISTORY,
    PRETRAIN,
    ROWS_PER_GROUP,
    SEQUENCE,
    TEST,
)

Histories = Callable[[pd.DataFrame, np.ndarray], pd.DataFrame]


def build(log: Path, out: Path, histories: Histories) -> None:
    """Writes the catalog, popularity, sequences and requests."""
    columns = ["user_id", "click_article_id", "click_timestamp", *CONTEXT.values()]
    events = pd.read_parquet(log, columns=columns)
    names = {column: name for name, column in CONTEXT.items()}
    events = events.rename(columns={"click_article_id": "item_id"} | names)
    events["t"] = events.pop("click_timestamp") * 1000
    events = events[events.t < END].drop_duplicates(["user_id", "item_id", "t"])
    users = pd.Series(events.user_id.unique())
    held_out = users.map(lambda user: _md5(f"holdout:{user}")[:12] < HELD_OUT_BELOW)
    events["held_out"] = events.user_id.map(pd.Series(held_out.to_numpy(), index=users))

    catalog = events.groupby("item_id").agg(first_seen=("t", "min")).reset_index()
    catalog = catalog.sort_values(["first_seen", "item_id"], ignore_index=True)
    catalog["row"] = np.arange(len(catalog)) + 2
    events = events.merge(catalog[["item_id", "row"]], on="item_id")
    trained = events[~events.held_out]
    for name, (start, stop) in {"pretrain_count": PRETRAIN, "support": FINETUNE}.items():
        counts = trained[(trained.t >= start) & (trained.t < stop)].groupby("item_id").size()
        catalog[name] = catalog.item_id.map(counts).fillna(0).astype("int64")
    catalog["tier"] = np.select(
        [catalog.support >= 100, catalog.support >= 20, catalog.support >= 1], [0, 1, 2], 3
    )
    catalog.to_parquet(out / "catalog.parquet")
    bucket = (events.t // BUCKET_US * BUCKET_US).rename("bucket")
    popularity = events.groupby([bucket, "row"]).size().rename("count").reset_index()
    popularity.to_parquet(out / "popularity.parquet")

    training = trained[(trained.t >= FINETUNE[0]) & (trained.t < FINETUNE[1])]
    for name in CONTEXT:
        values = sorted(training[name].dropna().astype(str).unique())
        codes = {value: code for code, value in enumerate(values, 1)}
        column = events[name].astype("str").map(codes).fillna(0)
        events[f"ctx_{name}"] = column.astype("int32")

    events = events.sort_values(["user_id", "t", "row"], ignore_index=True)
    _write_sequences(events, out / "sequences")
    wanted = ((events.t >= FINETUNE[0]) & (events.t < TEST[1])).to_numpy()
    requests = pd.concat([events[wanted].reset_index(drop=True), histories(events, wanted)], axis=1)
    requests["request_id"] = [
        int(_md5(f"{user}|{t}|{item}")[:16], 16) >> 1
        for user, t, item in zip(requests.user_id, requests.t, requests.item_id, strict=True)
    ]
    requests["candidate_row"] = [[row] for row in requests.row]
    requests["label_click"] = [np.ones(1, np.int8)] * len(requests)
    requests["timestamp"] = pd.to_datetime(requests.t, unit="us", utc=True)
    requests = requests.drop(columns=["row", "item_id", *CONTEXT])
    for day, part in requests.groupby(requests.t // DAY_US):
        folder = out / "requests" / f"day={day}"
        folder.mkdir(parents=True)
        part.sort_values(["t", "request_id"]).drop(columns="t").to_parquet(
            folder / "part-00000.parquet",
            compression="zstd",
            row_group_size=ROWS_PER_GROUP,
            index=False,
        )


def histories_by_user(events: pd.DataFrame, wanted: np.ndarray) -> pd.DataFrame:
    """The plain way: a group a user, and each request looks back in it."""
    rows, ages = [], []
    for _, group in events.assign(wanted=wanted).groupby("user_id", sort=True):
        times, items = group.t.to_numpy(), group.row.to_numpy()
        for t in times[group.wanted.to_numpy()]:
            stop = np.searchsorted(times, t)
            start = max(stop - HISTORY, 0)
            rows.append(items[start:stop])
            ages.append(((t - times[start:stop]) / 3.6e9).astype(np.float32))
    return _history_frame(rows, ages)


def histories_by_position(events: pd.DataFrame, wanted: np.ndarray) -> pd.DataFrame:
    """The careful way: where each history starts and stops is found for all requests at once."""
    times, items = events.t.to_numpy(), events.row.to_numpy()
    position = pd.Series(np.arange(len(events)))
    begin = position.groupby(events.user_id).transform("min").to_numpy()[wanted]
    stop = position.groupby([events.user_id, events.t]).transform("min").to_numpy()[wanted]
    start = np.maximum(stop - HISTORY, begin)
    now = times[wanted]
    spans = list(zip(start.tolist(), stop.tolist(), now.tolist(), strict=True))
    rows = [items[low:high] for low, high, _ in spans]
    ages = [((t - times[low:high]) / 3.6e9).astype(np.float32) for low, high, t in spans]
    return _history_frame(rows, ages)


def _history_frame(rows: list[np.ndarray], ages: list[np.ndarray]) -> pd.DataFrame:
    actions = [np.ones(len(row), np.int8) for row in rows]
    return pd.DataFrame({"history_row": rows, "history_action": actions, "history_age": ages})


def _write_sequences(events: pd.DataFrame, folder: Path) -> None:
    inside = events[(events.t >= PRETRAIN[0]) & (events.t < PRETRAIN[1])]
    pieces = []
    for (user, held_out), rows in inside.groupby(["user_id", "held_out"]).row:
        items = rows.to_numpy()
        pieces += [
            (user, held_out, items[start : start + SEQUENCE])
            for start in range(0, len(items) - 1, SEQUENCE - 1)
        ]
    folder.mkdir()
    frame = pd.DataFrame(pieces, columns=["user_id", "held_out", "item_row"])
    frame.to_parquet(folder / "part-00000.parquet", row_group_size=ROWS_PER_GROUP)


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
