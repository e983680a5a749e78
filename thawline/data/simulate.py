"""The feed simulator: impressions of a home feed whose click and save probabilities are known.

Items are born over time and have Zipf popularity; users come in sessions and their interests
drift; the feed mixes popular, relevant and random items. A click depends on the user's interest in
the item, the item's quality, the context and the position; a save is a second draw after a click,
so its true marginal probability is `p_click * p_save_given_click`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thawline.config import Simulate
from thawline.data.feed import (
    DAY_US,
    DEVICES,
    HOURS,
    SURFACES,
    Context,
    Items,
    Requests,
    make_authors,
    make_context,
    make_items,
    make_requests,
    make_users,
    weighted,
)
from thawline.errors import ConfigError
from thawline.folders import whole_folder

CHUNK_REQUESTS = 4_096
"""Requests drawn at a time. Part of the result: another value gives other draws."""

AUTHORS = 1
"""Stream of the authors' draws."""

POPULAR, RELEVANT, EXPLORED = 0.40, 0.45, 0.15
"""Shares of the exposure policy."""
POOL = 4
"""Relevant items are chosen among `POOL` times as many popular items as there are candidates."""
RELEVANCE = 1.0
"""How strongly the policy prefers items that the user likes."""

CLICK_BIAS, SAVE_BIAS = -2.6, -1.9
AFFINITY = 1.3
POSITION_STEP = -0.06

EVENTS_SCHEMA = pa.schema(
    [
        ("user_id", pa.int64()),
        ("item_id", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("request_id", pa.int64()),
        ("position", pa.int16()),
        ("click", pa.bool_()),
        ("save", pa.bool_()),
        ("ctx_surface", pa.string()),
        ("ctx_device", pa.string()),
        ("ctx_hour", pa.string()),
    ]
)
TRUTH_SCHEMA = pa.schema(
    [
        ("request_id", pa.int64()),
        ("item_id", pa.int64()),
        ("p_click", pa.float32()),
        ("p_save", pa.float32()),
    ]
)


@dataclass(frozen=True)
class SimulatedLog:
    """Where a simulated log lies."""

    events: Path
    """user_id, item_id, timestamp, request_id, position, click, save, ctx_*: one row a candidate,
    ordered by (timestamp, position)."""
    truth: Path
    """request_id, item_id, p_click, p_save, in the order of the events."""
    items: Path
    """item_id, born, author_id and, with `content_dim`, content: list<float>."""

    @classmethod
    def at(cls, folder: Path) -> SimulatedLog:
        """The files of a folder that `simulate` wrote."""
        return cls(folder / "events.parquet", folder / "truth.parquet", folder / "items.parquet")


def simulate(settings: Simulate, out: Path) -> SimulatedLog:
    """Writes a simulated log; the same settings give the same bytes.

    Args:
        settings: The `simulate` section; exactly `impressions` rows are written (the last request
            may have fewer candidates than the others).
        out: Folder for events.parquet, truth.parquet and items.parquet.

    Raises:
        ConfigError: Fewer items at the start than candidates in a request.
        DataError: `out` is some other folder, or cannot be written.
    """
    at_start = settings.items - int(settings.items * settings.born_during)
    if at_start < settings.candidates:
        raise ConfigError(
            f"simulate.items and simulate.born_during leave {at_start} items at the start, fewer "
            f"than simulate.candidates ({settings.candidates})",
            "raise simulate.items, or lower simulate.born_during or simulate.candidates",
        )
    with whole_folder(out) as folder:
        rng = np.random.default_rng(settings.seed)
        items = make_items(settings, at_start, rng)
        _write_items(settings, items, rng, SimulatedLog.at(folder).items)
        _write_events(settings, items, rng, SimulatedLog.at(folder))
    return SimulatedLog.at(out)


def _write_items(settings: Simulate, items: Items, rng: np.random.Generator, path: Path) -> None:
    columns = {
        "item_id": pa.array(items.item_id),
        "born": _timestamps(settings.start, items.born),
        # A stream of their own: the events do not depend on the authors.
        "author_id": make_authors(
            settings, items.topics, np.random.default_rng([settings.seed, AUTHORS])
        ),
    }
    if width := settings.content_dim:
        projection = rng.standard_normal((settings.interests, width)).astype(np.float32)
        content = np.einsum("nd,dc->nc", items.topics, projection)
        content += 0.5 * rng.standard_normal(content.shape, dtype=np.float32)
        flat = pa.array(content.ravel())
        offsets = np.arange(0, content.size + 1, width, dtype=np.int32)
        columns["content"] = pa.ListArray.from_arrays(pa.array(offsets), flat)
    pq.write_table(pa.table(columns), path)


def _write_events(
    settings: Simulate, items: Items, rng: np.random.Generator, log: SimulatedLog
) -> None:
    users = make_users(settings, rng)
    context = make_context(settings, rng)
    requests = make_requests(settings, users, rng)
    interests = rng.standard_normal((settings.users, settings.interests), dtype=np.float32)
    kept, replaced = np.sqrt(1 - settings.drift), np.sqrt(settings.drift)
    with (
        pq.ParquetWriter(log.events, EVENTS_SCHEMA) as events,
        pq.ParquetWriter(log.truth, TRUTH_SCHEMA) as truth,
    ):
        for day in range(settings.days):
            fresh = rng.standard_normal(interests.shape, dtype=np.float32)
            interests = (kept * interests + replaced * fresh).astype(np.float32)
            for chunk in _chunks(requests.time, day):
                event_rows, truth_rows = _simulate_chunk(
                    settings, items, context, requests, interests, chunk, rng
                )
                events.write_table(event_rows)
                truth.write_table(truth_rows)


def _chunks(time: np.ndarray, day: int) -> Iterator[slice]:
    start, end = np.searchsorted(time, [day * DAY_US, (day + 1) * DAY_US])
    for first in range(int(start), int(end), CHUNK_REQUESTS):
        yield slice(first, min(first + CHUNK_REQUESTS, int(end)))


def _simulate_chunk(
    settings: Simulate,
    items: Items,
    context: Context,
    requests: Requests,
    interests: np.ndarray,
    chunk: slice,
    rng: np.random.Generator,
) -> tuple[pa.Table, pa.Table]:
    """Draws the candidates and the actions of some requests of one day."""
    user, time = requests.user[chunk], requests.time[chunk]
    surface, device = requests.surface[chunk], requests.device[chunk]
    hour = time % DAY_US // 3_600_000_000
    shown, affinity = _expose(items, interests[user], time, settings.candidates, rng)
    count, width = shown.shape

    suits = np.einsum("rd,rcd->rc", context.surface_topics[surface], items.topics[shown])
    position = np.arange(width)
    click_logit = (
        CLICK_BIAS
        + AFFINITY * affinity
        + items.click_quality[shown]
        + suits
        + (context.surface[surface] + context.device[device] + context.hour[hour])[:, None]
        + POSITION_STEP * position
    )
    save_logit = (
        SAVE_BIAS
        + 0.4 * affinity
        + items.save_quality[shown]
        + context.device_save[device][:, None]
    )
    p_click = _sigmoid(click_logit)
    p_save = p_click * _sigmoid(save_logit)
    # One draw serves both actions: below p_save it is a save, which is a click as well.
    draw = rng.random(shown.shape)
    click, save = draw < p_click, draw < p_save

    # The last request of the log takes what is left of `impressions`.
    rows = min(count * width, settings.impressions - chunk.start * width)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, width)[:rows]

    request_id = spread(np.arange(chunk.start, chunk.stop) + 1)
    item_id = items.item_id[shown.ravel()[:rows]]
    events = pa.table(
        [
            spread(user + 1),
            item_id,
            _timestamps(settings.start, spread(time)),
            request_id,
            np.tile(position, count)[:rows].astype(np.int16),
            click.ravel()[:rows],
            save.ravel()[:rows],
            _names(SURFACES, spread(surface)),
            _names(DEVICES, spread(device)),
            _names(HOURS, spread(hour)),
        ],
        schema=EVENTS_SCHEMA,
    )
    truth = pa.table(
        [request_id, item_id, p_click.ravel()[:rows], p_save.ravel()[:rows]], schema=TRUTH_SCHEMA
    )
    return events, truth


def _expose(
    items: Items,
    interest: np.ndarray,
    time: np.ndarray,
    width: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses and orders the candidates of requests: the exposure policy.

    Popular, random and relevant items are proposed, and `width` of them taken without replacement
    with the policy's weights (the Gumbel-top-k trick).

    Args:
        items: The items in order of birth.
        interest: float32 [R, D], the users' interests.
        time: int64 [R]; items born later are never shown.
        width: Candidates a request.
        rng: Source of the draws.

    Returns:
        Indices of the items int64 [R, width], no item twice in a row, and the users' affinity to
        them float32 [R, width].
    """
    born = np.searchsorted(items.born, time, side="right")
    total = items.popularity[born - 1][:, None]

    def popular(count: int) -> np.ndarray:
        return weighted(items.popularity, rng.random((len(time), count)) * total, total=1.0)

    def explored(count: int) -> np.ndarray:
        return (rng.random((len(time), count)) * born[:, None]).astype(np.int64)

    proposed = np.concatenate([popular(width), explored(width), popular(POOL * width)], axis=1)
    affinity = np.einsum("rd,rpd->rp", interest, items.topics[proposed])
    liked = np.exp(RELEVANCE * affinity[:, 2 * width :])
    liked /= liked.sum(axis=1, keepdims=True)
    weight = np.concatenate(
        [
            np.full((len(time), width), POPULAR / width, np.float32),
            np.full((len(time), width), EXPLORED / width, np.float32),
            RELEVANT * liked,
        ],
        axis=1,
    )
    key = np.log(weight) + rng.gumbel(size=weight.shape)
    key[_repeated(proposed)] = -np.inf
    best = np.argsort(-key, axis=1, kind="stable")[:, :width]
    shown = np.take_along_axis(proposed, best, axis=1)
    affinity = np.take_along_axis(affinity, best, axis=1)
    short = np.isneginf(np.take_along_axis(key, best, axis=1)).any(axis=1)
    for request in np.flatnonzero(short):
        # Too few distinct proposals, which only happens with very few or very unequal items.
        shown[request] = rng.choice(int(born[request]), width, replace=False)
        affinity[request] = items.topics[shown[request]] @ interest[request]
    return shown, affinity


def _repeated(values: np.ndarray) -> np.ndarray:
    """Marks [R, P], whether a value stood in its row before."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    again = np.zeros(values.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)


def _names(values: tuple[str, ...], codes: np.ndarray) -> pa.Array:
    return pa.array(values).take(pa.array(codes))


def _timestamps(start: datetime.date, offset: np.ndarray) -> pa.Array:
    epoch = int(np.datetime64(start, "us").astype(np.int64))
    return pa.array(offset + epoch).cast(pa.timestamp("us", tz="UTC"))
