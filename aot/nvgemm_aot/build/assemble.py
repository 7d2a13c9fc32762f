"""What goes into bundles: the kernels of planned targets, and the rankings of what compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import zstandard

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.encode import source_json, unserved_json
from nvgemm_runtime.bundle.format import (
    FORMAT_VERSION,
    ClusterLimit,
    CompileFailure,
    KernelDesign,
    Scope,
    UnservedReason,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.errors import CompileError, StorageError, one_line

from ..bundle.compression import SCHEME
from ..bundle.writer import BuiltKernel, BundleContent, ProblemRanking
from ..providers import Candidate, Provider
from ..storage.cache import Cache
from ..targets import BuildTarget
from . import linker
from .compiler import Failure, KernelWorkers, Progress, Task, compile_all
from .plan import Plan
from .unserved import Unserved

GENERATOR = f"nvgemm-aot {__version__}"

_MAX_REASON = 300
"""Characters of a failure's reason that a bundle keeps: compilers can say megabytes."""


_NO_REASON = "no reason given"
"""In place of an empty reason, which the format does not have."""


@dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """One target of a build before anything is compiled.

    Attributes:
        tasks: What to compile, one for each of ``plan.candidates``.
        missing: How many of the tasks' kernels are not in the cache.
    """

    target: BuildTarget
    plan: Plan
    tasks: tuple[Task, ...]
    missing: int


@dataclass(frozen=True, kw_only=True)
class MadeContent:
    """What one bundle is written from.

    Attributes:
        content: What it holds; None where no kernel compiled.
        failures: The kernels that did not compile.
        uncompiled: The problems that these leave without a kernel.
    """

    content: BundleContent | None
    failures: tuple[Failure, ...]
    uncompiled: tuple[Unserved, ...]


@dataclass(frozen=True, kw_only=True)
class MadeContents:
    """What bundles are written from.

    Attributes:
        contents: One for each target.
        compiled: Kernels compiled now; all others came from the cache.
    """

    contents: tuple[MadeContent, ...]
    compiled: int


def make_contents(
    planned: Sequence[PlannedTarget],
    cache: Cache,
    *,
    provider: Provider,
    jobs: int,
    strict: bool = False,
    progress: Progress | None = None,
    workers: KernelWorkers | None = None,
) -> MadeContents:
    """Compile what was planned, and put together what goes into each target's bundle.

    Args:
        planned: The targets.
        cache: Build cache.
        provider: Where kernels come from.
        jobs: Compiler processes, if none run yet.
        strict: Whether one kernel that does not compile is an error.
        progress: Told of each compiled kernel.
        workers: Compiler processes that run already.

    Raises:
        CompileError: If ``strict`` and one fails.
        StorageError: If the cache cannot be written.
        ToolchainError: If the compiler side is incomplete.
    """
    tasks = [task for item in planned for task in item.tasks]
    compilation = compile_all(tasks, cache, jobs=jobs, progress=progress, workers=workers)
    versions = toolchain(provider)
    contents = [_content(item, versions, cache, compilation.failures, strict) for item in planned]
    return MadeContents(contents=tuple(contents), compiled=compilation.compiled)


def toolchain(provider: Provider) -> dict[str, str]:
    """Versions of everything that shapes a bundle's bytes."""
    linker_name, linker_version = linker.linker_identity()
    return {
        **provider.toolchain(),
        linker_name: linker_version,
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
    }


def build_key(
    item: PlannedTarget,
    tasks: Sequence[Task],
    versions: dict[str, str],
    failures: Sequence[Failure] = (),
) -> str:
    """Digest of all that determines a bundle: equal keys, equal bytes.

    Args:
        item: The planned target.
        tasks: Those of its tasks whose kernels the bundle holds.
        versions: See `toolchain`.
        failures: Why the bundle does not hold those of the others.
    """
    kernels = {
        task.candidate: [
            task.key,
            task.candidate.workspace_bytes,
            task.candidate.alignment_bytes,
            asdict(_final_design(task)),
        ]
        for task in tasks
    }
    document = {
        "format": FORMAT_VERSION,
        "generator": GENERATOR,
        "target": item.target.target.key,
        "device": item.target.device.name,
        "toolchain": versions,
        "compression": SCHEME,
        "source": source_json(item.plan.source),
        "kernels": [kernels.get(candidate) for candidate in item.plan.candidates],
        "rankings": [[planned.problem.key, planned.choices] for planned in item.plan.problems],
    }
    if item.plan.unserved:
        document["unserved"] = unserved_json(dict(item.plan.unserved))
    if failures:
        document["failures"] = [asdict(_compile_failure(failure)) for failure in failures]
    return sha256_hex(canonical_json(document))


def _content(
    item: PlannedTarget,
    versions: dict[str, str],
    cache: Cache,
    failures: Sequence[Failure],
    strict: bool,
) -> MadeContent:
    """Assemble one bundle from the cache, without the kernels that failed."""
    arch = item.target.target.arch
    keys = {task.key for task in item.tasks}
    own = tuple(failure for failure in failures if failure.task.key in keys)
    if own and strict:
        raise CompileError(_failure_text(f"{arch}: {len(own)} kernels failed (--strict)", own))
    failed = {failure.task.key for failure in own}
    present = [task for task in item.tasks if task.key not in failed]
    payloads = {task.candidate: _payload(task, cache) for task in present}
    ids = {candidate: sha256_hex(payload) for candidate, payload in payloads.items()}
    rankings, uncompiled = _rankings(item, ids, own)
    if not rankings:
        return MadeContent(content=None, failures=own, uncompiled=uncompiled)
    content = BundleContent(
        target=item.target.target,
        device=item.target.device.name,
        generator=GENERATOR,
        build_key=build_key(item, present, versions, own),
        toolchain=versions,
        kernels=tuple(
            BuiltKernel(
                payload=payloads[task.candidate],
                signature=task.candidate.signature,
                provider=task.candidate.provider,
                operator=task.candidate.operator,
                design=_final_design(task),
                alignment_bytes=task.candidate.alignment_bytes,
                workspace_bytes=task.candidate.workspace_bytes,
                calling_convention=task.candidate.calling_convention,
            )
            for task in present
        ),
        rankings=rankings,
        unserved={
            **dict(item.plan.unserved),
            **{
                one.problem: UnservedReason(text=one.reason, scope=Scope.PROBLEM)
                for one in uncompiled
            },
        },
    )
    return MadeContent(content=content, failures=own, uncompiled=uncompiled)


def _payload(task: Task, cache: Cache) -> bytes:
    payload = cache.get(task.key)
    if payload is None:
        raise StorageError(
            f"{cache.path(task.key)}: the kernel that was just compiled is gone or damaged; "
            "does something else clean this directory? Build again"
        )
    return payload


def _rankings(
    item: PlannedTarget, ids: dict[Candidate, str], failures: Sequence[Failure]
) -> tuple[tuple[ProblemRanking, ...], tuple[Unserved, ...]]:
    """The rankings of what compiled, and the problems of which nothing did."""
    reasons = {failure.task.candidate: failure.reason for failure in failures}
    missing = {failure.task.candidate: _compile_failure(failure) for failure in failures}
    rankings, bare = [], []
    for planned in item.plan.problems:
        chosen = [(item.plan.candidates[index], time_ns) for index, time_ns in planned.choices]
        places: dict[str, int | None] = {}
        for candidate, time_ns in chosen:
            if candidate in ids:
                # Different operators can give the same code; the better place counts.
                places.setdefault(ids[candidate], time_ns)
        if places:
            rankings.append(
                ProblemRanking(
                    problem=planned.problem,
                    source=item.plan.source,
                    kernels=tuple(places.items()),
                    missing=tuple(missing[one] for one, _ in chosen if one in missing),
                )
            )
        else:
            words = "; ".join(dict.fromkeys(reasons[one] or _NO_REASON for one, _ in chosen))
            bare.append(
                Unserved(
                    arch=item.target.target.arch,
                    problem=planned.problem,
                    reason=one_line(f"none of {len(chosen)} operators compiles: {words}"),
                    failed=True,
                )
            )
    return tuple(rankings), tuple(bare)


def _compile_failure(failure: Failure) -> CompileFailure:
    return CompileFailure(
        operator=failure.task.candidate.operator,
        reason=one_line(failure.reason)[:_MAX_REASON] or _NO_REASON,
        is_transient=failure.is_transient,
    )


def _failure_text(head: str, failures: Sequence[Failure]) -> str:
    return "\n".join([head, *(f"  {f.task.candidate.operator}: {f.reason}" for f in failures)])


def _final_design(task: Task) -> KernelDesign:
    """The design with the numbers of the device profile that are compiled in."""
    facts = {s: task.target.device.cluster_capacity(s) for s in task.candidate.cluster_sizes}
    return replace(
        task.candidate.design,
        cluster_limits=tuple(
            ClusterLimit(cluster_size=size, max_active=fact.value, basis=fact.basis)
            for size, fact in sorted(facts.items())
        ),
    )
