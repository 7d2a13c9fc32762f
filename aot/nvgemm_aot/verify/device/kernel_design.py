"""Checks a kernel's design against its launch, device code, operator name and GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel, KernelDesign
from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES
from nvgemm_runtime.errors import TargetError
from nvgemm_runtime.gemm.target import MMA_BY_MAJOR
from nvgemm_runtime.gemm.types import Mma

from ...providers.base import CLC, DYNAMIC_PERSISTENT, ONE_TILE, SCHEDULERS, STATIC_PERSISTENT
from ...targets.profile import DeviceProfile, basis_of_limit
from ..findings import Check, Finding
from .cubin import Cubin, DeviceKernel

COUNTER_BYTES = 4
PARTIAL_BYTES = 4
"""Bytes per element in a tile's partial result, in kernels that split k. `COUNTER_BYTES` is the
size of a tile's counter."""

KNOWN_PROVIDERS = frozenset({"cutlass_operators", "gathered", "quack"})
"""Known providers: operator names state the tile, device functions name their family, and kernels
show all evidence that `verify` needs."""

_TRANSPOSING_PROVIDER = "cutlass_operators"
"""Provider whose kernels with scheduler ``one_tile`` all compute the transposed problem."""

_PERSISTENT = (DYNAMIC_PERSISTENT, STATIC_PERSISTENT)
"""Schedulers whose grid has as many clusters as the device runs at once."""

_TILE = re.compile(r"_tile[0-9]+x[0-9]+x([0-9]+)")
"""Tile in these providers' operator names, e.g. ``…_cluster4x1x1_tile256x256x64``."""

_ONE_TILE_FAMILIES = ("TgvGemmKernel", "gathered_mm_kernel")
"""Substrings in device function names for families with scheduler ``one_tile``."""


def computes_transposed(design: KernelDesign, provider: str) -> bool:
    """Returns True if a kernel multiplies the other way round: out.T = B.T @ A.T.

    Entries older than ``swapped`` say so by their scheduler.
    """
    return design.swapped or (provider == _TRANSPOSING_PROVIDER and design.scheduler == ONE_TILE)


def check_design(
    kernel: Kernel,
    cubins: tuple[Cubin, ...],
    *,
    profiles: Sequence[DeviceProfile],
    clusters: frozenset[tuple[int, int]],
) -> Iterator[Finding]:
    """Checks a design except its tile, which `sass` compares.

    ``clusters`` are the launcher's; without profiles, no numbers are compared.
    """
    design = kernel.design
    stated = _cluster_shapes(design)
    if design.swapped:
        clusters = frozenset((m, n) for n, m in clusters)
    if not clusters and not kernel.signature.a.is_operand:
        # Kernels without tensor cores are launched as blocks, that is, clusters of one.
        clusters = frozenset({(1, 1)})
    if clusters != stated:
        fault = (
            f"the launcher asks for clusters of {_shapes_text(clusters)}, its entry says "
            f"{_shapes_text(stated)}"
        )
        yield Check.CLUSTER.finding(fault) if clusters else Check.CLUSTER.unseen(fault)
    if design.scheduler not in SCHEDULERS:
        yield Check.SCHEDULER.finding(
            f"scheduler {design.scheduler!r} is none of {', '.join(SCHEDULERS)}"
        )
    for cubin in cubins:
        for function in cubin.kernels:
            yield from _check_code(kernel, cubin, function)
    if kernel.provider in KNOWN_PROVIDERS:
        yield from _check_operator(kernel, cubins)
    yield from _check_counter(kernel)
    yield from _check_splits(kernel)
    convention = parse_calling_convention(kernel.calling_convention)
    takes_clusters = convention is not None and convention.takes_clusters
    yield from _check_cluster_limits(design, profiles, takes_clusters=takes_clusters)


def _check_code(kernel: Kernel, cubin: Cubin, function: DeviceKernel) -> Iterator[Finding]:
    design = kernel.design
    if function.cluster_launch_control not in (None, design.scheduler == CLC):
        uses = "uses" if function.cluster_launch_control else "does not use"
        yield Check.SCHEDULER.finding(
            f"device code {uses} cluster launch control, its entry says scheduler "
            f"{design.scheduler}"
        )
    has_pairs = MMA_BY_MAJOR.get(cubin.sm // 10) is Mma.TCGEN05
    ctas = function.ctas_per_tile if has_pairs else 1
    if ctas is None and not kernel.signature.a.is_operand:
        ctas = 1  # no tensor core multiplies this dtype
    if ctas != design.ctas_per_tile:
        yield Check.CTAS_PER_TILE.finding(
            f"device code multiplies with {ctas or 'no single number of'} thread blocks a "
            f"tile, its entry says {design.ctas_per_tile}"
        )


def _check_operator(kernel: Kernel, cubins: tuple[Cubin, ...]) -> Iterator[Finding]:
    """Checks facts that no instruction shows: tile k, and static_persistent against one_tile."""
    stated = _TILE.search(kernel.operator)
    tile_k = kernel.design.tile[2]
    if stated is None or int(stated[1]) != tile_k:
        yield Check.OPERATOR_NAME.finding(
            f"the operator's name {kernel.operator!r} states tile k "
            f"{stated[1] if stated else 'nowhere'}, its entry says {tile_k}"
        )
    for function in (function for cubin in cubins for function in cubin.kernels):
        is_one_tile = any(family in function.name for family in _ONE_TILE_FAMILIES)
        if is_one_tile != (kernel.design.scheduler == ONE_TILE):
            yield Check.OPERATOR_NAME.finding(
                f"the device function is called {function.name[:160]}, its entry says "
                f"scheduler {kernel.design.scheduler}; {' and '.join(_ONE_TILE_FAMILIES)} have "
                f"{ONE_TILE}, and no other"
            )


def _check_counter(kernel: Kernel) -> Iterator[Finding]:
    """Checks that a dynamic schedule has a counter that is zero when the kernel begins."""
    workspace = kernel.workspace
    zeroed = 0 if workspace is None else workspace.zeroed_once + workspace.zeroed_per_tile
    if kernel.design.scheduler == DYNAMIC_PERSISTENT and zeroed < COUNTER_BYTES:
        yield Check.WORKSPACE.finding(
            f"its workspace has {zeroed} zeroed bytes; scheduler {DYNAMIC_PERSISTENT} takes tiles "
            f"from a counter of {COUNTER_BYTES}"
        )


def _check_splits(kernel: Kernel) -> Iterator[Finding]:
    """Checks that a kernel that splits k has room for each tile's counter and partial result.

    Known providers' kernels keep these. Others may keep something else, which no code shows.
    """
    design, workspace = kernel.design, kernel.workspace
    if design.splits == 1:
        return
    if workspace is None:
        yield Check.SPLITS.unseen(
            f"{design.splits} thread blocks share the k of a tile, but its workspace has no "
            "formula per tile"
        )
        return
    tile_m, tile_n = _block_tile(kernel)
    partial_bytes = PARTIAL_BYTES * tile_m * tile_n
    if workspace.tile != (tile_m, tile_n) or workspace.tiles_multiple != design.cluster:
        yield Check.WORKSPACE.unseen(
            f"its workspace is for tiles of {_extents_text(workspace.tile)}, rounded up to "
            f"{_extents_text(workspace.tiles_multiple)}; a thread block computes "
            f"{tile_m}x{tile_n} in clusters of {_extents_text(design.cluster)}"
        )
    once, per_tile = workspace.zeroed_once, workspace.zeroed_per_tile
    room = per_tile + workspace.scratch_per_tile
    # Parts added in any order are added to zeros, which follow the counters.
    zeroed = COUNTER_BYTES if kernel.is_deterministic else COUNTER_BYTES + partial_bytes
    gap = 0 if kernel.is_deterministic else ZEROED_MULTIPLE_BYTES
    if per_tile < zeroed or once < gap or room < COUNTER_BYTES + partial_bytes:
        yield Check.WORKSPACE.unseen(
            f"its workspace has {room} bytes a tile, of which {per_tile} are zeroed, plus {once} "
            f"zeroed bytes; a counter and a partial result take {COUNTER_BYTES + partial_bytes}, "
            f"of which {zeroed} must be zero, plus {gap}"
        )


def _block_tile(kernel: Kernel) -> tuple[int, int]:
    """Returns a thread block's tile, along the problem: pairs share the m of the kernel's tile."""
    (m, n, _), pair = kernel.design.tile, kernel.design.ctas_per_tile
    if computes_transposed(kernel.design, kernel.provider):
        return m, n // pair
    return m // pair, n


def _extents_text(extents: tuple[int, int]) -> str:
    return "x".join(map(str, extents))


def _check_cluster_limits(
    design: KernelDesign, profiles: Sequence[DeviceProfile], *, takes_clusters: bool
) -> Iterator[Finding]:
    shapes = _cluster_shapes(design)
    has_limits = design.scheduler in _PERSISTENT and not takes_clusters
    expected = sorted({m * n for m, n in shapes}) if has_limits else []
    observed = [limit.cluster_size for limit in design.cluster_limits]
    if observed != expected:
        yield Check.CLUSTER_LIMITS.finding(
            f"limits for clusters of {observed or 'no'} thread blocks; scheduler "
            f"{design.scheduler} with clusters of {_shapes_text(shapes)} takes {expected or 'none'}"
            f"{', because its launcher takes the number' if takes_clusters else ''}"
        )
    if takes_clusters and design.scheduler not in _PERSISTENT:
        yield Check.CLUSTER_LIMITS.finding(
            "its launcher takes the number of clusters that run at once, which scheduler "
            f"{design.scheduler} does not use"
        )
    for limit in design.cluster_limits if profiles else ():
        basis = basis_of_limit(profiles, limit.cluster_size, limit.max_active)
        if limit.basis != basis:
            facts = (_limit_text(profile, limit.cluster_size) for profile in profiles)
            least = "" if basis is None or len(profiles) == 1 else "; the least certain one counts"
            yield Check.CLUSTER_LIMITS.finding(
                f"at most {limit.max_active} clusters of {limit.cluster_size} at once "
                f"({limit.basis}); {', '.join(facts)}{least}"
            )
    if len(profiles) > 1 and not any(_has_limits(profile, design) for profile in profiles):
        yield Check.CLUSTER_LIMITS.finding("cluster limits come from several device profiles")


def _has_limits(profile: DeviceProfile, design: KernelDesign) -> bool:
    return all(
        basis_of_limit([profile], limit.cluster_size, limit.max_active) is not None
        for limit in design.cluster_limits
    )


def _limit_text(profile: DeviceProfile, cluster_size: int) -> str:
    try:
        fact = profile.cluster_capacity(cluster_size)
    except TargetError as error:
        return str(error)
    return f"{profile.name} has {fact.value} ({fact.basis})"


def _cluster_shapes(design: KernelDesign) -> frozenset[tuple[int, int]]:
    return frozenset(filter(None, (design.cluster, design.fallback_cluster)))


def _shapes_text(shapes: frozenset[tuple[int, int]]) -> str:
    return " and ".join(map(_extents_text, sorted(shapes))) or "no size"
