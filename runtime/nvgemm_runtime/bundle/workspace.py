"""How much memory a launch needs besides its operands, where that depends on the problem's sizes.

A kernel that shares the k of one tile among several thread blocks keeps a counter and a partial
result for each tile; one with a dynamic schedule keeps a counter of tiles. A workspace is one piece
of memory: first bytes that must be zero at every launch, then bytes whose content does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gemm.problem import Op, Problem

ZEROED_MULTIPLE_BYTES = 128
"""The zeroed part is rounded up to this, so that what follows is aligned: a line of a GPU's L2."""


@dataclass(frozen=True, kw_only=True)
class TileWorkspace:
    """Bytes of workspace as a formula of the problem's sizes.

    With ``tiles`` = batch times ⌈m / tile m⌉ times ⌈n / tile n⌉, each of the two rounded up to
    ``tiles_multiple``, the zeroed part has ``zeroed_once + zeroed_per_tile * tiles`` bytes, rounded
    up to `ZEROED_MULTIPLE_BYTES`. Behind it are ``scratch_per_tile * tiles`` bytes.

    Attributes:
        tile: Extents (m, n) of a tile, along the problem's m and n.
        tiles_multiple: Along (m, n), what the number of tiles is rounded up to: clusters run whole.
        zeroed_once, zeroed_per_tile: Bytes that must be zero when the kernel begins.
        scratch_per_tile: Bytes that may hold anything.
    """

    tile: tuple[int, int]
    tiles_multiple: tuple[int, int]
    zeroed_once: int
    zeroed_per_tile: int
    scratch_per_tile: int

    def tiles(self, problem: Problem) -> int:
        """Tiles that memory is kept for."""
        tiles = problem.batch
        for extent, tile, multiple in zip((problem.m, problem.n), self.tile, self.tiles_multiple):
            tiles *= _round_up(-(-extent // tile), multiple)
        return tiles

    def zeroed_bytes(self, problem: Problem) -> int:
        """Bytes at the beginning that must be zero."""
        used = self.zeroed_once + self.zeroed_per_tile * self.tiles(problem)
        return _round_up(used, ZEROED_MULTIPLE_BYTES)

    def size_bytes(self, problem: Problem) -> int:
        """Bytes in all."""
        return self.zeroed_bytes(problem) + self.scratch_per_tile * self.tiles(problem)

    def fault(self, op: Op) -> str | None:
        """Why a kernel of an operation cannot have this workspace, or None."""
        if op.has_groups and (self.zeroed_per_tile or self.scratch_per_tile):
            return f"of {op.value}, whose groups the host does not know, it cannot count tiles"
        if not self.zeroed_once + self.zeroed_per_tile + self.scratch_per_tile:
            return "its workspace has 0 bytes for every problem"
        return None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
