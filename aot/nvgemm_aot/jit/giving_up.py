"""Kernels whose compilers were killed too often: not tried again for a day.

For run-time compiling, where a program waits, and where each new process would wait again. Builds
try each kernel whenever they are started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

from ..build.compiler import (
    Failure,
    KernelWorkers,
    Task,
    TaskResult,
    compile_limit_seconds,
    death_text,
)
from ..build.workers import WorkerDied
from ..storage.cache import Cache, cache_key

MAX_ATTEMPTS = 2
"""So many requests see the compiler of a kernel killed before it is left out."""

PAUSE_SECONDS = 24 * 3600
"""For so long."""


class GivingUp:
    """Compiler processes that leave out kernels which were given up; see `KernelWorkers`.

    Args:
        workers: The processes.
        cache: Where attempts are counted, over all processes that use it. A higher time limit gets
            attempts of its own.
    """

    def __init__(self, workers: KernelWorkers, cache: Cache) -> None:
        self._workers = workers
        self._cache = cache
        self._limit = str(compile_limit_seconds())

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult | WorkerDied]]:
        """Work on the tasks that were not given up; see `Workers.run`."""
        wanted = []
        for task in items:
            count, reason = self._attempts(task)
            if count < MAX_ATTEMPTS:
                wanted.append(task)
                continue
            failure = Failure(
                task=task,
                reason=f"{reason}; given up for a day after {count} attempts, or until `nvgemm-aot "
                "cache clear`",
                is_transient=True,
            )
            yield task, TaskResult(failure=failure)
        for task, outcome in self._workers.run(wanted):
            if isinstance(outcome, WorkerDied):
                self._count(task, death_text(outcome))
            yield task, outcome

    def _attempts(self, task: Task) -> tuple[int, str]:
        """How often its compiler was killed within the last day, and how at last."""
        data = self._cache.get(self._key(task))
        if data is None:
            return 0, ""
        known = json.loads(data)
        if not 0 <= time.time() - known["at"] < PAUSE_SECONDS:
            return 0, ""
        return known["count"], known["reason"]

    def _count(self, task: Task, reason: str) -> None:
        count, _ = self._attempts(task)
        document = {"count": count + 1, "reason": reason, "at": time.time()}
        self._cache.put_if_possible(self._key(task), json.dumps(document).encode())

    def _key(self, task: Task) -> str:
        return cache_key("killed compilers", [task.key, self._limit])
