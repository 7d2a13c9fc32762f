"""The build, in a straight line: manifest, plan, compile, bundle, wheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zstandard

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import BundleFormatError, CompileError, StorageError
from nvgemm_runtime.format import (
    ClusterLimit,
    Header,
    KernelDesign,
    canonical_json,
    sha256_hex,
)

from . import linker
from .bundle import BuiltKernel, BundleContent, ProblemRanking, write_bundle
from .cache import Cache
from .compiler import Failure, Progress, Task, compile_all, default_jobs, make_tasks
from .compression import SCHEME
from .manifest import Manifest
from .plan import Plan, RejectionSink, make_plan
from .providers import Candidate, Provider, load_provider
from .targets import BuildTarget

DEFAULT_PROVIDER = "cutlass_operators"
GENERATOR = f"nvgemm-aot {__version__}"


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
class BuiltBundle:
    """One bundle of a finished build.

    Attributes:
        up_to_date: Whether the file already was what this build makes, and was left alone.
        failures: Kernels that did not compile and were left out.
    """

    path: Path
    header: Header
    file_bytes: int
    up_to_date: bool
    failures: tuple[Failure, ...]


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A finished build.

    Attributes:
        compiled: Kernels compiled now; all others came from the cache.
    """

    bundles: tuple[BuiltBundle, ...]
    compiled: int


def plan_build(
    manifest: Manifest,
    cache: Cache,
    *,
    provider: Provider | None = None,
    on_rejection: RejectionSink | None = None,
) -> tuple[PlannedTarget, ...]:
    """Plan every target of a manifest; see `plan.make_plan`.

    Raises:
        NoCandidateError: If a problem has no candidate on one of the targets.
        ToolchainError: If the compiler side is incomplete.
    """
    source = provider or load_provider(DEFAULT_PROVIDER)
    planned = []
    for target in manifest.targets:
        plan = make_plan(manifest.declared, target, source, cache, on_rejection=on_rejection)
        plan.require_all_served(target.target.arch)
        tasks = make_tasks(plan.candidates, target, source)
        missing = sum(not cache.has(task.key) for task in tasks)
        planned.append(PlannedTarget(target=target, plan=plan, tasks=tasks, missing=missing))
    return tuple(planned)


def build(
    manifest: Manifest,
    out_dir: Path,
    cache: Cache,
    *,
    jobs: int | None = None,
    strict: bool = False,
    provider: Provider | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Build the bundles of a manifest, one a target.

    Nothing is written to ``out_dir`` before every kernel of every target is there. A bundle that is
    already what the build would make is left alone.

    Args:
        manifest: What to build.
        out_dir: Where bundles go, as ``<manifest name>-<target>.nvgemm``.
        cache: Build cache.
        jobs: Compiler processes; by default what this machine carries.
        strict: Whether one kernel that does not compile fails the build.
        provider: Where kernels come from; by default ``cutlass.operators``.
        progress: Told of each compiled kernel.

    Raises:
        NoCandidateError: If a problem has no candidate.
        CompileError: If a problem is left without a kernel, or ``strict`` and one fails.
        StorageError: If the cache or ``out_dir`` cannot be written.
        ToolchainError: If the compiler side is incomplete.
    """
    source = provider or load_provider(DEFAULT_PROVIDER)
    planned = plan_build(manifest, cache, provider=source)
    toolchain = _toolchain(source)
    paths = [out_dir / f"{manifest.name}-{p.target.target.key}.nvgemm" for p in planned]
    done: dict[Path, BuiltBundle] = {}
    for path, item in zip(paths, planned):
        current = _up_to_date(path, _build_key(item, item.tasks, toolchain))
        if current is not None:
            done[path] = current
    tasks = [t for path, item in zip(paths, planned) if path not in done for t in item.tasks]
    compilation = compile_all(tasks, cache, jobs=jobs or default_jobs(), progress=progress)
    contents = {
        path: _content(item, toolchain, cache, source, compilation.failures, strict)
        for path, item in zip(paths, planned)
        if path not in done
    }
    for path, (content, failures) in contents.items():
        header = write_bundle(path, content)
        done[path] = BuiltBundle(
            path=path,
            header=header,
            file_bytes=path.stat().st_size,
            up_to_date=False,
            failures=failures,
        )
    return BuildResult(bundles=tuple(done[path] for path in paths), compiled=compilation.compiled)


def _toolchain(provider: Provider) -> dict[str, str]:
    """Versions of everything that shapes a bundle's bytes."""
    linker_name, linker_version = linker.linker_identity()
    return {
        **provider.toolchain(),
        linker_name: linker_version,
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
    }


def _build_key(item: PlannedTarget, tasks: Sequence[Task], toolchain: dict[str, str]) -> str:
    """Digest of all that determines a bundle: equal keys, equal bytes.

    Args:
        item: The planned target.
        tasks: Those of its tasks whose kernels the bundle holds.
        toolchain: See `_toolchain`.
    """
    present = {task.candidate: task.key for task in tasks}
    keys = [present.get(candidate) for candidate in item.plan.candidates]
    document = {
        "generator": GENERATOR,
        "target": item.target.target.key,
        "device": item.target.device.name,
        "toolchain": toolchain,
        "compression": SCHEME,
        "source": [item.plan.source.kind, item.plan.source.by, item.plan.source.gpu],
        "rankings": [
            [planned.problem.key, [[keys[index], time] for index, time in planned.choices]]
            for planned in item.plan.problems
        ],
    }
    return sha256_hex(canonical_json(document))


def _up_to_date(path: Path, build_key: str) -> BuiltBundle | None:
    """The bundle at ``path`` if it is intact and was made from the same inputs."""
    try:
        with Bundle(path) as bundle:
            if bundle.header.build_key != build_key:
                return None
            bundle.check_body()
            return BuiltBundle(
                path=path,
                header=bundle.header,
                file_bytes=bundle.file_bytes,
                up_to_date=True,
                failures=(),
            )
    except (StorageError, BundleFormatError):
        return None


def _content(
    item: PlannedTarget,
    toolchain: dict[str, str],
    cache: Cache,
    provider: Provider,
    failures: tuple[Failure, ...],
    strict: bool,
) -> tuple[BundleContent, tuple[Failure, ...]]:
    """Assemble one bundle from the cache, without the kernels that failed."""
    arch = item.target.target.arch
    payloads = {task.candidate: cache.get(task.key) for task in item.tasks}
    own = tuple(f for f in failures if f.candidate in payloads and payloads[f.candidate] is None)
    if own and strict:
        raise CompileError(_failure_text(f"{arch}: {len(own)} kernels failed (--strict)", own))
    present = {c: p for c, p in payloads.items() if p is not None}
    ids = {candidate: sha256_hex(payload) for candidate, payload in present.items()}
    rankings = _rankings(item, ids, own)
    content = BundleContent(
        target=item.target.target,
        device=item.target.device.name,
        generator=GENERATOR,
        build_key=_build_key(item, [t for t in item.tasks if t.candidate in present], toolchain),
        toolchain=toolchain,
        kernels=tuple(
            BuiltKernel(
                payload=payload,
                signature=candidate.signature,
                provider=candidate.provider,
                operator=candidate.operator,
                design=_final_design(candidate, item.target),
                alignment_bytes=candidate.alignment_bytes,
                workspace_bytes=candidate.workspace_bytes,
                calling_convention=provider.calling_convention,
            )
            for candidate, payload in present.items()
        ),
        rankings=rankings,
    )
    return content, own


def _rankings(
    item: PlannedTarget, ids: dict[Candidate, str], failures: tuple[Failure, ...]
) -> tuple[ProblemRanking, ...]:
    rankings, bare = [], []
    for planned in item.plan.problems:
        places: dict[str, int | None] = {}
        for index, time_ns in planned.choices:
            id_ = ids.get(item.plan.candidates[index])
            if id_ is not None:
                # Different operators can give the same code; the better place counts.
                places.setdefault(id_, time_ns)
        if not places:
            bare.append(planned.problem)
        rankings.append(
            ProblemRanking(
                problem=planned.problem, source=item.plan.source, kernels=tuple(places.items())
            )
        )
    if bare:
        problems = ", ".join(problem.key for problem in bare)
        head = f"{item.target.target.arch}: no kernel compiled for {len(bare)} problems: {problems}"
        raise CompileError(_failure_text(head, failures))
    return tuple(rankings)


def _failure_text(head: str, failures: tuple[Failure, ...]) -> str:
    return "\n".join([head, *(f"  {f.candidate.operator}: {f.reason}" for f in failures)])


def _final_design(candidate: Candidate, target: BuildTarget) -> KernelDesign:
    """The design with the numbers of the device profile that were compiled in."""
    facts = {size: target.device.cluster_capacity(size) for size in candidate.cluster_sizes}
    return replace(
        candidate.design,
        cluster_limits=tuple(
            ClusterLimit(cluster_size=size, max_active=fact.value, basis=fact.basis)
            for size, fact in sorted(facts.items())
        ),
    )
