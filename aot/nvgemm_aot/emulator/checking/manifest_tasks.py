"""Kernels to emulate: those of a manifest's build, or a provider's for every signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import TargetName
from nvgemm_runtime.matching.device import host_platform

from ...bundle.content import BuiltKernel
from ...manifest.parse import load_manifest
from ...manifest.shipped_manifests import find_manifest
from ...pipeline.cache_entries.ptx_store import read_ptx
from ...pipeline.compiler import Failure, Progress, Task, compile_all, make_tasks
from ...pipeline.pipeline import plan_build
from ...providers import load_provider
from ...storage.build_cache import Cache
from ...targets import build_target
from .every_signature import EVERY_SIGNATURE
from .kernel_check import KernelTask
from .small_problems import small_problems


@dataclass(frozen=True, kw_only=True)
class PlannedKernel:
    """A kernel to compile and emulate, with the problems that its manifest declares."""

    task: Task
    declared: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PreparedKernels:
    """Compiled kernels to emulate, and those that do not compile."""

    tasks: tuple[KernelTask, ...]
    failures: tuple[Failure, ...]


def manifest_kernels(
    path: Path, cache: Cache, provider: str | None = None
) -> tuple[PlannedKernel, ...]:
    """Plans the kernels that a manifest's build holds, for targets with this machine's host code.

    Args:
        path: Manifest file, or name of a shipped one.
        cache: Build cache.
        provider: Provider that replaces the manifest's; None to use these.

    Raises:
        TargetError: If no target has this machine's host code.
        ManifestError, ToolchainError: As for a build.
    """
    manifest = load_manifest(find_manifest(path))
    source = None if provider is None else load_provider(provider)
    platform = host_platform()
    planned: dict[str, PlannedKernel] = {}
    targets = [target.target.key for target in manifest.targets]
    if all(target.target.platform != platform for target in manifest.targets):
        raise TargetError(
            f"{path}: emulation executes kernels' host code, and no target is for {platform} "
            f"(targets: {', '.join(targets)}); add one"
        )
    for item in plan_build(manifest, cache, provider=source):
        if item.target.target.platform != platform:
            continue
        for device in item.devices:
            for index, task in enumerate(device.tasks):
                problems = (
                    one.problem
                    for one in device.plan.problems
                    if one.is_declared and index in {number for number, _ in one.choices}
                )
                planned.setdefault(task.key, PlannedKernel(task=task, declared=tuple(problems)))
    return tuple(planned.values())


def provider_kernels(
    name: str, target: TargetName, *, most: int, progress: Progress | None = None
) -> tuple[PlannedKernel, ...]:
    """Plans a provider's most preferred kernels for every signature that it serves on a target.

    Args:
        name: Provider's name, or ``module:class``.
        target: Target.
        most: Most kernels for a signature.
        progress: Called after each signature.

    Raises:
        TargetError: If the target has another platform's host code.
        ToolchainError: If the provider does not exist, or misses a package.
    """
    provider = load_provider(name)
    platform = host_platform()
    if target.platform not in (None, platform):
        raise TargetError(
            f"target {target}: emulation executes kernels' host code, here for {platform} alone"
        )
    built = build_target(target.arch, platform=platform, **_cuda(target))
    planned: list[PlannedKernel] = []
    for number, signature in enumerate(EVERY_SIGNATURE, start=1):
        candidates = provider.enumerate(signature, built).candidates
        first = sorted(candidates, key=lambda one: (one.preference, one.operator))[:most]
        planned += (PlannedKernel(task=task) for task in make_tasks(first, built, provider))
        if progress is not None:
            progress(number, len(EVERY_SIGNATURE))
    return tuple(planned)


def _cuda(target: TargetName) -> Mapping[str, str]:
    return {} if target.cuda is None else {"cuda": target.cuda}


def prepare(
    planned: Sequence[PlannedKernel],
    cache: Cache,
    *,
    jobs: int,
    seeds: tuple[int, ...],
    declared_sizes: bool = False,
    progress: Progress | None = None,
) -> PreparedKernels:
    """Compiles kernels with their PTX kept.

    Args:
        planned: Kernels.
        cache: Build cache.
        jobs: Number of compiler processes.
        seeds: Seeds for each problem.
        declared_sizes: True for the declared problems instead of small ones.
        progress: Called after each compilation.

    Raises:
        StorageError, ToolchainError: As `compile_all`.
    """
    tasks = [replace(one.task, keeps_ptx=True) for one in planned]
    compiled = compile_all(tasks, cache, jobs=jobs, progress=progress)
    prepared = []
    for one in planned:
        entry = compiled.kernels.get(one.task.key)
        if entry is None:
            continue
        ptx = read_ptx(one.task.key, cache)
        assert ptx is not None  # `compile_all` has stored it
        kernel = BuiltKernel(
            **one.task.candidate.facts(), payload=entry.payload, sha256=entry.sha256
        )
        prepared.append(
            KernelTask(
                kernel=kernel,
                ptx=ptx,
                target=one.task.target.target,
                device=one.task.target.device.name,
                problems=one.declared if declared_sizes else small_problems(kernel),
                seeds=seeds,
            )
        )
    return PreparedKernels(tasks=tuple(prepared), failures=compiled.failures)
