"""Compiles single problems for the device at hand and stores their kernels in user bundles.

Each is a build for a manifest with one problem, ranked by shipped measurements where they fit.
Kernels whose compilers were killed too often are left out for a day, because a program waits for
them here; a build tries each kernel every time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvgemm_runtime.bundle.format import canonical_json, sha256_hex
from nvgemm_runtime.errors import StorageError, count_text
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.installed.jit_cache import jit_directory, stamp_path
from nvgemm_runtime.installed.ownership import writable_by_others

from ..manifest.parse import Declared, Manifest
from ..pipeline.assemble import GENERATOR, PlannedTarget, compile_and_assemble, toolchain
from ..pipeline.compiler import (
    Failure,
    KernelWorkers,
    ProcessKind,
    Task,
    TaskResult,
    death_text,
)
from ..pipeline.compiler_limits import compile_limit_seconds
from ..pipeline.pipeline import look_up_plans, plan_build, without_operator
from ..pipeline.target_plan import likely_provider
from ..pipeline.workers import WorkerDied
from ..providers import Provider
from ..rankings.shipped_rankings import shipped_rankings
from ..storage.build_cache import Cache, cache_key
from ..storage.files import make_directories, open_new_file
from ..storage.locks import locked
from ..storage.remote.remote_cache import RemoteCache
from ..targets import BuildTarget
from ..targets.local import Device, targets_for
from . import eviction
from .shared_workers import SharedWorkers
from .user_bundle import UserBundle

MAX_ATTEMPTS = 2
"""Kills of a kernel's compiler after which the kernel is left out."""

PAUSE_SECONDS = 24 * 3600
"""Time for which such a kernel is left out, in seconds."""


class LimitedAttempts:
    """Compiler processes without kernels whose compilers were killed often; see `KernelWorkers`.

    The cache counts the attempts by all processes that use it, separately for each time limit.
    """

    def __init__(self, workers: KernelWorkers, cache: Cache) -> None:
        self._workers = workers
        self._cache = cache
        self._limit = str(compile_limit_seconds())

    def run(self, items: Sequence[Task], /) -> Iterator[tuple[Task, TaskResult | WorkerDied]]:
        """Runs the tasks whose kernels are not left out; see `Workers.run`."""
        runnable = []
        for task in items:
            count, reason = self._attempts(task)
            if count < MAX_ATTEMPTS:
                runnable.append(task)
                continue
            failure = Failure(
                task=task,
                reason=f"{reason}; given up for a day after {count_text(count, 'attempt')}, or "
                "until `nvgemm-aot cache clear`",
                is_transient=True,
            )
            yield task, TaskResult(failure=failure)
        for task, outcome in self._workers.run(runnable):
            if isinstance(outcome, WorkerDied):
                self._store_count(task, death_text(outcome))
            yield task, outcome

    def _attempts(self, task: Task) -> tuple[int, str]:
        """Returns the number of kills within the last day, and the last kill's reason."""
        data = self._cache.get(self._key(task))
        if data is None:
            return 0, ""
        known = json.loads(data)
        if not 0 <= time.time() - known["at"] < PAUSE_SECONDS:
            return 0, ""
        return known["count"], known["reason"]

    def _store_count(self, task: Task, reason: str) -> None:
        count, _ = self._attempts(task)
        document = {"count": count + 1, "reason": reason, "at": time.time()}
        self._cache.put_if_possible(self._key(task), json.dumps(document).encode())

    def _key(self, task: Task) -> str:
        return cache_key("killed compilers", [task.key, self._limit])


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Result of compiling a problem.

    Attributes:
        bundle: User bundle with the problem's kernels, or None.
        compiled: Number of kernels that this call compiled.
        reason: Explanation if there is no bundle.
        failures: Kernels that did not compile.
    """

    bundle: Path | None = None
    compiled: int = 0
    reason: str | None = None
    failures: tuple[Failure, ...] = ()

    @property
    def is_transient(self) -> bool:
        """True if a later attempt may yield more kernels, because a compiler was killed."""
        return any(failure.is_transient for failure in self.failures)


class JitCompiler:
    """Compiles problems into one cache directory's user bundles, for several threads at once.

    ``note`` is called with a text when a damaged user bundle is moved aside. Kernels that
    ``remote`` has are not compiled.
    """

    def __init__(
        self,
        cache: Cache,
        provider: Provider,
        jobs: int,
        note: Callable[[str], None],
        remote: RemoteCache | None = None,
    ) -> None:
        self._cache = cache
        self._provider = provider
        self._jobs = jobs
        self._note = note
        self._remote = remote
        self._planning = threading.Lock()  # only one thread at a time may list operators
        self._workers = SharedWorkers(cache, jobs)

    def compile(self, problem: Problem, candidates: int, device: Device) -> Compiled:
        """Compiles a problem unless its user bundle has it; one process at a time.

        Compiles at most ``candidates`` kernels, for the GPU ``device``.

        Raises:
            TargetError: If nothing can be compiled for the device.
            ToolchainError: If the builder is incomplete.
            StorageError: If the cache directory cannot be written.
        """
        self._require_private()
        user_bundles = [
            (
                target,
                UserBundle(
                    self._cache,
                    target,
                    toolchain(self._provider, target.target),
                    GENERATOR,
                    self._note,
                ),
            )
            for target in targets_for(device)
        ]
        identity = [problem.key, *(bundle.path.name for _, bundle in user_bundles)]
        name = f"problem-{sha256_hex(canonical_json(identity))}"
        failure_key = cache_key(
            "jit failure", [*identity, candidates, self._provider.recipe, GENERATOR]
        )
        with locked(self._cache.lock_path(name)):
            for _, bundle in user_bundles:
                if bundle.holds(problem):
                    return Compiled(bundle=bundle.path)
            known = self._cache.get(failure_key)
            if known is not None:
                return Compiled(reason=known.decode())
            result = self._compile(problem, candidates, user_bundles)
            if result.reason is not None and not result.is_transient:
                self._cache.put_if_possible(failure_key, result.reason.encode())
            return result

    def close(self) -> None:
        """Stops the compiler processes."""
        self._workers.close()

    def _require_private(self) -> None:
        """Refuses a directory in which others could change bundles or kernels."""
        directory = jit_directory(self._cache.directory)
        try:
            make_directories(directory)
            reason = writable_by_others(directory) or self._cache.refusal()
        except OSError as error:
            raise StorageError(
                f"{directory}: {error.strerror}; set NVGEMM_AOT_CACHE to a directory that you own"
            ) from error
        if reason is not None:
            raise StorageError(
                f"{self._cache.directory}: its kernels could not be trusted: {reason}; to fix all "
                f"of it, run: chmod -R go-w {self._cache.directory}"
            )

    def _compile(
        self, problem: Problem, candidates: int, user_bundles: list[tuple[BuildTarget, UserBundle]]
    ) -> Compiled:
        reasons: list[str] = []
        failures: list[Failure] = []
        for target, bundle in user_bundles:
            planned = self._plan(problem, candidates, target)
            unserved = without_operator(planned)
            if not unserved:
                assembly = compile_and_assemble(
                    planned,
                    self._cache,
                    jobs=self._jobs,
                    workers=LimitedAttempts(self._workers, self._cache),
                    remote=self._remote,
                )
                [assembled] = assembly.bundles
                unserved = assembled.uncompiled
                failures += assembled.failures
            if unserved:
                reasons += (f"{entry.target.short_name}: {entry.reason}" for entry in unserved)
                continue
            assert assembled.content is not None
            bundle.append(assembled.content)
            self._stamp(problem)
            eviction.enforce(self._cache)
            return Compiled(
                bundle=bundle.path, compiled=assembly.compiled, failures=assembled.failures
            )
        return Compiled(reason="\n".join(reasons), failures=tuple(failures))

    def _plan(
        self, problem: Problem, candidates: int, target: BuildTarget
    ) -> tuple[PlannedTarget, ...]:
        manifest = Manifest(
            name="jit",
            description="",
            targets=(target,),
            declared=(Declared(problem=problem, candidates=candidates),),
        )
        rankings = shipped_rankings([problem])
        lookups = look_up_plans(manifest, self._cache, self._provider, rankings, self._remote)
        if any(lookup.stored is None for lookup in lookups):
            # Planning takes as long as compilers take to start, so both run at once.
            kind = ProcessKind(provider=likely_provider(lookups[0]), cuda=target.target.cuda)
            self._workers.prepare(candidates, kind)
        with self._planning:
            return plan_build(
                manifest, self._cache, provider=self._provider, lookups=lookups, remote=self._remote
            )

    def _stamp(self, problem: Problem) -> None:
        stamp = stamp_path(self._cache.directory, problem)
        with contextlib.suppress(OSError):  # without a stamp, the bundle's own time counts
            make_directories(stamp.parent)
            os.close(open_new_file(stamp, os.O_WRONLY))
            os.utime(stamp)
