"""Runs a build from end to end: plans, compiles, assembles and writes a manifest's bundles."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvgemm_runtime.bundle.format import Header
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import BundleFormatError, RankingsError, SignatureError, StorageError
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.target import Target
from nvgemm_runtime.installed.ownership import writable_by_others
from nvgemm_runtime.installed.signatures import Subject, bundle_subject, read_signatures

from ..bundle.writer import write_bundle
from ..manifest.parse import Manifest
from ..providers import SEPARATOR, Provider, default_providers, load_provider
from ..rankings.entries import Rankings
from ..rankings.usable import UsableRankings
from ..storage.build_cache import Cache, private_cache
from ..storage.files import remove_file, require_writable
from ..storage.private_key import SigningKey
from ..storage.remote.remote_cache import RemoteCache
from .assemble import PlannedDevice, PlannedTarget, build_key, compile_and_assemble, toolchain
from .compiler import (
    Failure,
    KernelWorkers,
    ProcessKind,
    Progress,
    ProviderWorkers,
    make_tasks,
)
from .compiler_limits import default_jobs
from .header_size import require_readable_size
from .target_plan import (
    Plan,
    PlanLookup,
    RejectionSink,
    likely_provider,
    look_up_plan,
    make_plan,
    operator_of,
)
from .unserved import Unserved, join_products, require_served, unserved_everywhere


@dataclass(frozen=True, kw_only=True)
class BuiltBundle:
    """One bundle of a finished build.

    ``up_to_date`` is True if the file already had this build's content and was left alone.
    """

    path: Path
    header: Header
    file_bytes: int
    up_to_date: bool
    failures: tuple[Failure, ...]


@dataclass(frozen=True, kw_only=True)
class RankingSources:
    """Ranking sources for a target's problems on one product.

    Attributes:
        target: The target.
        device: Name of the product's profile.
        standings: Standing of each problem that is ranked by measured times.
        user_problems: Problems in ``standings`` that the user's own files measured. Shipped
            rankings serve the others.
        estimated: Number of problems ranked by estimates.
        notes: Measurements that are not used, with the reasons.
    """

    target: Target
    device: str
    standings: Mapping[Problem, str]
    user_problems: frozenset[Problem] = frozenset()
    estimated: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A finished build.

    Each target that serves any problem has a bundle. ``compiled`` counts the kernels compiled in
    this run; the others came from the cache. ``removed`` are bundles from earlier builds whose
    targets no longer serve any problem.
    """

    bundles: tuple[BuiltBundle, ...]
    compiled: int
    unserved: tuple[Unserved, ...]
    removed: tuple[Path, ...] = ()
    measured: tuple[RankingSources, ...] = ()


def provider_of(manifest: Manifest) -> Provider:
    """Creates the provider for a manifest's kernels, combining several into one.

    Without names in the manifest, uses all providers that come with the builder; see
    `default_providers`.

    Raises:
        ToolchainError: If the manifest names a provider that does not exist.
    """
    usual = default_providers(entry.problem.signature for entry in manifest.declared)
    return load_provider(SEPARATOR.join(manifest.providers or usual))


def look_up_plans(
    manifest: Manifest,
    cache: Cache,
    provider: Provider,
    rankings: Rankings | None = None,
    remote: RemoteCache | None = None,
) -> tuple[PlanLookup, ...]:
    """Looks in the caches for the plan of each target and product of a manifest.

    See `target_plan.look_up_plan`.
    """
    gpus: dict[Target, set[str]] = {}
    for target in manifest.targets:
        gpus.setdefault(target.target, set()).add(target.device.driver_name)
    return tuple(
        look_up_plan(
            manifest.declared,
            target,
            provider,
            cache,
            rankings,
            other_gpus=gpus[target.target] - {target.device.driver_name},
            remote=remote,
        )
        for target in manifest.targets
    )


def plan_build(
    manifest: Manifest,
    cache: Cache,
    *,
    provider: Provider | None = None,
    lookups: Sequence[PlanLookup] | None = None,
    on_rejection: RejectionSink | None = None,
    rankings: Rankings | None = None,
    prunes: bool = False,
    remote: RemoteCache | None = None,
) -> tuple[PlannedTarget, ...]:
    """Plans every target of a manifest; see `target_plan.make_plan`.

    Problems for which a target has no operator are in its plan, with the reason.

    ``provider`` replaces the manifest's providers. ``lookups`` is the result of `look_up_plans` for
    ``rankings``, if the caller already has it. Every rejection goes to ``on_rejection``. New plans
    go to ``remote``, and plans that it has are not made.

    Raises:
        ManifestError: If a target's bundle would be too large for readers.
        ToolchainError: If the builder is incomplete.
    """
    source = provider or provider_of(manifest)
    # Before the linker is looked for: without the builder installed, that is the reason to report.
    plan_lookups = lookups or look_up_plans(manifest, cache, source, rankings, remote)
    planned = []
    for target in manifest.bundle_targets:
        versions = toolchain(source, target)
        devices = [
            _plan_device(lookup, cache, on_rejection, remote)
            for lookup in plan_lookups
            if lookup.target.target == target
        ]
        first, *further = devices
        require_readable_size(
            manifest.name, target, first.plan, [device.plan for device in further]
        )
        item = PlannedTarget(
            target=first.target,
            plan=first.plan,
            tasks=first.tasks,
            measured=first.measured,
            further=tuple(further),
            missing=0,
            toolchain=versions,
            build_key=build_key(
                first.target,
                first.plan,
                first.tasks,
                versions,
                measured=first.measured,
                prunes=prunes,
                further=further,
            ),
            prunes=prunes,
        )
        missing = sum(not cache.has(task.key) for task in item.all_tasks)
        planned.append(replace(item, missing=missing))
    return tuple(planned)


def _plan_device(
    lookup: PlanLookup,
    cache: Cache,
    on_rejection: RejectionSink | None,
    remote: RemoteCache | None,
) -> PlannedDevice:
    plan = make_plan(lookup, cache, on_rejection=on_rejection, remote=remote)
    return PlannedDevice(
        target=lookup.target,
        plan=plan,
        tasks=make_tasks(plan.candidates, lookup.target, lookup.provider),
        measured=lookup.measured,
    )


def without_operator(planned: Sequence[PlannedTarget]) -> tuple[Unserved, ...]:
    """Returns the problems for which a target has no operator, on all products or on some."""
    entries: list[Unserved] = []
    for item in planned:
        unserved_problems = unserved_everywhere(
            [dict(device.plan.unserved) for device in item.devices]
        )
        unserved = (
            Unserved(
                target=item.target.target,
                device=device.target.device.name,
                problem=problem,
                reason=reason.text,
            )
            for device in item.devices
            for problem, reason in device.plan.unserved
        )
        entries += join_products(unserved, unserved_problems)
    return tuple(entries)


def build(
    manifest: Manifest,
    out_dir: Path,
    cache: Cache,
    *,
    jobs: int | None = None,
    strict: bool = False,
    provider: Provider | None = None,
    progress: Progress | None = None,
    rankings: Rankings | None = None,
    prunes: bool = False,
    remote: RemoteCache | None = None,
    executor: Callable[[Cache], KernelWorkers] | None = None,
    key: SigningKey | None = None,
) -> BuildResult:
    """Builds a manifest's bundles, one per target.

    Writes nothing to ``out_dir`` before every kernel of every target is compiled. Leaves a bundle
    alone if it already has this build's content and, if there is a key, the key's signature. If a
    target has no operator for a problem, or none that compiles, its bundle omits the problem and
    records the reason. A target that serves no problem gets no bundle, and its earlier bundle is
    removed.

    Args:
        manifest: Manifest to build.
        out_dir: Output directory for bundles named ``<manifest name>-<target>.nvgemm``.
        cache: Build cache. A cache in which others could change kernels is not used, with a
            warning.
        jobs: Number of compiler processes; by default as many as fit on this machine.
        strict: True to fail if a kernel does not compile or a target has no operator for a problem.
        provider: Kernel source; by default the manifest's providers.
        progress: Called after each kernel.
        rankings: Measured times, which replace estimates where they fit.
        prunes: True to drop kernels that win nowhere; see `keep_winners`.
        remote: Remote cache, or None.
        executor: Creates the workers that compile into the cache it gets; by default compiler
            processes on this machine.
        key: Key with which the caller signs the bundles, or None. A file that it has not signed is
            written again, because anybody can state this build's key in a header.

    Raises:
        ManifestError: If a target's bundle would be too large for readers.
        NoCandidateError: If no problem has an operator, or ``strict`` and some problem has none.
        RankingsError: If ``strict`` and none of ``rankings`` fits.
        CompileError: If no kernel compiles, or ``strict`` and some kernel does not.
        StorageError: If the cache or ``out_dir`` cannot be written.
        ToolchainError: If the builder is incomplete.
    """
    source = provider or provider_of(manifest)
    count = jobs or default_jobs()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(private_cache(cache))
        workers = executor(cache) if executor is not None else None
        lookups = look_up_plans(manifest, cache, source, rankings, remote)
        if workers is None and any(lookup.stored is None for lookup in lookups):
            # Planning takes as long as compilers take to start, so both run at once.
            workers = stack.enter_context(
                ProviderWorkers(
                    cache,
                    count,
                    ProcessKind(
                        provider=likely_provider(lookups[0]), cuda=manifest.targets[0].target.cuda
                    ),
                )
            )
        planned = plan_build(
            manifest, cache, provider=source, lookups=lookups, prunes=prunes, remote=remote
        )
        measured = ranking_sources(planned)
        if strict:
            require_rankings_used(measured, rankings)
        unserved = without_operator(planned)
        if strict:
            require_served(unserved, 1, strict=True)
        planned = tuple(item for item in planned if item.all_tasks)
        if not planned:
            require_served(unserved, len(manifest.bundle_targets))
        paths = [_bundle_path(out_dir, manifest, item.target.target) for item in planned]
        finished = {
            path: current
            for path, item in zip(paths, planned)
            if (current := _open_up_to_date(path, item.build_key, key)) is not None
        }
        pending = [(path, item) for path, item in zip(paths, planned) if path not in finished]
        if pending:
            require_writable(out_dir)
        assembly = compile_and_assemble(
            [item for _, item in pending],
            cache,
            jobs=count,
            strict=strict,
            progress=progress,
            workers=workers,
            remote=remote,
        )
    unserved += tuple(problem for bundle in assembly.bundles for problem in bundle.uncompiled)
    if not finished and not any(bundle.content for bundle in assembly.bundles):
        require_served(unserved, len(manifest.bundle_targets))
    for (path, _), bundle in zip(pending, assembly.bundles):
        if bundle.content is None:
            continue
        header = write_bundle(path, bundle.content)
        finished[path] = BuiltBundle(
            path=path,
            header=header,
            file_bytes=path.stat().st_size,
            up_to_date=False,
            failures=bundle.failures,
        )
    all_paths = [_bundle_path(out_dir, manifest, target) for target in manifest.bundle_targets]
    return BuildResult(
        bundles=tuple(finished[path] for path in paths if path in finished),
        compiled=assembly.compiled,
        unserved=tuple(
            sorted(unserved, key=lambda entry: (entry.target, entry.problem, entry.where))
        ),
        removed=tuple(path for path in all_paths if path not in paths and remove_file(path)),
        measured=measured,
    )


def ranking_sources(planned: Sequence[PlannedTarget]) -> tuple[RankingSources, ...]:
    """Returns the ranking sources of each target's problems, product by product."""
    return tuple(
        _measured_target(target.target.target, item)
        for target in planned
        for item in target.devices
    )


def _measured_target(target: Target, item: PlannedDevice) -> RankingSources:
    device, problems = item.target.device.name, len(item.plan.problems)
    if item.measured is None:
        return RankingSources(target=target, device=device, standings={}, estimated=problems)
    standings = _standings(item.plan, item.measured)
    return RankingSources(
        target=target,
        device=device,
        standings=standings,
        user_problems=item.measured.user_problems & standings.keys(),
        estimated=problems - len(standings),
        notes=(*item.measured.notes, *_unoffered_notes(item.plan)),
    )


def _standings(plan: Plan, measured: UsableRankings) -> dict[Problem, str]:
    """Returns the standings of problems for which the plan has a measured operator."""
    operators = [operator_of(candidate) for candidate in plan.candidates]
    standings = {}
    for planned in plan.problems:
        usable = measured.problems.get(planned.problem)
        if usable is None:
            continue
        if not {*usable.operators}.isdisjoint(operators[index] for index, _ in planned.choices):
            standings[planned.problem] = usable.assessment.standing
    return standings


def _unoffered_notes(plan: Plan) -> list[str]:
    counts = Counter(operator.provider for operator in plan.unoffered)
    return [
        f"{count} operator{'s are' if count > 1 else ' is'} not offered by this provider, "
        f"{provider}, so {'their' if count > 1 else 'its'} times are not used: measure a bundle of "
        "this build"
        for provider, count in sorted(counts.items())
    ]


def require_rankings_used(measured: Sequence[RankingSources], rankings: Rankings | None) -> None:
    """Requires, for ``--strict``, that the user's rankings, if any, serve a problem of some target.

    Raises:
        RankingsError: If they serve none, with the reasons.
    """
    is_given = rankings is not None and any(not entry.is_shipped for entry in rankings.entries)
    if not is_given or any(target.user_problems for target in measured):
        return
    notes = [note for target in measured for note in target.notes]
    reason = "; ".join(dict.fromkeys(notes)) or "none is for a problem that the manifest declares"
    raise RankingsError(f"none of the rankings fits the build (--strict): {reason}")


def _bundle_path(out_dir: Path, manifest: Manifest, target: Target) -> Path:
    return out_dir / f"{manifest.name}-{target.key}.nvgemm"


def _open_up_to_date(path: Path, build_key: str, signer: SigningKey | None) -> BuiltBundle | None:
    """Opens a bundle if it is intact, has this build key, and only this user can write it.

    With a signer, its signature must be beside it.
    """
    try:
        if writable_by_others(path.absolute()) is not None:
            return None
        with Bundle(path) as bundle:
            if bundle.header.build_key != build_key:
                return None
            if signer is not None and not _is_signed(path, bundle_subject(bundle.prefix), signer):
                return None
            bundle.check_body()
            return BuiltBundle(
                path=path,
                header=bundle.header,
                file_bytes=bundle.file_bytes,
                up_to_date=True,
                failures=(),
            )
    except (OSError, StorageError, BundleFormatError, SignatureError):
        return None


def _is_signed(path: Path, subject: Subject, signer: SigningKey) -> bool:
    """Tells if the signer's signature of a subject is beside a file."""
    return any(one.key_id == signer.id and one.is_for(subject) for one in read_signatures(path))
