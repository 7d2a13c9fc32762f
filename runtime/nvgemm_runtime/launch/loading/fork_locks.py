"""Per-object locks that are released in a forked child."""

from __future__ import annotations

import os
import threading
import weakref


class ForkLock:
    """Lock that a forked child replaces, because a thread missing in the child may hold it.

    Attributes:
        current: Lock to read anew at each use: ``with lock.current: ...``. A thread that forks
            while holding the lock still releases the lock that it acquired.
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
