"""A GEMM on tensor cores, without shared memory: simple, and right for any size and layout.

Each thread loads its own elements of A and B, zeros where a matrix ends, multiplies by the
instruction of a warp (mma.sync), and stores what lies within the result.
"""

# No `from __future__ import annotations`: the compiler reads annotations as they are.

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.nvgpu import warp

from nvgemm_aot.providers.cute_dsl import cute_type
from nvgemm_aot.providers.interface import DType

WARPS = (2, 2)
"""Warps of a thread block along (m, n)."""

INSTRUCTION = (16, 8, 16)
"""Extents (m, n, k) of the instruction."""


def make_gemm(tile: tuple[int, int, int], dtype: DType) -> Any:
    """A function ``(a, b, out, stream)`` that computes ``out = a @ b`` in such tiles.

    A is (m, k), B is (k, n), out is (m, n), each with any strides.
    """
    tile_m, tile_n, tile_k = tile

    @cute.kernel
    def kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, mma: cute.TiledMma) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        here = (block_m, block_n, None)
        tiles = (tile_m, tile_n, tile_k)
        # The instruction's B is (n, k).
        b_nk = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
        a_tile = cute.local_tile(a, tiles, here, proj=(1, None, 1))
        b_tile = cute.local_tile(b_nk, tiles, here, proj=(None, 1, 1))
        out_tile = cute.local_tile(out, tiles, here, proj=(1, 1, None))
        a_at = cute.local_tile(cute.make_identity_tensor(a.shape), tiles, here, proj=(1, None, 1))
        b_at = cute.local_tile(
            cute.make_identity_tensor(b_nk.shape), tiles, here, proj=(None, 1, 1)
        )
        out_at = cute.local_tile(
            cute.make_identity_tensor(out.shape), tiles, here, proj=(1, 1, None)
        )
        mine = mma.get_slice(thread)
        a_mine, a_mine_at = mine.partition_A(a_tile), mine.partition_A(a_at)
        b_mine, b_mine_at = mine.partition_B(b_tile), mine.partition_B(b_at)
        out_mine, out_mine_at = mine.partition_C(out_tile), mine.partition_C(out_at)
        a_values = mma.make_fragment_A(a_mine[None, None, None, 0])
        b_values = mma.make_fragment_B(b_mine[None, None, None, 0])
        sums = mma.make_fragment_C(out_mine)
        sums.fill(0.0)
        for step in range(cute.size(a_tile, mode=[2])):
            a_step, a_step_at = a_mine[None, None, None, step], a_mine_at[None, None, None, step]
            for i in cutlass.range_constexpr(cute.size(a_values)):
                a_values[i] = a.element_type(0)
                if cute.elem_less(a_step_at[i], a.shape):
                    a_values[i] = a_step[i]
            b_step, b_step_at = b_mine[None, None, None, step], b_mine_at[None, None, None, step]
            for i in cutlass.range_constexpr(cute.size(b_values)):
                b_values[i] = b.element_type(0)
                if cute.elem_less(b_step_at[i], b_nk.shape):
                    b_values[i] = b_step[i]
            for part in cutlass.range_constexpr(cute.size(a_values, mode=[2])):
                a_part, b_part = a_values[None, None, part], b_values[None, None, part]
                cute.gemm(mma, sums, a_part, b_part, sums)
        for i in cutlass.range_constexpr(cute.size(sums)):
            if cute.elem_less(out_mine_at[i], out.shape):
                out_mine[i] = out.element_type(sums[i])

    @cute.jit
    def gemm(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: CUstream) -> None:
        instruction = warp.MmaF16BF16Op(cute_type(dtype), cutlass.Float32, INSTRUCTION)
        mma = cute.make_tiled_mma(instruction, (*WARPS, 1))
        m, n = out.shape
        grid = (cute.ceil_div(m, tile_m), cute.ceil_div(n, tile_n), 1)
        kernel(a, b, out, mma).launch(
            grid=grid, block=(WARPS[0] * WARPS[1] * 32, 1, 1), cluster=(1, 1, 1), stream=stream
        )

    return gemm
