"""Makes quack's grouped GEMM gather rows of A by index, such as each expert's tokens.

The library's threads copy A row by row, where its other kernels use TMA. They read an index for
each row of a tile that belongs to a group. Here, indices are clamped to A's rows, so no kernel
reads outside A; the result for an index outside A is undefined. If A has no rows, nothing is
launched.

On Blackwell, a proxy fence orders those copies before the tensor cores' reads. PTX asks for it:
`cp.async` writes through the generic proxy, and tcgen05.mma reads through the async proxy. The
library has none. Triton had wrong results on a B200 without it (pytorch/pytorch#181248, mended in
triton-lang/triton#10537). Hopper's kernels are the library's: GPUs confirm their results, and H100s
passed the test that failed on the B200.
"""

from __future__ import annotations

import functools
from typing import Any

from nvgemm_runtime.gemm.epilogues import BIAS
from nvgemm_runtime.gemm.problem import Op, Signature
from nvgemm_runtime.gemm.types import DType

from .designs import Design
from .families import SM90, SM100, MmaFamily, family_of

_GATHERING = frozenset({SM90, SM100})
"""Families with a class in `gathering`."""

_UNGATHERED_WIDTHS = (208,)
"""Tile widths on Hopper that the library's own tuner leaves out for gathered rows."""


def gathers(signature: Signature) -> bool:
    """Returns True if rows of A are gathered."""
    return signature.op is Op.GATHERED_GROUPED_MM


_TALL = 128
"""Most tile rows on Hopper without a spill: beyond, a thread that copies A holds more indices than
the library's 56 registers can hold."""

_REGISTERS_OF_TALL_TILES = (88, 208)
"""Registers per loading thread and per multiplying thread; the total is the library's."""

_SPILLING_SUMS = 192
"""Accumulators per thread for which 208 registers do not suffice, nor the library's own 224 with a
bias and an fp32 result."""


def can_gather(design: Design, signature: Signature, arch: str) -> bool:
    """Returns True if a grouped design can gather rows without spilling registers.

    Thread blocks in a cluster along n would share A's rows, which row copies cannot do.
    """
    family = family_of(arch)
    if family not in _GATHERING or design.cluster[1] != 1:
        return False
    if not family.registers_hold_sums:
        return True
    adds_in_fp32 = signature.epilogue is BIAS and signature.out is DType.FP32
    has_few = design.tile[0] > _TALL or adds_in_fp32
    spills = has_few and design.sums_of_a_thread >= _SPILLING_SUMS
    return design.tile[1] not in _UNGATHERED_WIDTHS and not spills


def may_begin_early(signature: Signature, arch: str) -> bool:
    """Returns True if a kernel may launch before the previous one on the stream has ended.

    On Blackwell, the library has a warp that loads row indices without waiting for it.
    """
    return family_of(arch).gathers_after_wait or not gathers(signature)


def options_of(signature: Signature, arch: str) -> dict[str, Any]:
    """Returns further options for a kernel class made by `gathering`."""
    if not gathers(signature):
        return {}
    return {"gather_A": True, "use_pdl": may_begin_early(signature, arch)}


@functools.cache
def gathering(kernel: Any, family: MmaFamily) -> Any:
    """Returns a subclass of a library kernel that clamps row indices to A's rows."""
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
        def make_ab_pipeline(self, *given: Any, **options: Any) -> Any:
            made = super().make_ab_pipeline(*given, **options)
            # The library sets a pipeline's class in this way, too.
            object.__setattr__(made, "__class__", _fenced(pair=self.use_2cta_instrs))
            return made

        @cute.jit  # type: ignore[untyped-decorator]
        def _make_gather_A_copy(  # noqa: N802
            self: Any, a: Any, tiles: Any, numbers: Any, tma: Any, groups: Any, place: Any,
            group: Any, warp: Any,
        ) -> Any:  # fmt: skip
            inside = rows_inside(numbers, cute.size(a, mode=[0]))
            return kernel._make_gather_A_copy(
                self, a, tiles, inside, tma, groups, place, group, warp
            )

    base = {SM90: Hopper, SM100: Blackwell}[family]
    return type(f"{kernel.__name__}_gathering", (base,), {})


@functools.cache
def _fenced(*, pair: bool) -> Any:
    """Returns the library's pipeline with a proxy fence behind each wait for operands.

    The MMA warps of both thread blocks wait. A pair's instruction reads both blocks' memory.
    """
    from cutlass import cute
    from cutlass.cutlass_dsl import dsl_user_op
    from quack.pipeline import PipelineTmaCpAsyncUmma as Pipeline

    class Fenced(Pipeline):  # type: ignore[misc]
        @dsl_user_op  # type: ignore[untyped-decorator]
        def consumer_wait(
            self, state: Any, try_wait_token: Any = None, *, loc: Any = None, ip: Any = None
        ) -> None:
            Pipeline.consumer_wait(self, state, try_wait_token, loc=loc, ip=ip)
            space = "cluster" if pair else "cta"
            cute.arch.fence_proxy("async.shared", space=space, loc=loc, ip=ip)

    return Fenced


@functools.cache
def _rows_inside() -> Any:
    """Returns a class that presents the library's row index vector, clamped to A's rows."""
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
