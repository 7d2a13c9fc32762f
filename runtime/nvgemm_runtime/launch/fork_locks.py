"""Locks that many objects have one of each, and that are free in a forked child."""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """A lock that a forked child gets anew: a thread that the child does not have may hold it.

    Attributes:
        current: The lock, to be asked for at each use: ``with lock.current: ...``. A thread that
            forks while it holds the lock goes on to release the one it took.
    """

    __slots__ = ("__weakref__", "current")

    def __init__(self) -> None:
        self.current = threading.Lock()
        _locks.add(self)


_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in _locks:
        lock.current = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
