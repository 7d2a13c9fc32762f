"""Builds bundles with every kernel that providers list for a signature."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.manifest.parse import Manifest
from nvgemm_aot.pipeline.assemble import (
    PlannedTarget,
    build_key,
    compile_and_assemble,
    toolchain,
)
from nvgemm_aot.pipeline.compiler import Progress, make_tasks
from nvgemm_aot.pipeline.compiler_limits import default_jobs
from nvgemm_aot.pipeline.pipeline import provider_of
from nvgemm_aot.pipeline.target_plan import Plan, PlannedProblem
from nvgemm_aot.providers import Provider
from nvgemm_aot.storage.build_cache import Cache, private_cache
from nvgemm_aot.targets import BuildTarget
from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.ranking_entries import ESTIMATE, RankingSource
from nvgemm_runtime.gemm.roles import misalignment_reason


def build_every_kernel(
    manifest: Manifest, path: Path, cache: Cache, *, jobs: int | None, progress: Progress | None
) -> tuple[Header, tuple[str, ...]]:
    """Builds a bundle whose problems rank all kernels that can run them.

    Of several products of the target, it is for the first.

    Returns:
        The header, and a line for each kernel that did not compile.
    """
    if len(manifest.bundle_targets) != 1:
        raise click.ClickException(f"{manifest.name}: must have one target")
    target = manifest.targets[0]
    provider = provider_of(manifest)
    plan = _plan(manifest, provider, target)
    versions = toolchain(provider, target.target)
    tasks = make_tasks(plan.candidates, target, provider)
    planned = PlannedTarget(
        target=target,
        plan=plan,
        tasks=tasks,
        missing=len(tasks),
        toolchain=versions,
        build_key=build_key(target, plan, tasks, versions),
    )
    with contextlib.ExitStack() as stack:
        private = stack.enter_context(private_cache(cache))
        [made] = compile_and_assemble(
            [planned], private, jobs=jobs or default_jobs(), progress=progress
        ).bundles
    if made.content is None:
        raise click.ClickException(f"{manifest.name}: no kernel compiles")
    lost = tuple(f"{one.task.candidate.operator}: {one.reason}" for one in made.failures)
    return write_bundle(path, made.content), lost


def _plan(manifest: Manifest, provider: Provider, target: BuildTarget) -> Plan:
    problems = [one.problem for one in manifest.declared]
    signatures = sorted({one.signature for one in problems})
    candidates = tuple(
        one for signature in signatures for one in provider.enumerate(signature, target).candidates
    )
    return Plan(
        candidates=candidates,
        problems=tuple(
            PlannedProblem(
                problem=problem,
                choices=tuple(
                    (place, None)
                    for place, one in enumerate(candidates)
                    if one.signature == problem.signature
                    and misalignment_reason(problem, one.alignment_bytes) is None
                ),
            )
            for problem in problems
        ),
        unserved=(),
        source=RankingSource(
            kind=ESTIMATE, by="benchmarks.estimates", gpu=target.device.driver_name
        ),
    )
