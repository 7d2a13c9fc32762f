"""Preload for Dask workers whose kernels take a fixed time and no processor.

Everything around the compiler is real: requests, keys, the caches and the answers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

from fake_provider import FakeProvider
from nvgemm_aot.pipeline import linker
from nvgemm_aot.pipeline.compiler import Task, TaskResult
from nvgemm_aot.pipeline.executor import fleet_worker
from nvgemm_aot.storage.build_cache import Cache

SLEEP_VARIABLE = "FLEET_SLEEP_SECONDS"

_payloads: list[bytes] = []


class SleepingCompilers:
    """Stands in for `ProviderWorkers`: sleeps, and stores the same kernel each time."""

    def __init__(self, cache: Cache, *_: object) -> None:
        self._cache = cache

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult]]:
        """Yields each task once its time is over."""
        for task in items:
            if not _payloads:
                compiled = FakeProvider().compile(task.candidate, task.target)
                convention = task.candidate.calling_convention
                _payloads.append(linker.link(compiled, convention, task.target.target))
            time.sleep(float(os.environ[SLEEP_VARIABLE]))
            self._cache.put(task.key, _payloads[0], is_durable=False)
            yield task, TaskResult()


def dask_setup(_: object) -> None:
    """Replaces the compilers; Dask calls it as a worker starts."""
    fleet_worker.ProviderWorkers = SleepingCompilers  # type: ignore[assignment,misc]
