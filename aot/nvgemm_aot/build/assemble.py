"""Assembles bundles: compiles the kernels of planned targets and ranks those that compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import zstandard

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle.encode import (
    design_json,
    source_json,
    unserved_json,
    workspace_json,
)
from nvgemm_runtime.bundle.format import (
    FORMAT_VERSION,
    CompileFailure,
    Scope,
    UnservedReason,
    canonical_json,
    sha256_hex,
)
from nvgemm_runtime.errors import CompileError, count_text, one_line
from nvgemm_runtime.gemm.target import Target

from ..bundle.compression import SCHEME
from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking
from ..providers import Provider, stated_recipes, versions_of
from ..providers.combined import join_versions
from ..rankings.entries import Operator
from ..rankings.pruning import keep_winners
from ..rankings.usable import UsableRankings, measured_ranking
from ..storage.cache import Cache, Entry
from ..targets import BuildTarget
from . import linker
from .compiler import Compilation, Failure, KernelWorkers, Progress, Task, compile_all
from .plan import Plan, Unserved

GENERATOR = f"nvgemm-aot {__version__}"

_MAX_REASON = 300
"""Characters of a failure's reason that a bundle keeps: compilers can print megabytes."""


_NO_REASON = "no reason given"
"""Replaces an empty reason, which the format does not allow."""


@dataclass(frozen=True, kw_only=True)
class PlannedTarget:
    """One target of a build before anything is compiled.

    ``tasks`` are in the order of ``plan.candidates``; ``missing`` is how many of their kernels are
    not in the cache; ``build_key`` is the bundle's if every kernel compiles. ``measured`` are times
    to rank by instead of estimates; ``prunes`` is whether only kernels that win somewhere stay.
    """

    target: BuildTarget
    plan: Plan
    tasks: tuple[Task, ...]
    missing: int
    toolchain: dict[str, str]
    build_key: str
    measured: UsableRankings | None = None
    prunes: bool = False


@dataclass(frozen=True, kw_only=True)
class AssembledBundle:
    """One bundle, ready to be written.

    ``content`` is None if no problem got a kernel; ``uncompiled`` are the problems that
    ``failures`` leave without one.
    """

    content: BundleContent | None
    failures: tuple[Failure, ...]
    uncompiled: tuple[Unserved, ...]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The bundles of a build, ready to be written.

    Kernels that were not ``compiled`` now came from the cache.
    """

    bundles: tuple[AssembledBundle, ...]
    compiled: int


def compile_and_assemble(
    planned: Sequence[PlannedTarget],
    cache: Cache,
    *,
    jobs: int,
    strict: bool = False,
    progress: Progress | None = None,
    workers: KernelWorkers | None = None,
) -> Assembly:
    """Compile what was planned, and put together what goes into each target's bundle.

    ``jobs`` is how many compiler processes to start, unless ``workers`` run already.

    Raises:
        CompileError: If ``strict`` and one kernel does not compile; others as of `compile_all`.
    """
    tasks = [task for item in planned for task in item.tasks]
    compilation = compile_all(tasks, cache, jobs=jobs, progress=progress, workers=workers)
    bundles = [_assemble(item, compilation, strict) for item in planned]
    return Assembly(bundles=tuple(bundles), compiled=compilation.compiled)


def toolchain(provider: Provider, target: Target) -> dict[str, str]:
    """Versions of everything that shapes the bytes of a target's bundle."""
    linker_name, linker_version = linker.linker_identity(target.platform)
    own = {linker_name: linker_version, "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
    return join_versions(
        [
            (f"provider {provider.name!r}", versions_of(provider, target)),
            ("nvgemm-aot", stated_recipes(provider, target)),
            ("nvgemm-aot", own),
        ]
    )


def build_key(
    target: BuildTarget,
    plan: Plan,
    tasks: Sequence[Task],
    versions: dict[str, str],
    failures: Sequence[Failure] = (),
    *,
    measured: UsableRankings | None = None,
    prunes: bool = False,
) -> str:
    """Digest of all that determines a bundle: equal keys, equal bytes.

    ``tasks`` are in the order of ``plan.candidates``; ``failures`` are those whose kernels the
    bundle does not hold.
    """
    failed = {failure.task.key for failure in failures}
    document = {
        "format": FORMAT_VERSION,
        "generator": GENERATOR,
        "target": target.target.key,
        "device": target.device.name,
        "toolchain": versions,
        "compression": SCHEME,
        "source": source_json(plan.source),
        "kernels": [None if task.key in failed else _identity(task) for task in tasks],
        "rankings": [[planned.problem.key, planned.choices] for planned in plan.problems],
    }
    if plan.unserved:
        document["unserved"] = unserved_json(dict(plan.unserved))
    digest = measured and measured.digest(planned.problem for planned in plan.problems)
    if digest is not None:
        document["measured"] = digest
    not_declared = [planned.problem.key for planned in plan.problems if not planned.is_declared]
    if not_declared:
        document["not_declared"] = not_declared
    if prunes:
        document["prunes"] = True
    if failures:
        document["failures"] = [asdict(_compile_failure(failure)) for failure in failures]
    return sha256_hex(canonical_json(document))


def _identity(task: Task) -> list[Any]:
    """What a task adds to the build key: its code, and what the header says about it."""
    candidate = task.candidate
    design = design_json(candidate.design)
    identity = [task.key, candidate.workspace_bytes, candidate.alignment_bytes, design]
    if candidate.features:
        identity += [workspace_json(candidate.workspace), candidate.is_deterministic]
    return identity


def _assemble(item: PlannedTarget, compilation: Compilation, strict: bool) -> AssembledBundle:
    """Assemble one bundle from the kernels that compiled."""
    keys = {task.key for task in item.tasks}
    failures = tuple(one for one in compilation.failures if one.task.key in keys)
    if failures and strict:
        name = item.target.target.short_name
        kernels_text = f"{len(failures)} kernel{'s' * (len(failures) > 1)}"
        lines = [f"  {text}" for text in _failure_texts(failures)]
        raise CompileError("\n".join([f"{name}: {kernels_text} failed (--strict)", *lines]))
    kernels = [_built_kernel(task, compilation.kernels.get(task.key)) for task in item.tasks]
    rankings, uncompiled = _rank(item, kernels, failures)
    if not rankings:
        return AssembledBundle(content=None, failures=failures, uncompiled=uncompiled)
    content = BundleContent(
        target=item.target.target,
        device=item.target.device.name,
        generator=GENERATOR,
        build_key=build_key(
            item.target,
            item.plan,
            item.tasks,
            item.toolchain,
            failures,
            measured=item.measured,
            prunes=item.prunes,
        )
        if failures
        else item.build_key,
        toolchain=item.toolchain,
        kernels=tuple(kernel for kernel in kernels if kernel is not None),
        rankings=rankings,
        unserved=dict(item.plan.unserved)
        | {one.problem: UnservedReason(text=one.reason, scope=Scope.PROBLEM) for one in uncompiled},
    )
    if item.prunes:
        content = keep_winners(content)
    return AssembledBundle(content=content, failures=failures, uncompiled=uncompiled)


def _built_kernel(task: Task, entry: Entry | None) -> BuiltKernel | None:
    if entry is None:
        return None
    return BuiltKernel(**task.candidate.facts(), payload=entry.payload, sha256=entry.sha256)


def _rank(
    item: PlannedTarget, kernels: Sequence[BuiltKernel | None], failures: Sequence[Failure]
) -> tuple[tuple[ProblemRanking, ...], tuple[Unserved, ...]]:
    """Rank the kernels of each problem; list declared problems for which no kernel compiled.

    A problem that is not declared is left out unless some of its measured kernels compiled.
    """
    failed = {failure.task.key: failure for failure in failures}
    rankings, uncompiled = [], []
    for planned in item.plan.problems:
        times: dict[str, int | None] = {}
        ids: dict[Operator, str] = {}
        missing = []
        for position, time_ns in planned.choices:
            kernel = kernels[position]
            if kernel is None:
                missing.append(failed[item.tasks[position].key])
            else:
                # Different operators can give the same code; the better place counts.
                times.setdefault(kernel.id, time_ns)
                ids[Operator(provider=kernel.provider, operator=kernel.operator)] = kernel.id
        usable = item.measured and item.measured.problems.get(planned.problem)
        measured = usable and measured_ranking(usable, ids, tuple(map(_compile_failure, missing)))
        if measured:
            rankings.append(replace(measured, is_declared=planned.is_declared))
        elif not planned.is_declared:
            continue
        elif times:
            rankings.append(
                ProblemRanking(
                    problem=planned.problem,
                    source=item.plan.source,
                    kernels=tuple(times.items()),
                    missing=tuple(map(_compile_failure, missing)),
                )
            )
        else:
            reasons = "; ".join(_failure_texts(missing))
            uncompiled.append(
                Unserved(
                    target=item.target.target,
                    problem=planned.problem,
                    reason=one_line(f"{_none_of(len(missing))}: {reasons}"),
                    failed=True,
                )
            )
    return tuple(rankings), tuple(uncompiled)


def _none_of(operators: int) -> str:
    return (
        "its one operator does not compile"
        if operators == 1
        else f"none of {count_text(operators, 'operator')} compiles"
    )


def _failure_texts(failures: Sequence[Failure]) -> list[str]:
    """Each reason once, behind the first operator that it holds for and its provider."""
    operators: dict[tuple[str, str], list[str]] = {}
    for one in failures:
        candidate = one.task.candidate
        reason = one.own_reason or _NO_REASON
        operators.setdefault((candidate.provider, reason), []).append(candidate.operator)
    return [
        f"{first}{f' and {len(others)} more' if others else ''} of provider {provider!r}: {reason}"
        for (provider, reason), (first, *others) in operators.items()
    ]


def _compile_failure(failure: Failure) -> CompileFailure:
    return CompileFailure(
        operator=failure.task.candidate.operator,
        reason=one_line(failure.reason)[:_MAX_REASON] or _NO_REASON,
        is_transient=failure.is_transient,
    )
