"""A kernel's design, as its entry states it, against its launch, its device code and its GPU."""

from __future__ import annotations

from collections.abc import Iterator

from nvgemm_runtime.bundle.format import ClusterLimit, KernelDesign
from nvgemm_runtime.errors import TargetError

from ..targets.profile import DeviceProfile
from .cubin import Cubin, DeviceKernel
from .findings import Check, Gap

CLC = "clc"
STATIC_PERSISTENT = "static_persistent"
ONE_TILE = "one_tile"
"""Schedulers: cluster launch control; a fixed number of blocks, each with several tiles; one block
a tile, for the transposed problem (out.T = B.T @ A.T)."""

SCHEDULERS = (CLC, ONE_TILE, STATIC_PERSISTENT)


def check_design(
    design: KernelDesign,
    cubins: tuple[Cubin, ...],
    *,
    profile: DeviceProfile | None,
    clusters: frozenset[tuple[int, int]],
) -> Iterator[Gap]:
    """Check the parts of a design that are not the tile, which `sass` compares.

    Args:
        design: As the entry states it.
        cubins: The kernel's device code.
        profile: The GPU whose numbers the build used; None to compare none.
        clusters: Cluster dimensions that the launcher asks for.

    Yields:
        What does not hold.
    """
    stated = {design.cluster} | ({design.fallback_cluster} if design.fallback_cluster else set())
    if clusters != stated:
        yield Gap(
            check=Check.CLUSTER,
            message=f"the launcher asks for clusters of {_shapes(clusters)}, its entry says "
            f"{_shapes(stated)}",
        )
    if design.scheduler not in SCHEDULERS:
        yield Gap(
            check=Check.SCHEDULER,
            message=f"scheduler {design.scheduler!r} is none of {', '.join(SCHEDULERS)}",
        )
    for cubin in cubins:
        for kernel in cubin.kernels:
            yield from _check_code(design, cubin, kernel)
    yield from _check_cluster_limits(design, profile)


def _check_code(design: KernelDesign, cubin: Cubin, kernel: DeviceKernel) -> Iterator[Gap]:
    if kernel.cluster_launch_control != (design.scheduler == CLC):
        uses = "uses" if kernel.cluster_launch_control else "does not use"
        yield Gap(
            check=Check.SCHEDULER,
            message=f"device code {uses} cluster launch control, its entry says scheduler "
            f"{design.scheduler}",
        )
    # Pairs of thread blocks came with tcgen05; code for sm_90 has no such instructions.
    ctas = 1 if cubin.sm < 100 else kernel.ctas_per_tile
    if ctas != design.ctas_per_tile:
        yield Gap(
            check=Check.CTAS_PER_TILE,
            message=f"device code multiplies with {ctas or 'no one number of'} thread blocks a "
            f"tile, its entry says {design.ctas_per_tile}",
        )


def _check_cluster_limits(design: KernelDesign, profile: DeviceProfile | None) -> Iterator[Gap]:
    shapes = [design.cluster, *([design.fallback_cluster] if design.fallback_cluster else [])]
    wanted = sorted({m * n for m, n in shapes}) if design.scheduler == STATIC_PERSISTENT else []
    observed = [limit.cluster_size for limit in design.cluster_limits]
    if observed != wanted:
        yield Gap(
            check=Check.CLUSTER_LIMITS,
            message=f"limits for clusters of {observed or 'no'} thread blocks; scheduler "
            f"{design.scheduler} with clusters of {_shapes(set(shapes))} takes {wanted or 'none'}",
        )
    if profile is None:
        return
    for limit in design.cluster_limits:
        try:
            fact = profile.cluster_capacity(limit.cluster_size)
        except TargetError as error:
            yield Gap(check=Check.CLUSTER_LIMITS, message=str(error))
            continue
        right = ClusterLimit(
            cluster_size=limit.cluster_size, max_active=fact.value, basis=fact.basis
        )
        if limit != right:
            yield Gap(
                check=Check.CLUSTER_LIMITS,
                message=f"at most {limit.max_active} clusters of {limit.cluster_size} at once "
                f"({limit.basis}); {profile.name} has {right.max_active} ({right.basis})",
            )


def _shapes(shapes: set[tuple[int, int]] | frozenset[tuple[int, int]]) -> str:
    return " and ".join(f"{m}x{n}" for m, n in sorted(shapes)) or "no size"
