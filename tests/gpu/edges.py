"""Sizes at which a kernel is tested: odd m where it is free, n and k at the edges of alignment."""

from __future__ import annotations

import math

from nvgemm_runtime.gemm.problem import DType, Op, Problem, Signature

BATCH = 3
GROUPS = 4


def problem_of(signature: Signature, m: int, n: int, k: int, *, count: int = BATCH) -> Problem:
    """A problem of these sizes; ``count`` is its batch or groups, where it has them."""
    return Problem(
        signature=signature,
        m=m,
        n=n,
        k=k,
        batch=count if signature.op is Op.BMM else 1,
        groups=count if signature.op.has_groups else 1,
    )


def steps(signature: Signature, alignment_bytes: int) -> tuple[int, int, int]:
    """What m, n and k must be multiples of: aligned rows, and whole blocks."""

    def values(dtype: DType) -> int:
        return max(1, alignment_bytes * 8 // dtype.bits)

    of_operand = values(signature.dtype)
    m = 1 if signature.layout.a_row_major else of_operand
    form = signature.form
    of_result = values(signature.out) * (1 if form is None else form.row.product_columns)
    n = math.lcm(of_result, of_operand if signature.layout.b_row_major else 1)
    k_is_contiguous = signature.layout.a_row_major or not signature.layout.b_row_major
    block = signature.scales.block or 1 if signature.scales is not None else 1
    if signature.op is Op.GATHERED_MM:  # whose A is read by the element
        return m, n, 1
    return m, n, math.lcm(of_operand if k_is_contiguous else 1, block)


def edges(signature: Signature, alignment_bytes: int) -> list[Problem]:
    """Problems of a signature, from the smallest that a kernel's alignment allows."""
    step_m, step_n, step_k = steps(signature, alignment_bytes)

    def m(value: int) -> int:
        return -(-value // step_m) * step_m

    sizes = [
        (m(1), step_n, step_k, BATCH),
        (m(37), 3 * step_n, 5 * step_k, GROUPS),
        (m(1003), 128 + step_n, 256 - step_k, GROUPS),
        (m(128), 256, 512, BATCH),
        (m(300), 1024 + step_n, 192 + step_k, 1),
    ]
    return [problem_of(signature, m, n, k, count=count) for m, n, k, count in sizes]
