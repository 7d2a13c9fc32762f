"""Makes quack's GEMM of groups load rows of A that indices name: of the tokens of each expert.

The library has threads that copy A, row by row, where its other kernels have one of TMA. It reads a
row's number wherever a tile of a group has a row. Here a number is cut to the rows that A has, so
whatever numbers there are, no kernel reads outside A; the result of one outside A is undefined. A
without rows has none to read, and nothing is launched for it.
"""

from __future__ import annotations

import functools
from typing import Any

from nvgemm_runtime.gemm.epilogues import Epilogue
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

from .designs import HOPPER, Design

_UNGATHERED_WIDTHS = (208,)
"""Widths of tiles on Hopper that the library's own tuner leaves out for gathered rows."""


def gathers(signature: Signature) -> bool:
    """Whether rows of A are gathered."""
    return signature.op is Op.GATHERED_GROUPED_MM


_TALL = 128
"""Of a tile with more rows on Hopper, a thread that copies A keeps more numbers of rows than the
library's own 56 registers have room for: it spills."""

_REGISTERS_OF_TALL_TILES = (88, 208)
"""Of a thread that loads, and of one that multiplies; in all, as many as in the library."""

_SPILLING_SUMS = 192
"""Sums of a thread for which 208 registers do not suffice, nor the library's own 224 where a bias
is added and the result is fp32."""


def can_gather(design: Design, signature: Signature, arch: str) -> bool:
    """Whether a design of groups has one that gathers, and spills no registers.

    Thread blocks of a cluster along n would share A's rows, which no copy of single rows does.
    """
    if arch != HOPPER or design.cluster[1] != 1:
        return design.cluster[1] == 1
    adds_in_fp32 = signature.epilogue is Epilogue.BIAS and signature.out is DType.FP32
    has_few = design.tile[0] > _TALL or adds_in_fp32
    spills = has_few and design.sums_of_a_thread >= _SPILLING_SUMS
    return design.tile[1] not in _UNGATHERED_WIDTHS and not spills


def may_begin_early(signature: Signature, arch: str) -> bool:
    """Whether a kernel may be launched before the one ahead of it on the stream has ended.

    On Blackwell the library has a warp that loads numbers of rows, and does not wait for that one.
    """
    return arch == HOPPER or not gathers(signature)


def options_of(signature: Signature, arch: str) -> dict[str, Any]:
    """What a kernel of the library's is told besides, of a class that `gathering` gave."""
    if not gathers(signature):
        return {}
    return {"gather_A": True, "use_pdl": may_begin_early(signature, arch)}


@functools.cache
def gathering(kernel: Any, hopper: bool) -> Any:
    """A class of the library's kernels that cuts the numbers of rows to those that A has."""
    from cutlass import cute
    from quack import copy_utils

    rows_inside = _rows_inside()

    class Hopper(kernel):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            if self.cta_tile_shape_mnk[0] > _TALL:
                self.num_regs_load, self.num_regs_mma = _REGISTERS_OF_TALL_TILES

        @cute.jit  # type: ignore[untyped-decorator]
        def _make_gather_A_copy(  # noqa: N802
            self: Any, a: Any, tiles: Any, groups: Any, place: Any, group: Any
        ) -> Any:
            tile_m = self.cta_tile_shape_mnk[0]
            numbers = cute.local_tile(groups.offset_batch_AIdx(group), (tile_m,), (place[0],))
            threads = 32 * self.num_ab_load_warps
            copy = self._make_gmem_tiled_copy_A(a.element_type, self.a_layout, threads)
            thread = cute.arch.thread_idx()[0] - 32 * self.ab_load_warp_id
            return copy_utils.gather_m_get_copy_fn(
                copy.get_slice(thread), a, tiles, rows_inside(numbers, cute.size(a, mode=[0])),
                limit_m=groups.len_m(group) - place[0] * tile_m, limit_k=groups.len_k(group),
            ), None  # fmt: skip

    class Blackwell(kernel):  # type: ignore[misc]
        @cute.jit  # type: ignore[untyped-decorator]
        def _make_gather_A_copy(  # noqa: N802
            self: Any, a: Any, tiles: Any, numbers: Any, tma: Any, groups: Any, place: Any,
            group: Any, warp: Any,
        ) -> Any:  # fmt: skip
            inside = rows_inside(numbers, cute.size(a, mode=[0]))
            return kernel._make_gather_A_copy(
                self, a, tiles, inside, tma, groups, place, group, warp
            )

    return type(f"{kernel.__name__}_gathering", (Hopper if hopper else Blackwell,), {})


@functools.cache
def _rows_inside() -> Any:
    """A class that stands for the library's vector of rows' numbers, cut to those of A."""
    import cutlass
    from cutlass import Int32, cute

    @cute.jit  # type: ignore[untyped-decorator]
    def number_of(numbers: cute.Tensor, last: Int32, place: Int32) -> Int32:
        return cutlass.max(cutlass.min(numbers[place], last), Int32(0))

    class RowsInside:
        def __init__(self, numbers: Any, count: Any) -> None:
            self._numbers, self._last = numbers, Int32(count) - 1

        def __getitem__(self, place: Any) -> Any:
            return number_of(self._numbers, self._last, Int32(place))

    return RowsInside
