"""Assembles bundles: compiles the kernels of planned targets and ranks those that compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
from nvgemm_runtime.bundle.format import FORMAT_VERSION, canonical_json, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import CompileFailure, UnservedReason
from nvgemm_runtime.errors import CompileError, count_text, one_line
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target

from ..bundle.compression import SCHEME
from ..bundle.content import BuiltKernel, BundleContent, ProblemRanking
from ..providers import Provider, recorded_recipes, versions_of
from ..providers.combined import join_versions
from ..rankings.entries import Operator
from ..rankings.pruning import keep_winners
from ..rankings.usable import UsableRankings, measured_ranking
from ..storage.build_cache import Cache, CacheEntry
from ..storage.remote.remote_cache import RemoteCache
from ..targets import BuildTarget
from ..targets.profile import DeviceProfile, basis_of_limit
from . import linker
from .compiler import Compilation, Failure, KernelWorkers, Progress, Task, compile_all
from .target_plan import Plan
from .unserved import Unserved, join_products, unserved_everywhere

GENERATOR = f"nvgemm-aot {__version__}"

_MAX_REASON = 300
"""Longest failure reason in a bundle, in characters: compilers can print megabytes."""


_NO_REASON = "no reason given"
"""Placeholder for an empty reason, which the format does not allow."""


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """Plan of one target for one GPU product.

    ``tasks`` are in the order of ``plan.candidates``. ``measured`` holds measured times, which
    replace estimates in the ranking.
    """

    target: BuildTarget
    plan: Plan
    tasks: tuple[Task, ...]
    measured: UsableRankings | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedTarget(PlannedDevice):
    """One target before compilation, with the plan for its first product.

    ``further`` are the plans for other products. ``missing`` counts the kernels, over all products,
    that the cache lacks. ``build_key`` is the bundle's key if every kernel compiles. ``prunes`` is
    True if the bundle drops kernels that win nowhere.
    """

    missing: int
    toolchain: dict[str, str]
    build_key: str
    prunes: bool = False
    further: tuple[PlannedDevice, ...] = ()

    @property
    def devices(self) -> tuple[PlannedDevice, ...]:
        """The plans for all products, the first product first."""
        return (self, *self.further)

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """The tasks of all products, without duplicates."""
        return tuple({task.key: task for device in self.devices for task in device.tasks}.values())


@dataclass(frozen=True, kw_only=True)
class AssembledBundle:
    """One bundle, ready to be written.

    ``content`` is None if no problem has a kernel. ``uncompiled`` are the problems without a kernel
    because of ``failures``.
    """

    content: BundleContent | None
    failures: tuple[Failure, ...]
    uncompiled: tuple[Unserved, ...]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Bundles of a build, ready to be written.

    ``compiled`` counts the kernels compiled in this run; the others came from the cache.
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
    remote: RemoteCache | None = None,
) -> Assembly:
    """Compiles the planned kernels and assembles each target's bundle content.

    ``jobs`` is the number of compiler processes to start, unless ``workers`` already run. Kernels
    that ``remote`` has are not compiled.

    Raises:
        CompileError: If ``strict`` and a kernel does not compile. Other errors are those of
            `compile_all`.
    """
    tasks = [task for item in planned for task in item.all_tasks]
    compilation = compile_all(
        tasks, cache, jobs=jobs, progress=progress, workers=workers, remote=remote
    )
    bundles = [_assemble(item, compilation, strict) for item in planned]
    return Assembly(bundles=tuple(bundles), compiled=compilation.compiled)


def toolchain(provider: Provider, target: Target) -> dict[str, str]:
    """Returns the versions of everything that shapes the bytes of a target's bundle."""
    linker_name, linker_version = linker.linker_identity(target.platform)
    tools = {linker_name: linker_version, "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
    return join_versions(
        [
            (f"provider {provider.name!r}", versions_of(provider, target)),
            ("nvgemm-aot", recorded_recipes(provider, target)),
            ("nvgemm-aot", tools),
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
    further: Sequence[PlannedDevice] = (),
) -> str:
    """Returns a digest of everything that determines a bundle: equal keys, equal bytes.

    ``tasks`` are in the order of ``plan.candidates``. ``failures`` are tasks whose kernels the
    bundle lacks. ``further`` are the plans for other products.
    """
    failed = {failure.task.key for failure in failures}
    first = PlannedDevice(target=target, plan=plan, tasks=tuple(tasks), measured=measured)
    document = {
        "format": FORMAT_VERSION,
        "generator": GENERATOR,
        "target": target.target.key,
        "toolchain": versions,
        "compression": SCHEME,
        **_device_identity(first, failed),
    }
    if further:
        document["further"] = [_device_identity(device, failed) for device in further]
    if prunes:
        document["prunes"] = True
    if failures:
        document["failures"] = [asdict(_compile_failure(failure)) for failure in failures]
    return sha256_hex(canonical_json(document))


def _device_identity(item: PlannedDevice, failed: Collection[str]) -> dict[str, Any]:
    """Returns one product's part of the build key, without the kernels of failed tasks."""
    plan = item.plan
    document: dict[str, Any] = {
        "device": item.target.device.name,
        "source": source_json(plan.source),
        "kernels": [None if task.key in failed else _task_identity(task) for task in item.tasks],
        "rankings": [[planned.problem.key, planned.choices] for planned in plan.problems],
    }
    if plan.unserved:
        document["unserved"] = unserved_json(dict(plan.unserved))
    digest = item.measured and item.measured.digest(planned.problem for planned in plan.problems)
    if digest is not None:
        document["measured"] = digest
    not_declared = [planned.problem.key for planned in plan.problems if not planned.is_declared]
    if not_declared:
        document["not_declared"] = not_declared
    return document


def _task_identity(task: Task) -> list[Any]:
    """Returns a task's part of the build key: its code, and its facts in the header."""
    candidate = task.candidate
    design = design_json(candidate.design)
    identity = [task.key, candidate.workspace_bytes, candidate.alignment_bytes, design]
    if candidate.features:
        identity += [workspace_json(candidate.workspace), candidate.is_deterministic]
    return identity


def _assemble(item: PlannedTarget, compilation: Compilation, strict: bool) -> AssembledBundle:
    """Assembles one bundle from the kernels that compiled."""
    keys = {task.key for task in item.all_tasks}
    failures = tuple(failure for failure in compilation.failures if failure.task.key in keys)
    if strict:
        require_no_failures(item.target.target.short_name, failures)
    kernels: list[BuiltKernel] = []
    rankings: list[ProblemRanking] = []
    uncompiled: list[Unserved] = []
    unserved: list[dict[Problem, UnservedReason]] = []
    for device in item.devices:
        built = [_built_kernel(task, compilation.kernels.get(task.key)) for task in device.tasks]
        ranked, unranked = _rank(device, built, failures)
        kernels += (kernel for kernel in built if kernel is not None)
        rankings += (replace(ranking, is_further=device is not item) for ranking in ranked)
        uncompiled += unranked
        unserved.append(
            dict(device.plan.unserved) | {entry.problem: entry.stored_reason for entry in unranked}
        )
    unserved_problems = unserved_everywhere(unserved)
    uncompiled = join_products(uncompiled, unserved_problems)
    if not rankings:
        return AssembledBundle(content=None, failures=failures, uncompiled=tuple(uncompiled))
    content = BundleContent(
        target=item.target.target,
        device=item.target.device.name,
        further_devices=tuple(product.target.device.name for product in item.further),
        generator=GENERATOR,
        build_key=build_key(
            item.target,
            item.plan,
            item.tasks,
            item.toolchain,
            failures,
            measured=item.measured,
            prunes=item.prunes,
            further=item.further,
        )
        if failures
        else item.build_key,
        toolchain=item.toolchain,
        kernels=_merge_kernels(kernels, [product.target.device for product in item.devices]),
        rankings=tuple(rankings),
        unserved=unserved_problems,
    )
    if item.prunes:
        content = keep_winners(content)
    return AssembledBundle(content=content, failures=failures, uncompiled=tuple(uncompiled))


def require_no_failures(name: str, failures: Sequence[Failure]) -> None:
    """Requires, for ``--strict``, that every kernel compiled; ``name`` begins the message.

    Raises:
        CompileError: If one did not.
    """
    if failures:
        lines = [f"  {text}" for text in _failure_texts(failures)]
        count = count_text(len(failures), "kernel")
        raise CompileError("\n".join([f"{name}: {count} failed (--strict)", *lines]))


def _built_kernel(task: Task, entry: CacheEntry | None) -> BuiltKernel | None:
    if entry is None:
        return None
    return BuiltKernel(**task.candidate.facts(), payload=entry.payload, sha256=entry.sha256)


def _merge_kernels(
    kernels: Iterable[BuiltKernel], profiles: Sequence[DeviceProfile]
) -> tuple[BuiltKernel, ...]:
    """Merges the kernels of several products, without duplicates.

    If an operator's code is equal for several products, so are its compiled-in cluster limits.
    Their basis is then replaced by one that holds for all these products; see `basis_of_limit`.
    """
    merged: dict[tuple[str, str, str], BuiltKernel] = {}
    for kernel in kernels:
        limits = tuple(
            replace(
                limit,
                basis=basis_of_limit(profiles, limit.cluster_size, limit.max_active) or limit.basis,
            )
            for limit in kernel.design.cluster_limits
        )
        if limits != kernel.design.cluster_limits:
            design = replace(kernel.design, cluster_limits=limits)
            kernel = replace(kernel, design=design, sha256=kernel.id)
        merged.setdefault((kernel.id, kernel.provider, kernel.operator), kernel)
    return tuple(merged.values())


def _rank(
    item: PlannedDevice, kernels: Sequence[BuiltKernel | None], failures: Sequence[Failure]
) -> tuple[tuple[ProblemRanking, ...], tuple[Unserved, ...]]:
    """Ranks each problem's kernels; lists declared problems for which no kernel compiled.

    Skips an undeclared problem unless one of its measured kernels compiled.
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
                # Different operators can give the same code; the better rank counts.
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
                    device=item.target.device.name,
                    problem=planned.problem,
                    reason=one_line(f"{_none_compiles_text(len(missing))}: {reasons}"),
                    failed=True,
                )
            )
    return tuple(rankings), tuple(uncompiled)


def _none_compiles_text(operators: int) -> str:
    return (
        "its one operator does not compile"
        if operators == 1
        else f"none of {count_text(operators, 'operator')} compiles"
    )


def _failure_texts(failures: Sequence[Failure]) -> list[str]:
    """Returns each reason once, after its first operator and the provider."""
    operators: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        candidate = failure.task.candidate
        reason = failure.own_reason or _NO_REASON
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
