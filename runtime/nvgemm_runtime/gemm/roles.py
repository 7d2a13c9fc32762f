"""Kernel operands for a signature: their roles, dtypes and shapes."""

from __future__ import annotations

import enum

from .epilogues import Addend, addend_dtype
from .problem import Op, Problem, Signature
from .types import DType, ScaleRecipe, swizzled_elements


class Role(str, enum.Enum):
    """Operand role in a GEMM."""

    A = "a"
    B = "b"
    SCALE_A = "scale_a"
    SCALE_B = "scale_b"
    OFFSETS = "offsets"
    """Group ends along m, or along k (k_grouped_mm), as int32."""
    ROWS = "rows"
    """Row in B for each element in A (gathered_mm), or row in A for each result row
    (gathered_grouped_mm), as int32."""
    ADDEND = "addend"
    """Bias or matrix that an epilogue adds, or product or gates that it reads."""
    SUMS = "sums"
    """Second result for a gate's gradient with sums, zero-initialised: fp32 [m, parts]."""
    OUT = "out"


SUMMED_COLUMNS = 64
"""Product columns per row-sum part. No tile is narrower, and each tile writes the part at its own
index."""


def roles(signature: Signature) -> tuple[Role, ...]:
    """Returns the operand roles for a signature's kernels, `Role.OUT` last."""
    return (Role.A, Role.B, *extra_roles(signature), Role.OUT)


def extra_roles(signature: Signature) -> tuple[Role, ...]:
    """Returns the roles besides A, B and the result, in the order used everywhere."""
    extras: list[Role] = []
    if signature.scales is not None:
        extras += (Role.SCALE_A, Role.SCALE_B)
    if signature.op.has_groups:
        extras.append(Role.OFFSETS)
    if signature.op.is_gathered:
        extras.append(Role.ROWS)
    if _has_addend(signature):
        extras.append(Role.ADDEND)
    if has_sums(signature):
        extras.append(Role.SUMS)
    return tuple(extras)


def _has_addend(signature: Signature) -> bool:
    """Returns True if the epilogue has an addend operand, added or read."""
    return signature.epilogue is not None and signature.epilogue.addend is not None


def has_sums(signature: Signature) -> bool:
    """Returns True if kernels have row sums as a second result."""
    return signature.form is not None and signature.form.row.has_sums


def role_dtype(signature: Signature, role: Role) -> DType:
    """Returns the dtype for one role."""
    if role in (Role.SCALE_A, Role.SCALE_B):
        assert signature.scales is not None
        return signature.scales.dtype
    return {
        Role.A: signature.a,
        Role.B: signature.b,
        Role.OFFSETS: DType.INT32,
        Role.ROWS: DType.INT32,
        Role.ADDEND: addend_dtype(signature.out),
        Role.SUMS: DType.FP32,
        Role.OUT: signature.out,
    }[role]


def contiguous_bytes(problem: Problem) -> int:
    """Returns the bitwise OR over the contiguous extents of A, B and the result parts, in bytes.

    A power of two divides it if it divides every extent, and so every stride in compact operands.
    Addend rows have as many elements as the product, or a multiple of a part's. Excludes A of
    ``gathered_mm``, which is read by the element.
    """
    signature = problem.signature
    layout = signature.layout
    a_bytes = signature.a.bytes_of(problem.k if layout.a_row_major else problem.m)
    return (
        (0 if signature.op is Op.GATHERED_MM else a_bytes)
        | signature.b.bytes_of(problem.n if layout.b_row_major else problem.k)
        | signature.out.bytes_of(signature.part_columns(problem.n))
    )


def misalignment_reason(problem: Problem, alignment_bytes: int) -> str | None:
    """Returns why this problem's operands cannot have an alignment; None if they can.

    Pointers can be chosen, sizes cannot: an operand's contiguous extent is the other dimension's
    stride and must be a multiple of the alignment.
    """
    signature = problem.signature
    m, n, k = ("m", problem.m), ("n", problem.n), ("k", problem.k)
    halved = signature.form is not None and signature.form.has_pairs
    out_n = ("n / 2" if halved else "n", signature.part_columns(problem.n))
    contiguous = {
        "A": (*(k if signature.layout.a_row_major else m), signature.a),
        "B": (*(n if signature.layout.b_row_major else k), signature.b),
        "out": (*out_n, signature.out),
    }
    if signature.op is Op.GATHERED_MM:
        del contiguous["A"]  # read by the element
    if _has_addend(signature):
        contiguous["addend"] = (*n, role_dtype(signature, Role.ADDEND))
    for operand, (name, extent, dtype) in contiguous.items():
        if extent * dtype.bits % (8 * alignment_bytes):
            multiple = 8 * alignment_bytes // dtype.bits
            return (
                f"{operand} is contiguous along {name} = {extent}, which must be a multiple of "
                f"{multiple} ({alignment_bytes} bytes of {dtype.value})"
            )
    return None


def sum_parts(n: int) -> int:
    """Returns the number of row-sum parts for a product with n columns."""
    return -(-n // SUMMED_COLUMNS)


def role_shape(problem: Problem, role: Role) -> tuple[int, ...]:
    """Returns an operand's shape in torch elements, where two fp4 values are one element.

    Swizzled scales get one dimension, because their shape is arbitrary. Tensor-wise scales hold one
    element; row-wise ones are [m, 1] and [1, n], in groups [m] and [groups, n]. B of
    ``gathered_mm`` may have any number of rows; here it has one per element in A. A of
    ``gathered_grouped_mm`` may too; here it has m.
    """
    signature = problem.signature
    m, n, k = problem.m, problem.n, problem.k
    batch = (problem.batch,) if signature.op is Op.BMM else ()
    groups = (problem.groups,) if signature.op.has_groups else ()
    b_groups, out_groups = ((), groups) if signature.op is Op.K_GROUPED_MM else (groups, ())
    if role is Role.A:
        return (*batch, m, k // signature.a.packed)
    if role is Role.ROWS:
        return (m,) if signature.op.has_groups else (m, k)
    if role is Role.SUMS:
        return (m, sum_parts(n))
    if role is Role.B and signature.op is Op.GATHERED_MM:
        return (m * k, n)
    if role is Role.B:
        return (*batch, *b_groups, k // signature.b.packed, n)
    if role is Role.OUT:
        return (*batch, *out_groups, m, problem.out_n)
    if role is Role.OFFSETS:
        return groups
    if role is Role.ADDEND:
        assert signature.epilogue is not None
        addend = signature.epilogue.addend
        if addend is Addend.PRODUCT:
            return (m, problem.out_n)
        if addend is Addend.GATES:
            return (m, n)
        return (*groups, n) if addend is Addend.ROW else (*batch, m, n)
    assert signature.scales is not None
    if signature.scales is ScaleRecipe.FP32_TENSOR:
        return (1,)
    if signature.scales is ScaleRecipe.FP32_ROW and groups:
        return (m,) if role is Role.SCALE_A else (*groups, n)
    if signature.scales is ScaleRecipe.FP32_ROW:
        return (m, 1) if role is Role.SCALE_A else (1, n)
    return (swizzled_elements(signature.scales, m if role is Role.SCALE_A else n, k),)
