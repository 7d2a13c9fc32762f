"""Kernel that adds weighted rows of a matrix, such as the results of a token's experts.

``out[i, :] = sum over j of a[i, j] * b[rows[i, j], :]``, by fused multiply-adds in fp32, with
rising j, rounded once. An index outside b's rows adds nothing, whatever its weight, and nothing is
read for it.

Tensors are row-major; extents and pitches are dynamic:

- a: [m, k] fp32, the weights, with any pitch;
- b: [r, n] bf16 or fp16, n a multiple of 8, with a pitch that is a multiple of 16 bytes; any r;
- rows: [m, k] int32, with any pitch;
- out: [m, n] with b's type, and a pitch that is a multiple of 16 bytes.

A thread computes 8 neighbours in one row of out. The threads in a warp share a row, so each weight
and index is loaded once for all of them. The kernel is memory-bound: no thread waits for another,
there is no shared memory, and performance depends on the number of concurrent loads. Either many
warps each load one row of b at a time, or fewer warps load several (`make_gathered_mm`).
"""

# No `from __future__ import annotations`: the compiler reads annotations as they are.

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm

from nvgemm_runtime.gemm.types import DType

from ..cute_dsl import cute_type

VECTOR_BYTES = 16
"""Bytes that a thread loads and stores at once: the widest access on all targets."""

_WORDS = VECTOR_BYTES // 4

_MAX_BLOCKS_Y = 65535
"""Most thread blocks in a grid along y, or z (CUDA C++ Programming Guide, technical
specifications)."""

_LOAD = """{
.reg .pred is_read;
setp.ne.b32 is_read, $5, 0;
@is_read ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}"""
"""Predicated load: a condition would become a branch, which keeps loads apart."""

_LOAD_OPERANDS = "=r,=r,=r,=r,l,r,0,1,2,3"


def make_gathered_mm(tile: tuple[int, int, int], dtype: DType) -> Any:
    """Returns a function ``(a, b, rows, out, stream)`` that launches the kernel.

    Args:
        tile: Rows of out per thread block, which is 1; columns, a multiple of 256 (8 for each
            thread in a warp); and rows of b that a thread loads before it uses the first.
        dtype: Element type for b and out, with 16 bits.
    """
    tile_m, tile_n, tile_k = tile
    assert tile_m == 1, tile
    element, element_bytes = cute_type(dtype), dtype.bits // 8
    vector = VECTOR_BYTES // element_bytes
    # Left alone, ptxas limits registers so that warps fill an SM, and loads a row only when the
    # previous one is used. If one block is enough, it issues all loads first.
    min_blocks = 0 if tile_k == 1 else 1

    @cute.kernel  # type: ignore[untyped-decorator]
    def gathered_mm_kernel(
        a: cute.Tensor, b: cute.Tensor, rows: cute.Tensor, out: cute.Tensor
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block_n, block_y, block_z = cute.arch.block_idx()
        _, blocks_y, _ = cute.arch.grid_dim()
        (m, n), k, r = out.shape, a.shape[1], b.shape[0]
        row = block_z * blocks_y + block_y
        column = block_n * tile_n + thread * vector
        # After the last of 2**31 - 1 rows, row numbers wrap around to negative ones.
        if row >= 0 and row < m and column < n:
            # Offsets have 64 bits: b may have more elements than 32 bits can count.
            begin_of_b = b.iterator.toint() + Int64(column) * element_bytes
            pitch_of_b = Int64(b.stride[0]) * element_bytes
            indices = cute.make_rmem_tensor((tile_k,), Int32)
            weights = cute.make_rmem_tensor((tile_k,), Float32)
            words = cute.make_rmem_tensor((_WORDS, tile_k), Int32)
            values = cute.recast_tensor(words, element)
            sums = cute.make_rmem_tensor((vector,), Float32)
            sums.fill(0.0)
            for begin in cutlass.range(0, k, tile_k):
                for step in cutlass.range_constexpr(tile_k):
                    j = cutlass.min(begin + step, k - 1)
                    indices[step], weights[step] = rows[row, j], a[row, j]
                for step in cutlass.range_constexpr(tile_k):
                    index = indices[step]
                    is_added = Boolean(index >= 0) & Boolean(index < r)
                    if cutlass.const_expr(step > 0):
                        is_added &= Boolean(begin + step < k)
                    weights[step] = cutlass.select_(is_added, weights[step], Float32(0.0))
                    loaded = _load_if(is_added, begin_of_b + Int64(index) * pitch_of_b)
                    for word in cutlass.range_constexpr(_WORDS):
                        words[word, step] = loaded[word]
                for step in cutlass.range_constexpr(tile_k):
                    for i in cutlass.range_constexpr(vector):
                        sums[i] += weights[step] * Float32(values[i, step])
            rounded = cute.make_rmem_tensor((vector,), element)
            rounded.store(sums.load().to(element))
            store = cute.make_copy_atom(
                cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=8 * VECTOR_BYTES
            )
            vectors = cute.zipped_divide(out, (1, vector))
            cute.copy(store, rounded, vectors[(0, None), (row, column // vector)])

    @cute.jit  # type: ignore[untyped-decorator]
    def gathered_mm(
        a: cute.Tensor, b: cute.Tensor, rows: cute.Tensor, out: cute.Tensor, stream: CUstream
    ) -> None:
        m, n = out.shape
        # Rows fill y and z evenly; neighbours along n, which comes first, share a row.
        blocks_z = cute.ceil_div(m, _MAX_BLOCKS_Y)
        blocks_y = cute.ceil_div(m, blocks_z)
        # No cluster, not even with one block: the GPU starts clusters at less than half the rate of
        # blocks, and blocks are what there are most of.
        gathered_mm_kernel(a, b, rows, out).launch(
            grid=(cute.ceil_div(n, tile_n), blocks_y, blocks_z),
            block=(tile_n // vector, 1, 1),
            min_blocks_per_mp=min_blocks,
            stream=stream,
        )

    return gathered_mm


def sample_tensors(dtype: DType) -> tuple[Any, ...]:
    """Builds sample tensors for a, b, rows and out, with dynamic extents and pitches."""
    m, n, k, r = (cute.sym_int() for _ in range(4))

    def tensor(dtype: DType, shape: tuple[Any, Any], align: int) -> Any:
        pitch = cute.sym_int64(divisibility=8 * align // dtype.bits)
        return cute.runtime.make_fake_tensor(
            cute_type(dtype), shape, (pitch, 1), assumed_align=align
        )

    return (
        tensor(DType.FP32, (m, k), 4),
        tensor(dtype, (r, n), VECTOR_BYTES),
        tensor(DType.INT32, (m, k), 4),
        tensor(dtype, (m, n), VECTOR_BYTES),
    )


def _load_if(is_read: Boolean, address: Int64) -> list[Int32]:
    """Loads the words at a global address, a multiple of `VECTOR_BYTES`; else returns zeros."""
    zero = Int32(0).ir_value()
    words = llvm.inline_asm(
        llvm.StructType.get_literal([zero.type] * _WORDS),
        [address.ir_value(), Int32(is_read).ir_value(), *[zero] * _WORDS],
        _LOAD,
        _LOAD_OPERANDS,
        has_side_effects=False,
    )
    return [Int32(llvm.extractvalue(zero.type, words, [word])) for word in range(_WORDS)]
