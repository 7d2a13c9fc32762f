"""Selects designs of quack's dense GEMM for an architecture and a signature.

Most designs come from quack's own autotuner. The narrow ones, and some in-between widths, are not
in its list, but its kernels accept them. With operands swapped, they compute a small m, or one that
is no power of two, with few wasted rows. On Hopper, fp8 kernels accumulate in two levels, as exact
as fp32, which doubles their registers. Their tiles are smaller, because those for 16-bit types
would spill.

A static schedule assigns tiles to clusters; on Blackwell, the hardware does (cluster launch
control). For large problems on Hopper, a few designs also have a dynamic schedule: a counter in the
workspace hands out tiles. A cluster that falls behind, because other work shares the GPU or its
loads arrive late, leaves its next tile to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES, TileWorkspace
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

from .families import SM90, SM100, MmaFamily, family_of


@dataclass(frozen=True, kw_only=True)
class Design:
    """GEMM specialisation, in the kernel's own orientation.

    Attributes:
        tile: Tile extents (m, n) for one thread block, or for a pair that shares instructions.
        cluster: Thread blocks per cluster along (m, n).
        pingpong: True if two warp groups compute a tile each, instead of sharing one. Hopper only.
        swapped: True if the kernel computes the transposed problem: its m is the problem's n.
        tile_k_blocks: Tile extent along k in rows of 128 bytes, by default the library's choice.
        splits: Thread blocks that share the k of one tile. Each adds its part to a partial result
            in the workspace; the last one adds its own and writes the tile.
        in_any_order: True if they add in arrival order instead of a fixed order. Results then
            depend on timing.
        dynamic: True if clusters take all tiles after their first from a counter. One cluster still
            computes a whole tile, so results do not depend on the assignment. Hopper only.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool = False
    swapped: bool = False
    tile_k_blocks: int = 1
    splits: int = 1
    in_any_order: bool = False
    dynamic: bool = False

    @property
    def has_workspace(self) -> bool:
        """True if thread blocks share memory besides the operands."""
        return self.splits > 1 or self.dynamic

    def tile_k(self, dtype: DType) -> int:
        """Returns the tile's extent along k for an operand dtype."""
        return self.tile_k_blocks * 8 * 128 // dtype.bits

    def block_tile(self, arch: str) -> tuple[int, int]:
        """Returns the extents (m, n) that one thread block computes."""
        m, n = self.tile
        return m // self.ctas_per_tile(arch), n

    def ctas_per_tile(self, arch: str) -> int:
        """Returns 2 if pairs of thread blocks issue one instruction: quack's own rule."""
        can_pair = self.cluster[0] % 2 == 0 and self.tile[0] in (128, 256)
        return 2 if can_pair and family_of(arch).has_cta_pairs else 1

    @property
    def sums_of_a_thread(self) -> int:
        """Accumulators per thread on Hopper: quack's own rule."""
        m, n = self.tile
        warp_groups = 1 if self.pingpong else 3 if m == 192 and n <= 128 else min(m // 64, 2)
        return m * n // (128 * warp_groups)


_HOPPER_SHARED = (*product((256,), (128, 160, 192, 208)), (128, 224), (128, 256))
_HOPPER_PINGPONG = (*product((128,), (128, 160, 192, 208)), (192, 128))
_HOPPER_UNCLUSTERED = (((256, 128), False), ((128, 256), False), ((128, 192), True))
_HOPPER_MIDDLE = (((64, 128), False), ((64, 256), False), ((128, 64), True), ((64, 128), True))
_HOPPER_NARROW = tuple(product((64, 128), (16, 32, 64)))

_HOPPER_BETWEEN = tuple(
    Design(tile=(rows, width), cluster=cluster, swapped=True, tile_k_blocks=blocks)
    for rows, cluster, blocks, widths in (
        (64, (1, 1), 1, (208,)),
        (64, (1, 1), 2, (48, 80)),
        (64, (1, 2), 1, (48, 80, 96, 112, 160)),
        (64, (1, 2), 2, (48, 80)),
        (128, (1, 1), 1, (160, 176, 192, 208, 240)),
        (128, (1, 1), 2, (80,)),
        (128, (1, 2), 1, (80, 112)),
        (128, (2, 1), 1, (96, 240)),
        (256, (1, 2), 1, (144,)),
        (256, (2, 1), 1, (144,)),
    )
    for width in widths
)
"""For an m that is no power of two, where other tiles would compute up to twice the rows.

Chosen greedily among 162 swapped designs that an H200 timed on 51 problems, by their gain over the
designs listed above. A cluster of (1, 2) loads the weights once for two tiles along the problem's
m. The library accepts only widths that are multiples of 16; a tile of 256 x 224 spills registers.
"""

_HOPPER_ONE_WAVE = (
    Design(tile=(64, 80), cluster=(2, 1)),
    Design(tile=(128, 80), cluster=(2, 1)),
    Design(tile=(128, 80), cluster=(1, 2)),
    Design(tile=(128, 96), cluster=(2, 1)),
)
"""Tiles with 80 and 96 columns, which divide an n of 5120 or 6144 into about one wave of 132 thread
blocks.

Chosen greedily among 38 designs that an H200 timed for plain bf16 GEMMs, by their gain over the
designs listed above (``benchmarks/results/raw/*few-tiles*``). Offered for all 16-bit types
and all epilogues except gates; not for groups.
"""

_HOPPER_DYNAMIC = tuple(
    Design(tile=tile, cluster=(2, 1), pingpong=pingpong, swapped=swapped, dynamic=True)
    for swapped in (False, True)
    for pingpong, tiles in (
        (False, ((256, 128), (256, 192), (128, 256))),
        (True, ((128, 192), (128, 208), (192, 128))),
    )
    for tile in tiles
)
"""Dynamic schedules, besides static ones with the same tiles, that won most often at a large m."""

_HOPPER_FP8_DYNAMIC = tuple(
    Design(tile=tile, cluster=(2, 1), swapped=swapped, dynamic=True)
    for swapped in (False, True)
    for tile in ((128, 192), (192, 128), (256, 96))
)
"""Dynamic schedules, besides static ones with the same tiles, for the largest tiles."""

_HOPPER_SPLIT = (
    *(
        Design(tile=tile, cluster=(1, 1), swapped=True, tile_k_blocks=blocks, splits=splits)
        for tile, blocks in (((64, 16), 2), ((64, 16), 4), ((64, 32), 2), ((64, 64), 1))
        for splits in (2, 4)
    ),
    Design(tile=(64, 16), cluster=(1, 1), swapped=True, tile_k_blocks=2, splits=8),
    *(
        Design(tile=(128, 16), cluster=(1, 1), swapped=True, pingpong=True, splits=splits)
        for splits in (2, 4)
    ),
    *(Design(tile=(128, 128), cluster=(1, 1), splits=splits) for splits in (2, 4)),
)
"""For a large k with so few tiles that multiprocessors would idle: small and medium batches."""

_HOPPER_SPLIT_LARGE = tuple(
    Design(tile=(128, 192), cluster=(2, 1), pingpong=True, splits=splits) for splits in (2, 4)
)
"""Only without an epilogue, because some spill with one."""

_HOPPER_SPLIT_IN_ANY_ORDER = (
    *(
        Design(
            tile=tile,
            cluster=cluster,
            swapped=True,
            tile_k_blocks=blocks,
            splits=splits,
            in_any_order=True,
        )
        for tile, cluster, blocks, every in (
            ((64, 16), (1, 1), 2, (4, 8, 16)),
            ((64, 32), (1, 1), 2, (8,)),
            ((64, 64), (1, 1), 2, (6, 8, 16)),
            ((64, 64), (1, 2), 2, (4, 8)),
            ((128, 64), (1, 2), 1, (4, 6, 8)),
        )
        for splits in every
    ),
    Design(tile=(128, 128), cluster=(1, 1), splits=4, in_any_order=True),
    *(
        Design(tile=(128, 128), cluster=(2, 1), splits=splits, in_any_order=True)
        for splits in (4, 8)
    ),
)
"""Splits that add in any order, at least four. With two, the order does not matter. Only without an
epilogue.

Chosen like `_HOPPER_ONE_WAVE`, among 98 splits. Added in any order, many parts do not wait for each
other. A cluster loads shared data once, which matters if tiles are few.
"""

_HOPPER_FP8_SHARED = (*product((128,), (128, 160, 192)), (192, 128), (256, 96))
_HOPPER_FP8_PINGPONG = ((64, 128), (64, 192), (128, 96))
_HOPPER_FP8_SPLIT = (
    *(
        Design(tile=tile, cluster=(1, 1), swapped=True, tile_k_blocks=2, splits=splits)
        for tile in ((64, 16), (64, 32))
        for splits in (2, 4)
    ),
    *(Design(tile=(128, 128), cluster=(1, 1), splits=splits) for splits in (2, 4)),
)

_BLACKWELL_WIDTHS = (64, 128, 160, 192, 224, 256)
_BLACKWELL_NARROW = (16, 32, 64)

_BLACKWELL_SPLIT = (
    *(
        Design(tile=(128, width), cluster=(1, 1), swapped=True, splits=splits)
        for width in _BLACKWELL_NARROW
        for splits in (2, 4)
    ),
    *(Design(tile=(128, 128), cluster=(1, 1), splits=splits) for splits in (2, 4)),
    Design(tile=(256, 128), cluster=(2, 1), splits=2),
)


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """Returns the designs for a signature on an architecture, in a fixed order.

    Raises:
        TargetError: If the library has no kernels for the architecture.
    """
    return _BY_FAMILY[family_of(arch)](signature)


def _sm90_designs(signature: Signature) -> tuple[Design, ...]:
    if signature.a.is_fp8:
        return (*_hopper_fp8(), *_HOPPER_FP8_DYNAMIC, *_HOPPER_FP8_SPLIT)
    if signature.epilogue is None:
        split = (*_HOPPER_SPLIT, *_HOPPER_SPLIT_LARGE, *_HOPPER_SPLIT_IN_ANY_ORDER)
    else:
        split = _HOPPER_SPLIT
    is_dense = signature.op in (Op.MM, Op.BMM) and not signature.is_gated
    one_wave = _HOPPER_ONE_WAVE if is_dense else ()
    return (*_hopper(), *_HOPPER_BETWEEN, *one_wave, *_HOPPER_DYNAMIC, *split)


def _sm100_designs(_: Signature) -> tuple[Design, ...]:
    return (*_blackwell(), *_BLACKWELL_SPLIT)


_BY_FAMILY: dict[MmaFamily, Callable[[Signature], tuple[Design, ...]]] = {
    SM90: _sm90_designs,
    SM100: _sm100_designs,
}


FLAG_BYTES = 4
"""Counter size: one per tile, for the number of finished parts, or one per schedule."""

PARTIAL_BYTES = 4
"""Element size in partial results: fp32."""


def workspace_of(design: Design, arch: str) -> TileWorkspace | None:
    """Returns the memory that a design's thread blocks share.

    A dynamic schedule has one counter, whatever the sizes. A split of k has a counter and a partial
    result for each thread block's tile. The first part stores its sums and the others add to them,
    so only counters must be zero. In any order, all parts add, so partial results must be zero too.
    They begin at a multiple of `ZEROED_MULTIPLE_BYTES` after the counters, for which that many
    extra bytes are reserved.
    """
    if not design.has_workspace:
        return None
    (m, n), cluster = design.block_tile(arch), design.cluster
    tile, multiple = ((n, m), cluster[::-1]) if design.swapped else ((m, n), cluster)
    if design.dynamic:
        return TileWorkspace(
            tile=tile,
            tiles_multiple=multiple,
            zeroed_once=FLAG_BYTES,
            zeroed_per_tile=0,
            scratch_per_tile=0,
        )
    partial_bytes = PARTIAL_BYTES * m * n
    return TileWorkspace(
        tile=tile,
        tiles_multiple=multiple,
        zeroed_once=ZEROED_MULTIPLE_BYTES if design.in_any_order else 0,
        zeroed_per_tile=FLAG_BYTES + (partial_bytes if design.in_any_order else 0),
        scratch_per_tile=0 if design.in_any_order else partial_bytes,
    )


def _hopper() -> Iterator[Design]:
    for swapped in (False, True):
        for pingpong, tiles in ((False, _HOPPER_SHARED), (True, _HOPPER_PINGPONG)):
            for tile, cluster in product(tiles, ((1, 2), (2, 1))):
                yield Design(tile=tile, cluster=cluster, pingpong=pingpong, swapped=swapped)
        for tile, pingpong in _HOPPER_UNCLUSTERED:
            yield Design(tile=tile, cluster=(1, 1), pingpong=pingpong, swapped=swapped)
    for tile, pingpong in _HOPPER_MIDDLE:
        yield Design(tile=tile, cluster=(1, 1), pingpong=pingpong)
    yield from _hopper_narrow()


def _hopper_fp8() -> Iterator[Design]:
    for swapped in (False, True):
        for tile, cluster in product(_HOPPER_FP8_SHARED, ((1, 1), (1, 2), (2, 1))):
            yield Design(tile=tile, cluster=cluster, swapped=swapped)
        for tile in _HOPPER_FP8_PINGPONG:
            yield Design(tile=tile, cluster=(1, 1), pingpong=True, swapped=swapped)
    yield from _hopper_narrow()


def _hopper_narrow() -> Iterator[Design]:
    for tile, pingpong in product(_HOPPER_NARROW, (False, True)):
        yield Design(tile=tile, cluster=(1, 1), pingpong=pingpong, swapped=True)
    for tile in _HOPPER_NARROW:
        yield Design(tile=tile, cluster=(1, 1), swapped=True, tile_k_blocks=2)
    yield Design(tile=(64, 16), cluster=(1, 1), swapped=True, tile_k_blocks=4)


def _blackwell() -> Iterator[Design]:
    for swapped in (False, True):
        for width in _BLACKWELL_WIDTHS:
            for m, cluster in ((128, (1, 1)), (128, (2, 1)), (256, (2, 1))):
                yield Design(tile=(m, width), cluster=cluster, swapped=swapped)
    for width in _BLACKWELL_NARROW[:2]:
        yield Design(tile=(128, width), cluster=(1, 1), swapped=True)
