"""An iterator that runs ahead in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

Cancelled = Callable[[], bool]
"""True once nobody waits for more: a source asks between slow steps, and returns."""


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def run_ahead(source: Callable[[Cancelled], Iterator[T]], depth: int) -> Generator[T]:
    """Yields what `source` yields, made by a thread that is at most `depth` items ahead.

    The thread starts at the first `next` and ends with the items, or when the iterator is closed
    or dropped. An exception of the source is raised here, after the items before it.

    Args:
        source: Called once, in the thread; its iterator must be a generator.
        depth: Items ready and waiting; 0 runs the source in the caller's thread.
    """
    if depth == 0:
        yield from source(lambda: False)
        return
    results: SimpleQueue[_Item[T] | _End] = SimpleQueue()
    slots = threading.Semaphore(depth)
    stopped = threading.Event()

    def work() -> None:
        error: BaseException | None = None
        try:
            with closing(source(stopped.is_set)) as items:  # type: ignore[type-var]
                for item in items:
                    slots.acquire()
                    if stopped.is_set():
                        return
                    results.put(_Item(item))
        except BaseException as caught:
            error = caught
        results.put(_End(error))

    # A daemon, so that a program which dies with an iterator half read can still exit.
    thread = threading.Thread(target=work, name="thawline-reader", daemon=True)
    thread.start()
    try:
        while isinstance(result := results.get(), _Item):
            slots.release()
            yield result.value
        if result.error is not None:
            raise result.error
    finally:
        stopped.set()
        slots.release()
        thread.join()
