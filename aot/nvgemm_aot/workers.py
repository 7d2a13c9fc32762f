"""Worker processes for compiling: one task each at a time, and a death names its task."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DEATHS = 2
"""A task whose worker died this often is given up: once may be the memory that others took."""

TASKS_PER_WORKER = 200
"""After so many tasks a worker starts anew: one was seen to grow from 0.55 to 0.92 GB in 200."""


class WorkerDied(Exception):
    """The process that had a task died on it, more than once."""


class WorkersKilled(Exception):
    """The processes were killed from another thread while they had work."""


class _Worker(Generic[Item, Result]):
    """One process and the pipe to it."""

    def __init__(self, work: Callable[[Item], Result], prepare: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, work, prepare), daemon=True
        )
        self.process.start()
        theirs.close()
        self.item: Item | None = None
        self.tasks = 0

    def give(self, item: Item) -> None:
        self.item = item
        self.tasks += 1
        with contextlib.suppress(OSError):  # a process that has died shows when it is waited for
            self.connection.send(item)

    def stop(self) -> None:
        # Killed, not asked: what a worker has finished is stored, and the rest is wanted no more.
        self.process.kill()
        self.connection.close()


class Workers(Generic[Item, Result]):
    """A pool of processes that starts at once, so that they get ready while work is prepared.

    Use it as a context manager: leaving it, by whatever way, stops every process within moments.
    Processes end by themselves when the one that made them is killed.

    Args:
        count: Processes, at least 1.
        work: What to do with an item; importable by name.
        prepare: What a process does first, such as slow imports; importable by name.
    """

    def __init__(
        self, count: int, work: Callable[[Item], Result], prepare: Callable[[], object]
    ) -> None:
        self._work = work
        self._prepare = prepare
        self._idle = [_Worker(work, prepare) for _ in range(count)]
        self._busy: dict[Connection, _Worker[Item, Result]] = {}
        self._all = set(self._idle)
        self._killed = False

    def __enter__(self) -> Workers[Item, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        everyone, self._all = self._all, set()
        self._idle, self._busy = [], {}
        for worker in everyone:
            worker.stop()
        for worker in everyone:
            worker.process.join()

    def kill(self) -> None:
        """Stop every process for good, from any thread; one that is in `run` gets WorkersKilled."""
        self._killed = True
        everyone = list(self._all)
        for worker in everyone:
            worker.process.kill()
        for worker in everyone:
            worker.process.join()

    def run(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result | WorkerDied]]:
        """Work on all items and yield each when it is done, in no fixed order.

        Raises:
            WorkersKilled: If `kill` was called.
            Exception: What ``work`` raised.
        """
        waiting = list(reversed(items))
        deaths: Counter[int] = Counter()
        while waiting or self._busy:
            while waiting and self._idle:
                worker = self._idle.pop()
                worker.give(waiting.pop())
                self._busy[worker.connection] = worker
            for ready in wait(list(self._busy)):
                assert isinstance(ready, Connection)  # nothing else is waited for
                worker = self._busy.pop(ready)
                assert worker.item is not None  # every busy worker was given one
                item = worker.item
                try:
                    outcome = ready.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    deaths[id(item)] += 1
                    if deaths[id(item)] < MAX_DEATHS:
                        waiting.append(item)
                    else:
                        yield item, WorkerDied()
                    continue
                if worker.tasks >= TASKS_PER_WORKER:
                    self._replace(worker)
                else:
                    self._idle.append(worker)
                if isinstance(outcome, Exception):
                    raise outcome
                yield item, outcome

    def _replace(self, worker: _Worker[Item, Result]) -> None:
        if self._killed:
            raise WorkersKilled
        worker.stop()
        worker.process.join()
        self._all.remove(worker)
        fresh = _Worker(self._work, self._prepare)
        self._all.add(fresh)
        self._idle.append(fresh)


def _die_with_parent() -> None:
    """End this process when the one that made it has ended, whatever it is busy with."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(
    connection: Connection, work: Callable[[Item], Result], prepare: Callable[[], object]
) -> None:
    """Answer items with results until the other end is gone; in the worker process."""
    # Ctrl-C goes to the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    prepared: Exception | None = None
    try:
        prepare()
    except Exception as error:
        prepared = error
    while True:
        try:
            item = connection.recv()
            outcome: Result | Exception
            try:
                if prepared is not None:
                    raise prepared
                outcome = work(item)
            except Exception as error:
                outcome = error
            connection.send(outcome)
        except (EOFError, OSError):
            return
