"""Runs on a Dask worker: compiles kernels for a build elsewhere, and sends them to the cache.

A worker process keeps its compiler processes and its connection to the remote cache between tasks.
Requests and answers are bytes and JSON text, so the scheduler needs nothing of nvgemm-aot.
"""

from __future__ import annotations

import functools
import json
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.settings import (
    REMOTE_CACHE_MODE_VARIABLE,
    REMOTE_CACHE_TRUST_VARIABLE,
    REMOTE_CACHE_VARIABLE,
    SIGNING_KEY_VARIABLE,
)

from ...providers import load_provider
from ...storage.build_cache import Cache, default_directory, require_private
from ...storage.remote.remote_cache import RemoteCache, open_remote
from ..cache_entries.remote_kernels import push_kernel
from ..compiler import ProviderWorkers, Task, TaskResult, death_text, make_tasks
from ..workers import WorkerDied, WorkersCannotStart
from .worker_facts import Facts, differences, facts_for, kinds_of, process_facts

TRIAL_PAYLOAD = b"nvgemm-aot: a worker of an executor can write this cache\n"
"""Payload of the entry by which a worker shows that its kernels arrive."""

_KEPT_SECONDS = 300.0
"""Time after which idle compiler processes are stopped, in seconds."""


class _CannotWork(Exception):
    """This worker cannot compile for a build; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Kernels to compile.

    Attributes:
        groups: Tasks; a group's kernels have the same device code.
        facts: The build's facts; see `worker_facts`.
    """

    groups: tuple[tuple[Task, ...], ...]
    facts: Facts

    @property
    def tasks(self) -> list[Task]:
        """All tasks, in order."""
        return [task for group in self.groups for task in group]


class _Compilers:
    """Compiler processes of this worker process, one for each thread that compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[float, ProviderWorkers]] = []
        self._is_timed = False

    def take(self, cache: Cache, first: Task) -> ProviderWorkers:
        """Returns an idle process, or starts one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()[1]
        return ProviderWorkers(cache, 1, first.process_kind)

    def give_back(self, process: ProviderWorkers) -> None:
        """Keeps a process for the next task, for some time."""
        with self._lock:
            self._idle.append((time.monotonic(), process))
            if not self._is_timed:
                self._is_timed = True
                self._start_timer(_KEPT_SECONDS)

    def _start_timer(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._stop_idle)
        timer.daemon = True
        timer.start()

    def _stop_idle(self) -> None:
        with self._lock:
            end = time.monotonic() - _KEPT_SECONDS
            stopped = [process for since, process in self._idle if since <= end]
            self._idle = [entry for entry in self._idle if entry[0] > end]
            self._is_timed = bool(self._idle)
            if self._idle:
                self._start_timer(self._idle[0][0] - end)  # the first has been idle for longest
        for process in stopped:
            process.__exit__()


_compilers = _Compilers()
_opening = threading.Lock()
_remote: RemoteCache | None = None
_provider = functools.cache(load_provider)


def check_worker(request: str) -> str:
    """Tells if this worker can compile for a build, and tries the remote cache.

    Args:
        request: JSON object with the build's ``facts``; ``kinds``, a list of provider,
            architecture, platform and CUDA version for each kind of kernel; and ``trial_key``, the
            key of an entry to send to the remote cache.

    Returns:
        JSON object: ``reason`` if it cannot, or None once the entry was sent.
    """
    document = json.loads(request)
    try:
        _require_equal(document["facts"], process_facts())
        kinds = [
            (provider, Target(arch=arch, platform=platform, cuda=cuda))
            for provider, arch, platform, cuda in document["kinds"]
        ]
        _require_equal(document["facts"], facts_for(kinds))
        _try_remote(document["trial_key"], _open_cache())
    except (_CannotWork, NvgemmError) as error:
        return json.dumps({"reason": str(error)})
    return json.dumps({"reason": None})


def compile_batch(request: bytes) -> str:
    """Compiles kernels and sends them to the remote cache.

    Args:
        request: A pickled `Request`. Whoever can send one runs code here anyway.

    Returns:
        JSON object: ``results``, one for each task unless this worker could not compile, with
        ``failure``, ``is_transient`` and ``was_there``; ``reason`` if it cannot go on, or None;
        ``seconds`` per kernel.
    """
    batch: Request = pickle.loads(request)
    begin = time.monotonic()
    results: list[dict[str, Any]] = []
    try:
        _require_keys(batch)
        cache, remote = _open_cache(), _open_remote()
        results = _compile(batch.tasks, cache)
        for task, result in zip(batch.tasks, results):
            if result["failure"] is None:
                push_kernel(task.key, cache, remote, keeps_ptx=task.keeps_ptx)
        remote.flush()
        reason = _remote_fault(remote)
    except (_CannotWork, NvgemmError, WorkersCannotStart) as error:
        reason = str(error)
    except KeyboardInterrupt:  # nobody interrupts a worker's threads
        reason = "a compiler raised KeyboardInterrupt"
    seconds = (time.monotonic() - begin) / len(batch.tasks)
    return json.dumps({"results": results, "reason": reason, "seconds": seconds})


def _compile(tasks: Sequence[Task], cache: Cache) -> list[dict[str, Any]]:
    """Returns a result for each task, in order."""
    process = _compilers.take(cache, tasks[0])
    results = {}
    try:
        for task, outcome in process.run(tasks):
            results[task.key] = _result(outcome)
    except BaseException:
        process.__exit__()
        raise
    _compilers.give_back(process)
    return [results[task.key] for task in tasks]


def _result(outcome: TaskResult | WorkerDied) -> dict[str, Any]:
    if isinstance(outcome, WorkerDied):
        return {"failure": death_text(outcome), "is_transient": True, "was_there": False}
    failure = outcome.failure
    return {
        "failure": failure and failure.reason,
        "is_transient": failure is not None and failure.is_transient,
        "was_there": outcome.was_there,
    }


def _require_equal(expected: Facts, observed: Facts) -> None:
    """Requires that the facts known here equal the build's."""
    known = {name: expected.get(name) for name in observed}
    if others := differences(known, observed):
        raise _CannotWork(f"it differs from this build: {'; '.join(others)}")


def _require_keys(batch: Request) -> None:
    """Requires that this machine gives each task the key that the build gave it."""
    alike: dict[tuple[str, Target, str], list[Task]] = {}
    for task in batch.tasks:
        place = (task.candidate.provider, task.target.target, task.target.device.name)
        alike.setdefault(place, []).append(task)
    for (provider, _, _), tasks in alike.items():
        candidates = [task.candidate for task in tasks]
        made = make_tasks(candidates, tasks[0].target, _provider(provider))
        for task, own in zip(tasks, made):
            if task.key != own.key:
                _require_equal(batch.facts, facts_for(kinds_of(batch.tasks)))
                raise _CannotWork(
                    f"operator {task.candidate.operator} has another key there: the sources of "
                    "nvgemm-aot differ"
                )


def _open_cache() -> Cache:
    """Returns this machine's build cache, if only this user can write it."""
    cache = Cache(default_directory())
    require_private(cache)
    cache.require_writable()
    return cache


def _open_remote() -> RemoteCache:
    """Returns this process's remote cache; opens it anew if it was given up."""
    global _remote
    with _opening:
        if _remote is None or _remote_fault(_remote) is not None:
            _remote = open_remote()
        if _remote is None:
            raise _CannotWork(
                f"{REMOTE_CACHE_VARIABLE} is not set there; kernels reach the build through it"
            )
        trust = _remote.trust
        if trust.is_read_only:
            raise _CannotWork(f"its remote cache is read-only by {REMOTE_CACHE_MODE_VARIABLE}")
        if not trust.writes:
            raise _CannotWork(
                f"it cannot write the remote cache: {SIGNING_KEY_VARIABLE} is not set there, nor "
                f"{REMOTE_CACHE_TRUST_VARIABLE}=1 without a policy"
            )
        return _remote


def _remote_fault(remote: RemoteCache) -> str | None:
    """Returns the reason that entries no longer reach the remote cache, or None."""
    statistics = remote.statistics
    reason = statistics.off or statistics.unwritten
    return reason and f"its remote cache {remote.address} takes nothing: {reason}"


def _try_remote(key: str, cache: Cache) -> None:
    """Sends an entry with a key to the remote cache."""
    remote = _open_remote()
    cache.put(key, TRIAL_PAYLOAD)
    remote.push([key], cache)
    remote.flush()
    if reason := _remote_fault(remote):
        raise _CannotWork(reason)
