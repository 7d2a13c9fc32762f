"""Events that other threads make for the one thread that handles them."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any

from ...storage.remote.transfers import Transfers
from ..compiler import TaskOutcome

_THREADS = 8
"""Threads that fetch kernels and the entries by which workers show that theirs arrive."""

Event = Callable[[], Iterator[TaskOutcome]]
"""Handles what happened; yields the tasks that ended with it."""


class EventQueue:
    """Events, and the threads that make them."""

    def __init__(self) -> None:
        self._threads = Transfers(_THREADS)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def get(self, timeout: float) -> Event:
        """Returns the next event; waits for it.

        Raises:
            queue.Empty: If none comes within ``timeout`` seconds.
        """
        return self._events.get(timeout=timeout)

    def put_when_done(self, future: Any, collect: Callable[[Any], Event]) -> None:
        """Collects a future in another thread once it is done, and queues the event."""
        future.add_done_callback(lambda _: self.put(functools.partial(collect, future)))

    def put(self, collect: Callable[[], Event]) -> None:
        """Queues an event that another thread makes, or the error of making it."""

        def work() -> None:
            try:
                event = collect()
            except BaseException as error:
                event = functools.partial(_raise, error)
            self._events.put(event)

        self._threads.submit(work)


def yield_nothing() -> Iterator[TaskOutcome]:
    """Yields no outcome: an event with which no task ended."""
    return iter(())


def _raise(error: BaseException) -> Iterator[TaskOutcome]:
    raise error
