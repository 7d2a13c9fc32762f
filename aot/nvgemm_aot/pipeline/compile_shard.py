"""Compiles one shard of a manifest's kernels into the cache, for builds over several machines."""

from __future__ import annotations

from dataclasses import dataclass

from ..manifest.parse import Manifest
from ..providers import Provider
from ..rankings.entries import Rankings
from ..storage.build_cache import Cache, require_private
from ..storage.remote.remote_cache import RemoteCache
from .assemble import require_no_failures
from .compiler import Failure, Progress, compile_all, group_by_device_code
from .compiler_limits import default_jobs
from .pipeline import plan_build, ranking_sources, require_rankings_used, without_operator
from .shard import Shard
from .unserved import Unserved, require_served


@dataclass(frozen=True, kw_only=True)
class CompiledShard:
    """Result of `compile_shard`.

    Attributes:
        shard: The shard.
        kernels: Number of kernels in this shard.
        all_kernels: Number of kernels in all shards.
        compiled: Number of kernels compiled now; the cache had the others.
        failures: Kernels that did not compile.
        unserved: Problems for which a target has no operator.
    """

    shard: Shard
    kernels: int
    all_kernels: int
    compiled: int
    failures: tuple[Failure, ...]
    unserved: tuple[Unserved, ...]


def compile_shard(
    manifest: Manifest,
    cache: Cache,
    shard: Shard,
    *,
    jobs: int | None = None,
    strict: bool = False,
    provider: Provider | None = None,
    progress: Progress | None = None,
    rankings: Rankings | None = None,
    remote: RemoteCache | None = None,
) -> CompiledShard:
    """Compiles one shard of a manifest's kernels into the cache, and writes no bundle.

    The whole plan is dealt out, whatever the cache has, so machines with the same toolchain,
    manifest and rankings agree on the shards. A build that has the cache entries of all shards
    compiles only what failed in one.

    Args:
        manifest: Manifest to compile.
        cache: Build cache, which keeps the kernels.
        shard: The shard to compile.
        jobs: Number of compiler processes; by default as many as fit on this machine.
        strict: True to fail if a kernel does not compile or a target has no operator for a problem.
        provider: Kernel source; by default the manifest's providers.
        progress: Called after each kernel.
        rankings: Measured times, which replace estimates where they fit.
        remote: Remote cache, or None.

    Raises:
        StorageError: If others could change the cache's kernels, or it cannot be written.
        NvgemmError: As `pipeline.build`.
    """
    require_private(cache)
    planned = plan_build(manifest, cache, provider=provider, rankings=rankings, remote=remote)
    if strict:
        require_rankings_used(ranking_sources(planned), rankings)
    unserved = without_operator(planned)
    require_served(unserved, len(manifest.bundle_targets), strict=strict)
    tasks = {task.key: task for item in planned for task in item.all_tasks}
    mine = [task for group in shard.of(group_by_device_code(tasks.values())) for task in group]
    compilation = compile_all(
        mine, cache, jobs=jobs or default_jobs(), progress=progress, remote=remote
    )
    if strict:
        require_no_failures(f"shard {shard}", compilation.failures)
    return CompiledShard(
        shard=shard,
        kernels=len(mine),
        all_kernels=len(tasks),
        compiled=compilation.compiled,
        failures=compilation.failures,
        unserved=unserved,
    )
