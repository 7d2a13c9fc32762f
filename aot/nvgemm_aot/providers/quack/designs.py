"""Which designs of quack's dense GEMM are offered for an architecture and a signature.

Most are those that quack's own autotuner tries. The narrow ones are not in its list, but its
kernels accept them; with operands swapped, they compute a small m without wasted rows. On Hopper,
kernels for fp8 keep their sums in two levels, as exact as fp32, which takes twice the registers:
their tiles are smaller, for those of 16-bit types would spill.

The library's dynamic schedule for Hopper is not offered. All tiles of a dense GEMM take the same
time, so a counter that hands them out finds nothing to balance, and it must be zeroed before each
launch. On Blackwell the hardware hands them out (cluster launch control).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nvgemm_runtime.bundle.workspace import ZEROED_MULTIPLE_BYTES, TileWorkspace
from nvgemm_runtime.gemm.problem import Signature
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
            in the workspace, and the last one adds its own and writes the tile. Hopper only.
        in_any_order: Whether they add in the order in which they arrive, and not one after the
            other: results then depend on timing.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool = False
    swapped: bool = False
    tile_k_blocks: int = 1
    splits: int = 1
    in_any_order: bool = False

    def tile_k(self, dtype: DType) -> int:
        """Extent of the tile along k for operands of this type."""
        return self.tile_k_blocks * 8 * 128 // dtype.bits

    def ctas_per_tile(self, arch: str) -> int:
        """2 where pairs of thread blocks issue one instruction: quack's own rule for Blackwell."""
        paired = arch != HOPPER and self.cluster[0] % 2 == 0 and self.tile[0] in (128, 256)
        return 2 if paired else 1


HOPPER = "sm_90a"

_HOPPER_SHARED = (*product((256,), (128, 160, 192, 208)), (128, 224), (128, 256))
_HOPPER_PINGPONG = (*product((128,), (128, 160, 192, 208)), (192, 128))
_HOPPER_UNCLUSTERED = (((256, 128), False), ((128, 256), False), ((128, 192), True))
_HOPPER_MIDDLE = (((64, 128), False), ((64, 256), False), ((128, 64), True), ((64, 128), True))
_HOPPER_NARROW = tuple(product((64, 128), (16, 32, 64)))

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
    *(Design(tile=(128, 192), cluster=(2, 1), pingpong=True, splits=splits) for splits in (2, 4)),
)
"""For a large k and so few tiles that multiprocessors would idle: rows of small batches, and of
middling ones."""

_HOPPER_SPLIT_IN_ANY_ORDER = (
    *(
        Design(
            tile=(64, 16), cluster=(1, 1), swapped=True, tile_k_blocks=2, splits=splits,
            in_any_order=True,
        )
        for splits in (4, 8)
    ),
    Design(tile=(128, 128), cluster=(1, 1), splits=4, in_any_order=True),
)  # fmt: skip
"""Of two parts the order does not matter, so there are at least four."""
_HOPPER_FP8_SHARED = (*product((128,), (128, 160, 192)), (192, 128), (256, 96))
_HOPPER_FP8_PINGPONG = ((64, 128), (64, 192), (128, 96))

_BLACKWELL_WIDTHS = (64, 128, 160, 192, 224, 256)
_BLACKWELL_NARROW = (16, 32, 64)


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """The designs for a signature on an architecture, in a fixed order."""
    if arch != HOPPER:
        return tuple(_blackwell())
    if signature.a.is_fp8:
        return tuple(_hopper_fp8())
    is_plain = signature.epilogue is None and signature.scales is None
    return (*_hopper(), *((*_HOPPER_SPLIT, *_HOPPER_SPLIT_IN_ANY_ORDER) if is_plain else ()))


FLAG_BYTES = 4
"""Of the counter of a tile, which says how many parts of it are done."""

PARTIAL_BYTES = 4
"""Of an element of a partial result: fp32."""


def workspace_of(design: Design) -> TileWorkspace | None:
    """Memory for the counter and the partial result of each tile of a design that splits k.

    The first part stores its sums and the others add to them, so only counters must be zero. In any
    order, all add, so the partial results must be zero too; these begin at a multiple of
    `ZEROED_MULTIPLE_BYTES` behind the counters, for which that many bytes more are kept.
    """
    if design.splits == 1:
        return None
    m, n = design.tile
    tile, multiple = design.tile, design.cluster
    partial_bytes = PARTIAL_BYTES * m * n
    return TileWorkspace(
        tile=tile[::-1] if design.swapped else tile,
        tiles_multiple=multiple[::-1] if design.swapped else multiple,
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
