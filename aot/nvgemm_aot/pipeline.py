"""The build, in a straight line: manifest, plan, compile, bundle, wheel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import zstandard

from nvgemm_runtime import __version__
from nvgemm_runtime.bundle import Bundle
from nvgemm_runtime.errors import (
    BundleFormatError,
    CompileError,
    NoCandidateError,
    StorageError,
)
from nvgemm_runtime.format import (
    FORMAT_VERSION,
    ClusterLimit,
    Header,
    KernelDesign,
    canonical_json,
    sha256_hex,
)

from . import linker
from .bundle import BuiltKernel, BundleContent, ProblemRanking, write_bundle
from .cache import Cache
from .compiler import (
    Failure,
    KernelWorkers,
    Progress,
    Task,
    compile_all,
    default_jobs,
    make_tasks,
    start_workers,
)
from .compression import SCHEME
from .manifest import Manifest
from .plan import Plan, RejectionSink, is_planned, make_plan
from .providers import Candidate, Provider, load_provider
from .storage import require_writable
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
        NoCandidateError: Naming every problem that has no candidate on a target, and why.
        ToolchainError: If the compiler side is incomplete.
    """
    source = provider or load_provider(DEFAULT_PROVIDER)
    plans = [
        make_plan(manifest.declared, target, source, cache, on_rejection=on_rejection)
        for target in manifest.targets
    ]
    _require_all_served(manifest, plans)
    planned = []
    for target, plan in zip(manifest.targets, plans):
        tasks = make_tasks(plan.candidates, target, source)
        missing = sum(not cache.has(task.key) for task in tasks)
        planned.append(PlannedTarget(target=target, plan=plan, tasks=tasks, missing=missing))
    return tuple(planned)


def _require_all_served(manifest: Manifest, plans: Sequence[Plan]) -> None:
    lines = [
        f"  {target.target.arch}: {problem.key}: {reason}"
        for target, plan in zip(manifest.targets, plans)
        for problem, reason in plan.unserved
    ]
    if lines:
        raise NoCandidateError(
            f"no operator supports {len(lines)} problems; change or remove them:\n"
            + "\n".join(lines)
        )


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
    count = jobs or default_jobs()
    with contextlib.ExitStack() as stack:
        workers: KernelWorkers | None = None
        if not all(is_planned(manifest.declared, t, source, cache) for t in manifest.targets):
            # Planning takes as long as compilers take to start: let both happen at once.
            workers = stack.enter_context(start_workers(cache, count, source.name))
        planned = plan_build(manifest, cache, provider=source)
        versions = toolchain(source)
        paths = [out_dir / f"{manifest.name}-{p.target.target.key}.nvgemm" for p in planned]
        done = {
            path: current
            for path, item in zip(paths, planned)
            if (current := _up_to_date(path, _build_key(item, item.tasks, versions))) is not None
        }
        todo = [(path, item) for path, item in zip(paths, planned) if path not in done]
        if todo:
            require_writable(out_dir)
        made = make_contents(
            [item for _, item in todo],
            cache,
            provider=source,
            jobs=count,
            strict=strict,
            progress=progress,
            workers=workers,
        )
    for (path, _), (content, failures) in zip(todo, made.contents):
        header = write_bundle(path, content)
        done[path] = BuiltBundle(
            path=path,
            header=header,
            file_bytes=path.stat().st_size,
            up_to_date=False,
            failures=failures,
        )
    return BuildResult(bundles=tuple(done[path] for path in paths), compiled=made.compiled)


@dataclass(frozen=True, kw_only=True)
class MadeContents:
    """What bundles are written from.

    Attributes:
        contents: For each target, what its bundle holds, and the kernels that did not compile.
        compiled: Kernels compiled now; all others came from the cache.
    """

    contents: tuple[tuple[BundleContent, tuple[Failure, ...]], ...]
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
        CompileError: If a problem is left without a kernel, or ``strict`` and one fails.
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


def _build_key(item: PlannedTarget, tasks: Sequence[Task], versions: dict[str, str]) -> str:
    """Digest of all that determines a bundle: equal keys, equal bytes.

    Args:
        item: The planned target.
        tasks: Those of its tasks whose kernels the bundle holds.
        versions: See `toolchain`.
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
        "source": asdict(item.plan.source),
        "kernels": [kernels.get(candidate) for candidate in item.plan.candidates],
        "rankings": [[planned.problem.key, planned.choices] for planned in item.plan.problems],
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
    versions: dict[str, str],
    cache: Cache,
    failures: Sequence[Failure],
    strict: bool,
) -> tuple[BundleContent, tuple[Failure, ...]]:
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
    content = BundleContent(
        target=item.target.target,
        device=item.target.device.name,
        generator=GENERATOR,
        build_key=_build_key(item, present, versions),
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
        rankings=_rankings(item, ids, own),
    )
    return content, own


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
