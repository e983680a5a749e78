"""What the simulated feed is made of: its items, its users, the context, and who comes when.

What they are shown and what they then do lives in `simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thawline.config import Simulate

SURFACES = (
    *("home", "explore", "search", "related", "following", "topics"),
    *("trending", "email", "push", "profile", "archive", "widget"),
)
DEVICES = ("android", "ios", "web", "tablet", "tv", "watch", "car", "kiosk")
HOURS = tuple(f"{hour:02d}" for hour in range(24))

DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Items:
    """The items in order of birth, index 0 the oldest."""

    item_id: np.ndarray  # int64 [N]
    born: np.ndarray  # int64 [N], microseconds since the start
    popularity: np.ndarray  # float64 [N], running sum of the Zipf weights
    topics: np.ndarray  # float32 [N, D], unit vectors
    click_quality: np.ndarray  # float32 [N]
    save_quality: np.ndarray  # float32 [N]


@dataclass(frozen=True)
class Users:
    """The users' habits; their interests drift and live in `simulate`."""

    activity: np.ndarray  # float64 [U], running sum
    device: np.ndarray  # int64 [U], the one mostly used
    hour: np.ndarray  # float64 [U], the time of day mostly come at


@dataclass(frozen=True)
class Context:
    """What the context columns add to the logits."""

    surface: np.ndarray  # float32 [S]
    device: np.ndarray  # float32 [V]
    hour: np.ndarray  # float32 [24]
    device_save: np.ndarray  # float32 [V]
    surface_topics: np.ndarray  # float32 [S, D]: some surfaces suit some topics


@dataclass(frozen=True)
class Requests:
    """Requests in order of time."""

    user: np.ndarray  # int64 [R]
    time: np.ndarray  # int64 [R], microseconds since the start
    surface: np.ndarray  # int64 [R]
    device: np.ndarray  # int64 [R]


def make_items(settings: Simulate, at_start: int, rng: np.random.Generator) -> Items:
    """Draws the items; the first `at_start` are there from the start, the others born evenly."""
    count, width = settings.items, settings.interests
    born = np.zeros(count, np.int64)
    born[at_start:] = np.sort(rng.integers(1, settings.days * DAY_US, count - at_start))
    rank = rng.permutation(count) + 1.0
    # Cubed normals: an item is about a few topics, not a bit of everything.
    topics = rng.standard_normal((count, width)) ** 3
    topics /= np.linalg.norm(topics, axis=1, keepdims=True)
    # What is shown more is somewhat better, as in a feed that has been tuned.
    fame = -np.log(rank)
    fame = (fame - fame.mean()) / fame.std() if count > 1 else fame
    return Items(
        item_id=rng.permutation(count) + 1,
        born=born,
        popularity=np.cumsum(rank**-settings.zipf),
        topics=topics.astype(np.float32),
        click_quality=(0.35 * rng.standard_normal(count) + 0.15 * fame).astype(np.float32),
        save_quality=(0.4 * rng.standard_normal(count)).astype(np.float32),
    )


def make_authors(settings: Simulate, topics: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Gives each item an author, so that an author's items are about the same.

    Items are put in the order of their strongest topic, then of the next one, and that line is cut
    into authors whose sizes fall as 1 / rank.

    Returns:
        int64 [N]: authors from 1 on.
    """
    strength = np.abs(topics)
    ranked = np.argsort(-strength, axis=1, kind="stable")[:, :2]
    # Liking a topic and disliking it are two tastes.
    sign = np.take_along_axis(topics, ranked, axis=1) > 0
    taste = 2 * ranked + sign
    order = np.lexsort([rng.random(len(topics)), *taste.T[::-1]])
    share = rng.permutation(1.0 / np.arange(1, settings.authors + 1))
    ends = np.cumsum(share) / share.sum()
    places = (np.arange(len(topics)) + 0.5) / len(topics)
    author = np.empty(len(topics), np.int64)
    author[order] = np.minimum(np.searchsorted(ends, places), settings.authors - 1) + 1
    return author


def make_users(settings: Simulate, rng: np.random.Generator) -> Users:
    """Draws the users; a few are much more active than the rest."""
    return Users(
        activity=np.cumsum(rng.lognormal(0.0, 0.8, settings.users)),
        device=rng.choice(len(DEVICES), settings.users, p=_falling(len(DEVICES))),
        hour=rng.normal(15.0, 5.0, settings.users),
    )


def make_context(settings: Simulate, rng: np.random.Generator) -> Context:
    """Draws what each surface, device and hour does to the probabilities."""

    def normal(scale: float, *shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return Context(
        surface=normal(0.4, len(SURFACES)),
        device=normal(0.3, len(DEVICES)),
        hour=(0.25 * np.cos((np.arange(24) - 20) * np.pi / 12)).astype(np.float32),
        device_save=normal(0.3, len(DEVICES)),
        surface_topics=normal(0.3, len(SURFACES), settings.interests),
    )


def make_requests(settings: Simulate, users: Users, rng: np.random.Generator) -> Requests:
    """Sessions of one to eight requests some tens of seconds apart, cut to the wanted number."""
    wanted = -(-settings.impressions // settings.candidates)
    # One session a request is enough whatever the lengths drawn.
    length = np.minimum(rng.geometric(0.4, wanted), 8)
    sessions = int(np.searchsorted(np.cumsum(length), wanted)) + 1
    session = np.repeat(np.arange(sessions), length[:sessions])[:wanted]
    user = weighted(users.activity, rng.random(sessions))
    day = rng.integers(0, settings.days, sessions)
    # A session starts before 23:15 and lasts 42 minutes at most: it ends on its day.
    start = np.mod(users.hour[user] + rng.normal(0.0, 2.5, sessions), 23.25) * 3_600e6
    other = rng.choice(len(DEVICES), sessions, p=_falling(len(DEVICES)))
    device = np.where(rng.random(sessions) < 0.8, users.device[user], other)
    surface = rng.choice(len(SURFACES), sessions, p=_falling(len(SURFACES)))

    pause = 5e6 + np.minimum(rng.exponential(60e6, wanted), 300e6)
    elapsed = np.cumsum(pause)
    first = np.searchsorted(session, np.arange(sessions))
    time = day[session] * DAY_US + (start[session] + elapsed - elapsed[first[session]]).astype(
        np.int64
    )
    order = np.argsort(time, kind="stable")
    session = session[order]
    return Requests(user[session], time[order], surface[session], device[session])


def weighted(cumulative: np.ndarray, uniform: np.ndarray, total: float | None = None) -> np.ndarray:
    """Indices drawn in proportion to the weights of a running sum."""
    scale = cumulative[-1] if total is None else total
    drawn = np.searchsorted(cumulative, uniform * scale, side="right")
    return np.minimum(drawn, len(cumulative) - 1)


def _falling(count: int) -> np.ndarray:
    share = 1.0 / np.arange(1, count + 1)
    return share / share.sum()
