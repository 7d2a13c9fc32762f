"""Which designs of quack's dense GEMM are offered for an architecture and a signature.

Most are those that quack's own autotuner tries. The narrow ones are not in its list, but its
kernels accept them; with operands swapped, they compute a small m without wasted rows. On Hopper,
kernels for fp8 keep their sums in two levels, as exact as fp32, which takes twice the registers:
their tiles are smaller, for those of 16-bit types would spill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

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
    """

    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool = False
    swapped: bool = False
    tile_k_blocks: int = 1

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

_HOPPER_FP8_SHARED = (*product((128,), (128, 160, 192)), (192, 128), (256, 96))
_HOPPER_FP8_PINGPONG = ((64, 128), (64, 192), (128, 96))

_BLACKWELL_WIDTHS = (64, 128, 160, 192, 224, 256)
_BLACKWELL_NARROW = (16, 32, 64)


def designs(arch: str, signature: Signature) -> tuple[Design, ...]:
    """The designs for a signature on an architecture, in a fixed order."""
    if arch != HOPPER:
        return tuple(_blackwell())
    return tuple(_hopper_fp8() if signature.a.is_fp8 else _hopper())


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
