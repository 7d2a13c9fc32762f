"""Compiler processes that several threads share, limited in number over the whole machine."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from ..pipeline.compiler import (
    CompilerProcesses,
    Failure,
    ProcessKind,
    Task,
    TaskResult,
    start_workers,
)
from ..pipeline.workers import WorkerDied, WorkersCannotStart, WorkersKilled
from ..storage.build_cache import Cache
from ..storage.locks import FileLock, acquire

_Process = CompilerProcesses
"""Pool with one process."""

_ASK_AGAIN_SECONDS = 0.2


class SharedWorkers:
    """Compiler processes, started on demand and reused until `close`.

    A process serves one `ProcessKind`, as in `ProviderWorkers`. If the limit is reached, an idle
    process of another kind is replaced.

    Several servers may run on one machine. The machine has a lock file for each compiler process
    that it can take, and each process holds a lock. Only a server's first process may run without,
    so that no server waits long for another.

    Args:
        cache: Cache that stores the kernels.
        most: Limit for all servers that use the cache directory.
    """

    def __init__(self, cache: Cache, most: int) -> None:
        self._cache = cache
        self._most = most
        self._changed = threading.Condition()
        self._idle: defaultdict[ProcessKind, list[_Process]] = defaultdict(list)
        self._held: dict[_Process, FileLock | None] = {}
        self._closed = False
        self._unstartable: dict[ProcessKind, WorkersCannotStart] = {}
        self._threads = ThreadPoolExecutor(max_workers=most)

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult | WorkerDied]]:
        """Runs all tasks; see `Workers.run`. Several threads may call it at once.

        If a kind's processes once failed to start, starts no more of that kind.
        """
        futures: dict[Future[TaskResult | WorkerDied], Task] = {
            self._threads.submit(self._run_one, item): item for item in items
        }
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        finally:
            for future in futures:
                future.cancel()

    def prepare(self, count: int, kind: ProcessKind) -> None:
        """Starts idle processes for ``count`` tasks to come, as far as the limits allow."""
        with self._changed:
            for _ in range(min(count, self._most) - len(self._idle[kind])):
                if kind in self._unstartable or not self._start_one(kind):
                    return

    def close(self) -> None:
        """Stops every process, busy or not; threads that wait for one get WorkersKilled."""
        with self._changed:
            self._closed = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            for process, slot in self._held.items():
                process.kill()
                if slot is not None:
                    slot.release()
            self._held = {}
            self._idle.clear()

    def _run_one(self, item: Task) -> TaskResult | WorkerDied:
        kind = item.process_kind
        process = self._take(kind)
        try:
            [(_, outcomes)] = process.run([(item,)])
            return outcomes if isinstance(outcomes, WorkerDied) else outcomes[0]
        except WorkersCannotStart as error:
            self._unstartable[kind] = error
            raise
        except KeyboardInterrupt:  # nobody interrupts a server
            reason = f"{item.candidate.operator}: {kind} raised KeyboardInterrupt"
            return TaskResult(failure=Failure(task=item, reason=reason, is_transient=True))
        finally:
            with self._changed:
                self._idle[kind].append(process)
                self._changed.notify_all()  # every thread waits for its own kind

    def _take(self, kind: ProcessKind) -> _Process:
        with self._changed:
            while kind not in self._unstartable:
                idle = self._idle[kind]
                if idle or self._start_one(kind) or self._replace_one(kind):
                    return idle.pop()
                self._changed.wait(_ASK_AGAIN_SECONDS)
            raise self._unstartable[kind]

    def _start_one(self, kind: ProcessKind) -> bool:
        """Starts one process if the machine has room, or if this server has none."""
        if self._closed:
            raise WorkersKilled
        if len(self._held) >= self._most:
            return False
        slot = self._free_slot()
        if slot is None and self._held:
            return False
        self._start_in(slot, kind)
        return True

    def _replace_one(self, kind: ProcessKind) -> bool:
        """Replaces an idle process of another kind, if there is one."""
        others = [idle for other, idle in self._idle.items() if idle and other != kind]
        if not others:
            return False
        leaving = others[0].pop()
        slot = self._held.pop(leaving)
        leaving.__exit__()
        self._start_in(slot, kind)
        return True

    def _start_in(self, slot: FileLock | None, kind: ProcessKind) -> None:
        try:
            process = start_workers(self._cache, 1, kind)
        except BaseException:
            if slot is not None:
                slot.release()
            raise
        self._held[process] = slot
        self._idle[kind].append(process)

    def _free_slot(self) -> FileLock | None:
        paths = (self._cache.lock_path(f"compiler-{number}") for number in range(self._most))
        return next(filter(None, (acquire(path, wait=False) for path in paths)), None)
