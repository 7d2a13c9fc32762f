"""Problems that are small enough to emulate, with sizes from a kernel's tile."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nvgemm_runtime.bundle.format import KernelFacts
from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature

_BATCH, _GROUPS = 2, 3
"""Batch, and groups, of which one is empty."""

_GATHERED_TERMS = (1, 4, 5, 8)
"""Rows that a sum of gathered rows adds, in each of the problems."""

_SHARED_BYTES = 227 * 1024
"""Shared memory of a block on Hopper and Blackwell (CUDA C++ Programming Guide, "Compute
Capabilities")."""

_MOST_STAGES = 32
"""Stages that no pipeline exceeds, even if more fit."""


def small_problems(kernel: KernelFacts) -> tuple[Problem, ...]:
    """Returns three problems with tails, one with several tiles along m and n, and a deep one.

    The first is smaller than a tile along each dimension, the others have a whole tile with a part
    of one along m, n and k. The deep one has a single tile, and a k for which each stage of a
    pipeline through shared memory is used again. All sizes are multiples of what the kernel's
    alignment demands.
    """
    sizes = [*_small_sizes(kernel)]
    if kernel.signature.op is not Op.GATHERED_MM:  # adds few rows, without a pipeline
        sizes.append(_deep_sizes(kernel))
    return tuple(_problem(kernel.signature, *each) for each in dict.fromkeys(sizes))


def size_steps(signature: Signature, alignment_bytes: int) -> tuple[int, int, int]:
    """Returns numbers of which m, n and k must be multiples: aligned rows, and whole blocks."""

    def values(dtype: DType) -> int:
        return max(1, alignment_bytes * 8 // dtype.bits)

    layout, form, scales = signature.layout, signature.form, signature.scales
    out = values(signature.out) * (1 if form is None else form.row.product_columns)
    n = math.lcm(out, values(signature.b) if layout.b_row_major else 1)
    if signature.op is Op.GATHERED_MM:  # reads A by the element
        return 1, n, 1
    m = 1 if layout.a_row_major else values(signature.a)
    k = math.lcm(
        values(signature.a) if layout.a_row_major else 1,
        1 if layout.b_row_major else values(signature.b),
        signature.a.packed,
        (scales.block or 1) if scales is not None else 1,
    )
    return m, n, k


def _small_sizes(kernel: KernelFacts) -> Iterator[tuple[int, int, int]]:
    step_m, step_n, step_k = size_steps(kernel.signature, kernel.alignment_bytes)
    design = kernel.design
    tile_m, tile_n, tile_k = design.tile
    pairs = (1, design.ctas_per_tile) if design.swapped else (design.ctas_per_tile, 1)
    along_m, along_n = (max(1, blocks // pair) for blocks, pair in zip(design.cluster, pairs))
    whole_k = tile_k * design.splits
    sizes = [
        (min(5, tile_m), min(1, tile_n), 1),
        (max(1, tile_m - 1 - step_m), tile_n + 1, whole_k + 1),
        (tile_m + 1, max(1, tile_n - 1 - step_n), 2 * whole_k - step_k),
        (tile_m * along_m + 1, 2 * tile_n * along_n - step_n, whole_k + 2 * tile_k - step_k),
    ]
    for (m, n, k), terms in zip(sizes, _GATHERED_TERMS):
        if kernel.signature.op is Op.GATHERED_MM:
            m, k = m + 2, terms
        yield _multiple(m, step_m), _multiple(n, step_n), _multiple(k, step_k)


def _deep_sizes(kernel: KernelFacts) -> tuple[int, int, int]:
    """Returns sizes with more tiles along k than stages fit into shared memory."""
    design, signature = kernel.design, kernel.signature
    tile_m, tile_n, tile_k = design.tile
    stage_bits = (tile_m * signature.a.bits + tile_n * signature.b.bits) * tile_k
    fitting = _SHARED_BYTES * 8 * design.ctas_per_tile // stage_bits
    stages = min(fitting, _MOST_STAGES)
    parts = design.splits * (_GROUPS if signature.op is Op.K_GROUPED_MM else 1)
    steps = size_steps(signature, kernel.alignment_bytes)
    sizes = (tile_m, tile_n, tile_k * (stages + 1) * parts + 1)
    m, n, k = (_multiple(size, step) for size, step in zip(sizes, steps))
    return m, n, k


def _multiple(value: int, step: int) -> int:
    return -(-max(1, value) // step) * step


def _problem(signature: Signature, m: int, n: int, k: int) -> Problem:
    return Problem(
        signature=signature,
        m=m,
        n=n,
        k=k,
        batch=_BATCH if signature.op is Op.BMM else 1,
        groups=_GROUPS if signature.op.has_groups else 1,
    )
