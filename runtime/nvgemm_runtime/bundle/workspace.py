"""Launch workspace whose size depends on the problem.

A kernel whose thread blocks share a tile's k keeps a counter and a partial result per tile; a
kernel with a dynamic schedule keeps a tile counter. A workspace is one memory range: first bytes
that must be zero at every launch, then bytes with arbitrary content.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gemm.problem import Op, Problem

ZEROED_MULTIPLE_BYTES = 128
"""Multiple to which the zeroed part is rounded up, to align the rest: a line in a GPU's L2."""


@dataclass(frozen=True, kw_only=True)
class TileWorkspace:
    """Workspace bytes as a formula over the problem's sizes.

    With ``tiles`` = batch times ⌈m / tile m⌉ times ⌈n / tile n⌉, both quotients rounded up to
    ``tiles_multiple``, the zeroed part has ``zeroed_once + zeroed_per_tile * tiles`` bytes, rounded
    up to `ZEROED_MULTIPLE_BYTES`. After it come ``scratch_per_tile * tiles`` bytes.

    Attributes:
        tile: Tile extents (m, n), along the problem's m and n.
        tiles_multiple: Multiples along (m, n) to which tile counts are rounded up: clusters run
            whole.
        zeroed_once, zeroed_per_tile: Bytes that must be zero when the kernel begins.
        scratch_per_tile: Bytes that may hold anything.
    """

    tile: tuple[int, int]
    tiles_multiple: tuple[int, int]
    zeroed_once: int
    zeroed_per_tile: int
    scratch_per_tile: int

    def tiles(self, problem: Problem) -> int:
        """Returns the number of tiles that need memory."""
        tiles = problem.batch
        for extent, tile, multiple in zip((problem.m, problem.n), self.tile, self.tiles_multiple):
            tiles *= _round_up(-(-extent // tile), multiple)
        return tiles

    def zeroed_bytes(self, problem: Problem) -> int:
        """Returns the bytes at the beginning that must be zero."""
        used = self.zeroed_once + self.zeroed_per_tile * self.tiles(problem)
        return _round_up(used, ZEROED_MULTIPLE_BYTES)

    def size_bytes(self, problem: Problem) -> int:
        """Returns the total number of bytes."""
        return self.zeroed_bytes(problem) + self.scratch_per_tile * self.tiles(problem)

    def fault(self, op: Op) -> str | None:
        """Returns the reason that kernels for an operation cannot have this workspace, or None."""
        if op.has_groups and (self.zeroed_per_tile or self.scratch_per_tile):
            return (
                f"its workspace counts tiles, but the host does not know the groups of {op.value}"
            )
        if not self.zeroed_once + self.zeroed_per_tile + self.scratch_per_tile:
            return "its workspace has 0 bytes for every problem"
        return None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
