"""Compiles kernels in parallel worker processes and stores them in the cache."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nvgemm_runtime.bundle.format import ClusterLimit
from nvgemm_runtime.errors import (
    CompileError,
    LinkError,
    StorageError,
    ToolchainError,
    install_command,
)
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installed.ownership import writable_by_others
from nvgemm_runtime.settings import COMPILE_TIMEOUT_VARIABLE

from ..providers import (
    BLAME,
    Candidate,
    Provider,
    load_provider,
    provider_parts,
    target_recipe,
    versions_of,
)
from ..providers.cute_dsl import LAUNCHER, cute_setup
from ..providers.cute_dsl.kept_ptx import collected_ptx
from ..storage import temporary_directory
from ..storage.build_cache import Cache, CacheEntry, cache_key
from ..storage.files import make_directories, sweep_partials_of
from ..storage.locks import locked
from ..storage.remote.remote_cache import RemoteCache
from ..targets import BuildTarget
from ..targets.profile import DeviceProfile
from ..verify.device.cubin import foreign_cuda_versions, spilled_bytes
from . import linker
from .cache_entries.ptx_store import ptx_key, store_ptx
from .cache_entries.remote_kernels import ExpectedKernel, fetch_kernels, push_kernel
from .compiler_limits import compile_limit_seconds
from .workers import (
    TimeLimitExceeded,
    WorkerDied,
    Workers,
    WorkersCannotStart,
    clock_stopped,
)

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Callback that receives the number of finished kernels and the total."""


@dataclass(frozen=True, kw_only=True)
class ProcessKind:
    """Provider and CUDA version that a compiler process serves; it serves no other."""

    provider: str
    cuda: str

    def __str__(self) -> str:
        return f"provider {self.provider!r} for {self.cuda}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kernel to compile.

    The candidate's design holds the cluster limits that are compiled in. ``key`` is the cache key:
    a digest of everything that shapes the code. With ``keeps_ptx``, the PTX is stored beside the
    kernel, and a kernel that was cached without it is compiled again.
    """

    candidate: Candidate
    target: BuildTarget
    key: str
    keeps_ptx: bool = False

    @property
    def expected(self) -> ExpectedKernel:
        """Requirements for this kernel if another machine compiled it."""
        return ExpectedKernel(
            calling_convention=self.candidate.calling_convention,
            provider=self.candidate.provider,
            target=self.target.target,
            keeps_ptx=self.keeps_ptx,
        )

    @property
    def process_kind(self) -> ProcessKind:
        """The kind of compiler process that can run this task."""
        return ProcessKind(provider=self.candidate.provider, cuda=self.target.target.cuda)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why a kernel could not be built.

    Attributes:
        is_transient: True if the compiler was killed or timed out, so another attempt may succeed.
    """

    task: Task
    reason: str
    is_transient: bool = False

    @property
    def own_reason(self) -> str:
        """The reason without the operator name that providers prepend."""
        return self.reason.removeprefix(f"{self.task.candidate.operator}: ")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A worker's answer to a task.

    ``was_there`` is True if another process compiled the kernel in the meantime, ``is_shared`` if
    the remote cache has it.
    """

    failure: Failure | None = None
    was_there: bool = False
    is_shared: bool = False


class KernelWorkers(Protocol):
    """Pool of compiler processes."""

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult | WorkerDied]]:
        """Runs all tasks; see `Workers.run`."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Result of a compile stage.

    ``kernels`` maps task keys to cache entries. ``compiled`` counts the kernels compiled in this
    run; the others came from the cache. ``failures`` are in task order.
    """

    kernels: dict[str, CacheEntry]
    compiled: int
    failures: tuple[Failure, ...]


def make_tasks(
    candidates: Iterable[Candidate], target: BuildTarget, provider: Provider
) -> tuple[Task, ...]:
    """Makes the tasks that compile one target's candidates.

    A key covers exactly what changes the code. It contains no paths or times, and from the device
    profile only the numbers that are compiled in.

    Raises:
        ToolchainError: If the builder is incomplete.
        TargetError: If the device profile lacks a number that a kernel needs.
    """
    shared = {part.name: code_inputs(part, target.target) for part in provider_parts(provider)}

    def key(candidate: Candidate) -> str:
        limits = candidate.design.cluster_limits
        inputs = {
            "operator": candidate.operator,
            "signature": candidate.signature.key,
            "calling_convention": candidate.calling_convention,
            "cluster_capacities": {str(limit.cluster_size): limit.max_active for limit in limits},
        }
        if candidate.added_code:
            inputs["added_code"] = candidate.added_code
        return cache_key("kernel", {**shared[candidate.provider], **inputs})

    limited = (_with_cluster_limits(candidate, target.device) for candidate in candidates)
    return tuple(
        Task(candidate=candidate, target=target, key=key(candidate)) for candidate in limited
    )


def code_inputs(part: Provider, target: Target) -> dict[str, Any]:
    """Returns everything in cache keys that all kernels of a provider for a target share.

    Raises:
        ToolchainError: If the builder is incomplete.
    """
    return {
        "provider": part.name,
        "recipe": target_recipe(part, target),
        "launcher": LAUNCHER,
        "target": target.key,
        "toolchain": versions_of(part, target),
        "linker": linker.linker_version(target.platform),
        "linker_flags": linker.linker_flags(target.platform),
    }


def _with_cluster_limits(candidate: Candidate, device: DeviceProfile) -> Candidate:
    """Adds the device-profile numbers that are compiled in to a candidate's design."""
    facts = {size: device.cluster_capacity(size) for size in sorted(candidate.cluster_sizes)}
    limits = tuple(
        ClusterLimit(cluster_size=size, max_active=fact.value, basis=fact.basis)
        for size, fact in facts.items()
    )
    return replace(candidate, design=replace(candidate.design, cluster_limits=limits))


TaskOutcome = tuple[Task, TaskResult | WorkerDied]
"""A task with its result."""


class ProviderWorkers:
    """Compiler processes, one `ProcessKind` at a time. A context manager.

    A process serves a single provider, because an imported library may change the compiler for all
    code in the process, and a kernel must not depend on earlier tasks. A process can load only one
    CUDA version's compiler.

    Args:
        cache: Cache that stores the kernels.
        jobs: Number of concurrent processes.
        first: Kind whose processes start at once.
    """

    def __init__(self, cache: Cache, jobs: int, first: ProcessKind) -> None:
        self._cache = cache
        self._jobs = jobs
        self._kind = first
        self._workers = start_workers(cache, jobs, first)

    def __enter__(self) -> ProviderWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__()

    def run(self, items: Sequence[Task], /) -> Iterator[TaskOutcome]:
        """Runs all tasks; see `Workers.run`."""
        kinds = dict.fromkeys(task.process_kind for task in items)
        for kind in sorted(kinds, key=lambda other: other != self._kind):
            if kind != self._kind:
                self._workers.__exit__()
                self._workers = start_workers(self._cache, self._jobs, kind)
                self._kind = kind
            groups = group_by_device_code(task for task in items if task.process_kind == kind)
            try:
                yield from self._run_groups(groups)
            except WorkersCannotStart as error:
                raise WorkersCannotStart(f"those of {kind}: {error}") from error

    def _run_groups(self, groups: Sequence[tuple[Task, ...]]) -> Iterator[TaskOutcome]:
        """Runs all groups. If a process dies on a group of several tasks, runs these one by one."""
        apart: list[tuple[Task, ...]] = []
        for tasks, outcomes in self._workers.run(groups):
            if not isinstance(outcomes, WorkerDied):
                yield from zip(tasks, outcomes)
            elif len(tasks) == 1:
                yield tasks[0], outcomes
            else:
                apart += ((task,) for task in tasks)
        if apart:
            yield from self._run_groups(apart)


def group_by_device_code(tasks: Iterable[Task]) -> list[tuple[Task, ...]]:
    """Groups tasks whose kernels differ only in the host platform.

    One process runs a group in sequence, so a provider can compile the shared part once.
    """
    groups: dict[Hashable, list[Task]] = {}
    for task in tasks:
        target = task.target.target
        groups.setdefault((task.candidate, target.arch, target.cuda), []).append(task)
    return [tuple(group) for group in groups.values()]


CompilerProcesses = Workers[tuple[Task, ...], tuple[TaskResult, ...]]
"""Processes that each run one group of tasks with the same device code at a time."""


def start_workers(cache: Cache, jobs: int, kind: ProcessKind) -> CompilerProcesses:
    """Starts compiler processes, which import the compiler at once."""
    return Workers(
        jobs,
        functools.partial(_run_tasks, directory=cache.directory),
        functools.partial(_prepare_worker, kind, cache.directory),
        compile_limit_seconds(),
    )


def compile_all(
    tasks: Sequence[Task],
    cache: Cache,
    *,
    jobs: int,
    progress: Progress | None = None,
    workers: KernelWorkers | None = None,
    remote: RemoteCache | None = None,
) -> Compilation:
    """Reads every task's kernel from the cache, after compiling the missing ones.

    Workers store each kernel at once, so an interrupted build resumes where it stopped. Missing
    kernels that ``remote`` has are fetched instead, and the others are sent there once compiled.

    Several tasks may share a key, if none or all keep PTX. ``progress`` is called at the start
    (with 0 done) and after each kernel. Starts compiler processes unless ``workers`` already run.

    Raises:
        StorageError: If the cache or the directory for temporary files cannot be written, or a
            kernel disappeared after it was compiled.
        ToolchainError: If the builder is incomplete.
    """
    unique = {task.key: task for task in tasks}
    kernels = {
        key: entry
        for key, task in unique.items()
        if (entry := cache.read(key)) is not None and not lacks_ptx(task, cache)
    }
    missing = [task for key, task in unique.items() if key not in kernels]
    if not missing:
        return Compilation(kernels=kernels, compiled=0, failures=())
    cache.require_writable()
    if remote is not None:
        fetched = fetch_kernels({task.key: task.expected for task in missing}, cache, remote)
        kernels |= {key: entry for key in fetched if (entry := cache.read(key)) is not None}
        missing = [task for task in missing if task.key not in kernels]
        if not missing:
            return Compilation(kernels=kernels, compiled=0, failures=())
    for target in {task.target.target for task in missing}:
        linker.library_directories(target)
    report = progress or (lambda done, total: None)
    report(0, len(missing))
    failures = []
    compiled = 0
    with contextlib.ExitStack() as stack:
        if workers is None:
            count = min(jobs, len(missing))
            started = ProviderWorkers(cache, count, missing[0].process_kind)
            workers = stack.enter_context(started)
        for done, (task, outcome) in enumerate(_results(workers, missing), start=1):
            if outcome.failure is not None:
                _log.info("%s failed: %s", task.candidate.operator, outcome.failure.reason)
                failures.append(outcome.failure)
            elif not outcome.was_there:
                compiled += 1
                if remote is not None and not outcome.is_shared:
                    push_kernel(task.key, cache, remote, keeps_ptx=task.keeps_ptx)
            report(done, len(missing))
    failed = {failure.task.key: failure for failure in failures}
    kernels |= {t.key: _read_compiled(t, cache) for t in missing if t.key not in failed}
    return Compilation(
        kernels=kernels,
        compiled=compiled,
        failures=tuple(failed[key] for key in unique if key in failed),
    )


def lacks_ptx(task: Task, cache: Cache) -> bool:
    """Returns True if a task keeps PTX that the cache does not have."""
    return task.keeps_ptx and cache.get(ptx_key(task.key)) is None


def _read_compiled(task: Task, cache: Cache) -> CacheEntry:
    entry = cache.read(task.key)
    if entry is None:
        raise StorageError(
            f"{cache.path(task.key)}: the kernel that was just compiled is gone or damaged; "
            "does something else clean this directory? Build again"
        )
    return entry


def _results(workers: KernelWorkers, tasks: Sequence[Task]) -> Iterator[tuple[Task, TaskResult]]:
    """Yields each task's result. A process that dies on a task makes that task a failure."""
    try:
        for task, outcome in workers.run(tasks):
            if isinstance(outcome, WorkerDied):
                failure = Failure(task=task, reason=death_text(outcome), is_transient=True)
                yield task, TaskResult(failure=failure)
            else:
                yield task, outcome
    except WorkersCannotStart as error:
        raise ToolchainError(
            f"compiler processes cannot be started: {error}; is everything installed "
            f"({install_command('build')}), and is there enough memory?"
        ) from error


def death_text(death: WorkerDied) -> str:
    """Returns the failure reason for a kernel whose compiler process died."""
    if isinstance(death, TimeLimitExceeded):
        return (
            f"its compiler was killed: {death}; set {COMPILE_TIMEOUT_VARIABLE} to allow more, or "
            f"{BLAME}"
        )
    return f"the compiler process died {death}; if it does so again, {BLAME}"


def _prepare_worker(kind: ProcessKind, directory: Path) -> None:
    _keep_temporary_files_private(directory)
    cute_setup.choose_cuda(kind.cuda)
    _worker_provider(kind.provider).prepare()


def _keep_temporary_files_private(directory: Path) -> None:
    """Moves temporary files into the cache directory if others can write the system's."""
    with contextlib.suppress(OSError):  # the later write reports an unwritable directory
        if writable_by_others(Path(tempfile.gettempdir()).absolute()) is None:
            return
        parent = (directory / "temporary").absolute()
        make_directories(parent)
        reason = writable_by_others(parent)
        if reason is not None:
            raise StorageError(
                f"others could change what compilers write, in {tempfile.gettempdir()} and in the "
                f"cache: {reason}; or set TMPDIR to a directory that only you can write"
            )
        # Workers are killed when they are done and cannot remove it; the next worker to start does.
        private = temporary_directory.make(parent)
        tempfile.tempdir = os.environ["TMPDIR"] = str(private)


_worker_provider = functools.cache(load_provider)
"""The provider of this worker process, loaded once for all its tasks."""


def _run_tasks(tasks: tuple[Task, ...], directory: Path) -> tuple[TaskResult, ...]:
    return tuple(_run_task(task, directory) for task in tasks)


def _run_task(task: Task, directory: Path) -> TaskResult:
    """Compiles, links and stores one kernel, unless another process has just done so."""
    cache = Cache(directory, quiet=True)  # the parent has already warned
    with contextlib.ExitStack() as stack:
        with clock_stopped():  # waiting for another process must not count
            stack.enter_context(locked(cache.lock_path(f"kernel-{task.key}")))
        if cache.get(task.key) is not None and not lacks_ptx(task, cache):
            return TaskResult(was_there=True)
        sweep_partials_of(cache.path(task.key))
        reason = _compile_and_store(task, cache)
        return TaskResult(failure=None if reason is None else Failure(task=task, reason=reason))


def _compile_and_store(task: Task, cache: Cache) -> str | None:
    """Compiles, links and stores a kernel; returns the failure reason, or None on success."""
    ptx: list[str] = []
    try:
        provider = _worker_provider(task.candidate.provider)
        with collected_ptx() if task.keeps_ptx else contextlib.nullcontext(ptx) as ptx:
            relocatable = provider.compile(task.candidate, task.target)
        payload = linker.link(relocatable, task.candidate.calling_convention, task.target.target)
    except CompileError as error:
        return str(error)
    except LinkError as error:
        return f"its object does not link: {error}; {BLAME}"
    except OSError as error:
        raise StorageError(
            f"cannot compile {task.candidate.operator}: {error}; "
            f"is there space in the directory for temporary files ({tempfile.gettempdir()})?"
        ) from error
    if spilled := spilled_bytes(payload):
        return (
            f"{task.candidate.operator}: registers spill, {spilled} bytes a thread: slow, and "
            "refused by verify"
        )
    target = task.target.target
    if others := foreign_cuda_versions(payload, target.cuda):
        return (
            f"{task.candidate.operator}: its device code was compiled with CUDA "
            f"{', '.join(others)}, target {target.key} needs {target.cuda}; provider "
            f"{task.candidate.provider} must call cute_dsl.set_environment() before it compiles"
        )
    if task.keeps_ptx:
        reason = store_ptx(task.key, ptx, payload, cache)
        if reason is not None:
            return f"{task.candidate.operator}: {reason}"
    cache.put(task.key, payload)
    return None
