"""Compiling kernels in parallel worker processes, through the cache. The only parallel stage."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.errors import CompileError, LinkError

from . import linker
from .cache import Cache, cache_key
from .providers import Candidate, Provider, load_provider
from .targets import BuildTarget

Progress = Callable[[int, int, str], None]
"""Called as (done, total, name of the kernel just done)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel to compile.

    Attributes:
        key: Its name in the cache, from everything that shapes its code.
    """

    candidate: Candidate
    target: BuildTarget
    calling_convention: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A kernel that could not be built, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Outcome of a compile stage.

    Attributes:
        compiled: How many kernels were compiled now; the others were in the cache.
        failures: Kernels that are missing, in the order of the tasks.
    """

    compiled: int
    failures: tuple[Failure, ...]


def make_tasks(
    candidates: Iterable[Candidate], target: BuildTarget, provider: Provider
) -> tuple[Task, ...]:
    """Describe the compilation of one target's candidates.

    A key covers what changes the code and nothing else: neither paths nor times, and of the device
    profile only the numbers that the kernel is compiled with.

    Raises:
        ToolchainError: If the compiler side is incomplete.
        TargetError: If the device profile lacks a number that a kernel needs.
    """
    shared = {
        "provider": provider.name,
        "recipe": provider.recipe,
        "target": target.target.key,
        "toolchain": provider.toolchain(),
        "calling_convention": provider.calling_convention,
        "linker": linker.linker_version(),
        "linker_flags": linker.FLAGS,
    }

    def key(candidate: Candidate) -> str:
        capacities = {
            str(size): target.device.cluster_capacity(size).value
            for size in candidate.cluster_sizes
        }
        own = {
            "operator": candidate.operator,
            "signature": candidate.signature.key,
            "cluster_capacities": capacities,
        }
        return cache_key("kernel", {**shared, **own})

    return tuple(
        Task(
            candidate=candidate,
            target=target,
            calling_convention=provider.calling_convention,
            key=key(candidate),
        )
        for candidate in candidates
    )


def default_jobs() -> int:
    """Worker processes that this machine carries: its cores, or fewer where memory is short."""
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory_bytes() // _WORKER_BYTES))


_WORKER_BYTES = 1_500_000_000
"""Memory to allow a worker: a compiler process was seen to take about 1 GB."""

_TASKS_PER_WORKER = 200
"""After so many kernels workers start anew: one was seen to grow from 0.55 to 0.92 GB in 200."""


def _free_memory_bytes() -> int:
    free = _meminfo_available_bytes()
    # In a container the limit is the cgroup's, not the machine's.
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(0, free)


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _WORKER_BYTES


def compile_all(
    tasks: Sequence[Task], cache: Cache, *, jobs: int, progress: Progress | None = None
) -> Compilation:
    """Make sure that every task's kernel is in the cache.

    Workers store what they finish at once, so an interrupted build continues where it stopped.

    Args:
        tasks: What to compile; several may share a key.
        cache: Where kernels are looked up and stored.
        jobs: Worker processes.
        progress: Told of each finished kernel.

    Raises:
        StorageError: If the cache cannot be read or written.
        ToolchainError: If the compiler side is incomplete.
    """
    unique = {task.key: task for task in tasks}
    missing = [task for task in unique.values() if cache.get(task.key) is None]
    if not missing:
        return Compilation(compiled=0, failures=())
    cache.require_writable()
    linker.library_directories()
    reasons: dict[str, str] = {}
    done = 0

    def finished(task: Task, reason: str | None) -> None:
        nonlocal done
        done += 1
        if reason is not None:
            reasons[task.key] = reason
        if progress is not None:
            progress(done, len(missing), task.candidate.operator)

    suspects = _run(missing, cache.directory, min(jobs, len(missing)), finished)
    # A worker that dies takes the whole pool with it. Whoever was in flight is tried again alone:
    # then a death names its culprit.
    for task in suspects:
        for culprit in _run([task], cache.directory, 1, finished):
            finished(culprit, "the compiler process died (crash, or out of memory)")
    failures = tuple(
        Failure(candidate=task.candidate, reason=reasons[task.key])
        for task in unique.values()
        if task.key in reasons
    )
    return Compilation(compiled=len(missing) - len(failures), failures=failures)


def _run(
    tasks: Iterable[Task], directory: Path, jobs: int, finished: Callable[[Task, str | None], None]
) -> list[Task]:
    """Run tasks in a pool of workers; start a new pool when one dies.

    Returns:
        The tasks that were in flight when a worker died.
    """
    waiting = list(reversed(list(tasks)))
    suspects: list[Task] = []
    while waiting:
        in_flight: dict[Future[str | None], Task] = {}
        pool = ProcessPoolExecutor(
            jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        room = jobs * _TASKS_PER_WORKER
        try:
            while in_flight or (waiting and room):
                # No queue inside the pool: what is in flight is what a worker really has.
                while waiting and room and len(in_flight) < jobs:
                    room -= 1
                    future = pool.submit(_compile_one, waiting[-1], directory)
                    in_flight[future] = waiting.pop()
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    reason = future.result()
                    finished(in_flight.pop(future), reason)
        except BrokenProcessPool:
            for future, task in in_flight.items():
                if future.done() and future.exception() is None:
                    finished(task, future.result())
                else:
                    suspects.append(task)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return suspects


def _start_worker() -> None:
    # Ctrl-C goes to the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


_provider: dict[str, Provider] = {}


def _compile_one(task: Task, directory: Path) -> str | None:
    """Compile, link and store one kernel, in a worker; returns why it failed, or None."""
    name = task.candidate.provider
    if name not in _provider:
        _provider[name] = load_provider(name)
    try:
        relocatable = _provider[name].compile(task.candidate, task.target)
        payload = linker.link(relocatable, task.calling_convention)
    except (CompileError, LinkError) as error:
        return str(error)
    Cache(directory).put(task.key, payload)
    return None
