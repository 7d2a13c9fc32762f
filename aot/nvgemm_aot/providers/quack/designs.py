"""Which designs of quack's dense GEMM are offered for an architecture and a signature.

Most are those that quack's own autotuner tries. The narrow ones, and those of widths between its
own, are not in its list, but its kernels accept them; with operands swapped, they compute a small
m, or one that is no power of two, with few wasted rows. On Hopper, kernels for fp8 keep their sums
in two levels, as exact as fp32, which takes twice the registers: their tiles are smaller, for those
of 16-bit types would spill.

Tiles reach clusters by a static schedule, on Blackwell by the hardware's (cluster launch control).
For large problems on Hopper a few designs have a dynamic schedule as well: a counter in the
workspace hands out tiles, so a cluster that falls behind, because other work shares the GPU or its
loads come late, leaves its next tile to another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES, TileWorkspace
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType


@dataclass(frozen=True, kw_only=True)
class Design:
    """One specialisation of the GEMM, in the kernel's own orientation.

    Attributes:
        tile: Extents (m, n) of the tile of a thread block, or of a pair that shares instructions.
        cluster: Thread blocks of a cluster along (m, n).
        pingpong: Whether two warp groups work on a tile each, instead of sharing one. Hopper only.
        swapped: Whether the kernel computes the transposed problem: its m is the problem's n.
        tile_k_blocks: The tile's extent along k in rows of 128 bytes, the library's own choice.
        splits: Thread blocks that share the k of one tile. Each adds its part to a partial result
            in the workspace, and the last one adds its own and writes the tile.
        in_any_order: Whether they add in the order in which they arrive, and not one after the
            other: results then depend on timing.
        dynamic: Whether clusters take their tiles from a counter, the first one aside. Each tile is
            still computed as a whole by one cluster, so results are the same whoever takes it.
            Hopper only.
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
        """Whether thread blocks share memory besides the operands."""
        return self.splits > 1 or self.dynamic

    def tile_k(self, dtype: DType) -> int:
        """Extent of the tile along k for operands of this type."""
        return self.tile_k_blocks * 8 * 128 // dtype.bits

    def block_tile(self, arch: str) -> tuple[int, int]:
        """Extents (m, n) of what one thread block computes of a tile."""
        m, n = self.tile
        return m // self.ctas_per_tile(arch), n

    def ctas_per_tile(self, arch: str) -> int:
        """2 where pairs of thread blocks issue one instruction: quack's own rule for Blackwell."""
        paired = arch != HOPPER and self.cluster[0] % 2 == 0 and self.tile[0] in (128, 256)
        return 2 if paired else 1

    @property
    def sums_of_a_thread(self) -> int:
        """Sums of a tile that each thread keeps in registers, on Hopper: quack's own rule."""
        m, n = self.tile
        warp_groups = 1 if self.pingpong else 3 if m == 192 and n <= 128 else min(m // 64, 2)
        return m * n // (128 * warp_groups)


HOPPER = "sm_90a"

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
"""For an m that is no power of two, of which other tiles would compute up to twice the rows.

Chosen one by one of 162 swapped designs that an H200 timed at 51 problems, by what they gained
beside those listed already. A cluster of (1, 2) loads the weights once for two tiles of the
problem's m. The library accepts widths that are multiples of 16 alone, and a tile of 256 x 224
spills registers."""

_HOPPER_ONE_WAVE = (
    Design(tile=(64, 80), cluster=(2, 1)),
    Design(tile=(128, 80), cluster=(2, 1)),
    Design(tile=(128, 80), cluster=(1, 2)),
    Design(tile=(128, 96), cluster=(2, 1)),
)
"""Tiles of 80 and 96 columns divide an n of 5120 or 6144 into about one wave of 132 thread blocks.

Chosen one by one of 38 designs that an H200 timed for plain bf16 products, by what they gained
beside those listed already (``benchmarks/results/estimates-few-tiles-*``). Offered in every 16-bit
type and with every epilogue but gates; not for groups."""

_HOPPER_DYNAMIC = tuple(
    Design(tile=tile, cluster=(2, 1), pingpong=pingpong, swapped=swapped, dynamic=True)
    for swapped in (False, True)
    for pingpong, tiles in (
        (False, ((256, 128), (256, 192), (128, 256))),
        (True, ((128, 192), (128, 208), (192, 128))),
    )
    for tile in tiles
)
"""Beside static ones of the same tiles, those that won most often at a large m."""

_HOPPER_FP8_DYNAMIC = tuple(
    Design(tile=tile, cluster=(2, 1), swapped=swapped, dynamic=True)
    for swapped in (False, True)
    for tile in ((128, 192), (192, 128), (256, 96))
)
"""Beside static ones of the same tiles, the largest."""

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
"""For a large k and so few tiles that multiprocessors would idle: rows of small batches, and of
middling ones."""

_HOPPER_SPLIT_LARGE = tuple(
    Design(tile=(128, 192), cluster=(2, 1), pingpong=True, splits=splits) for splits in (2, 4)
)
"""Without an epilogue alone, for some of these spill."""

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
"""Of two parts the order does not matter, so there are at least four. Without an epilogue alone.

Chosen like `_HOPPER_ONE_WAVE`, of 98 splits. Added up in any order, many parts do not wait for one
another; a cluster loads once what its thread blocks share, which counts where tiles are few."""

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
    """The designs for a signature on an architecture, in a fixed order."""
    if arch != HOPPER:
        return (*_blackwell(), *_BLACKWELL_SPLIT)
    if signature.a.is_fp8:
        return (*_hopper_fp8(), *_HOPPER_FP8_DYNAMIC, *_HOPPER_FP8_SPLIT)
    if signature.epilogue is None:
        split = (*_HOPPER_SPLIT, *_HOPPER_SPLIT_LARGE, *_HOPPER_SPLIT_IN_ANY_ORDER)
    else:
        split = _HOPPER_SPLIT
    is_dense = signature.op in (Op.MM, Op.BMM) and not signature.is_gated
    one_wave = _HOPPER_ONE_WAVE if is_dense else ()
    return (*_hopper(), *_HOPPER_BETWEEN, *one_wave, *_HOPPER_DYNAMIC, *split)


FLAG_BYTES = 4
"""Of a counter: of a tile's, which says how many parts of it are done, or of a schedule's."""

PARTIAL_BYTES = 4
"""Of an element of a partial result: fp32."""


def workspace_of(design: Design, arch: str) -> TileWorkspace | None:
    """Memory that the thread blocks of a design share.

    For a dynamic schedule it is one counter, whatever the sizes. For a split of k it is a counter
    and a partial result of each tile of a thread block. The first part stores its sums and the
    others add to them, so only counters must be zero. In any order, all add, so the partial results
    must be zero too; these begin at a multiple of `ZEROED_MULTIPLE_BYTES` behind the counters, for
    which that many bytes more are kept.
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
