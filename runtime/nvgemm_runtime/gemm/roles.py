"""The tensors that a kernel takes: which there are for a signature, of what type and shape."""

from __future__ import annotations

import enum

from .epilogues import Addend, addend_dtype
from .problem import Op, Problem, Signature
from .types import DType, ScaleRecipe, swizzled_elements


class Role(str, enum.Enum):
    """What a tensor is to a GEMM."""

    A = "a"
    B = "b"
    SCALE_A = "scale_a"
    SCALE_B = "scale_b"
    OFFSETS = "offsets"
    """Where each group ends along m, or along k (k_grouped_mm), as int32."""
    ROWS = "rows"
    """The row of B that each element of A multiplies (gathered_mm), or of A for each row of the
    result (gathered_grouped_mm), as int32."""
    ADDEND = "addend"
    """The bias, or the matrix, that an epilogue adds, or the product or gates that it reads."""
    SUMS = "sums"
    """The second result of a gate's gradient with sums, which is zero before: fp32 [m, parts]."""
    OUT = "out"


SUMMED_COLUMNS = 64
"""Columns of a product for one part of a row's sums. No tile is narrower, and each writes the part
of its number."""


def roles(signature: Signature) -> tuple[Role, ...]:
    """The tensors of a signature's kernels, `Role.OUT` last."""
    return (Role.A, Role.B, *extra_roles(signature), Role.OUT)


def extra_roles(signature: Signature) -> tuple[Role, ...]:
    """The tensors besides A, B and the result, in the order in which every function takes them."""
    extras: list[Role] = []
    if signature.scales is not None:
        extras += (Role.SCALE_A, Role.SCALE_B)
    if signature.op.has_groups:
        extras.append(Role.OFFSETS)
    if signature.op.is_gathered:
        extras.append(Role.ROWS)
    if _adds(signature):
        extras.append(Role.ADDEND)
    if has_sums(signature):
        extras.append(Role.SUMS)
    return tuple(extras)


def _adds(signature: Signature) -> bool:
    """Whether an epilogue adds something, or reads it in that place."""
    return signature.epilogue is not None and signature.epilogue.addend is not None


def has_sums(signature: Signature) -> bool:
    """Whether a kernel has a second result, the sums of rows."""
    return signature.form is not None and signature.form.row.has_sums


def role_dtype(signature: Signature, role: Role) -> DType:
    """Element type of one of a signature's tensors."""
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
    """Bitwise or of the contiguous extents of A, B and the parts of the result, in bytes.

    A power of two divides it that divides every one of them, and so every stride of compact ones.
    What is added has rows of as many elements as the product, or a multiple of a part's. A of
    ``gathered_mm`` is read by the element, and does not count.
    """
    signature = problem.signature
    layout = signature.layout
    of_a = signature.a.bytes_of(problem.k if layout.a_row_major else problem.m)
    return (
        (0 if signature.op is Op.GATHERED_MM else of_a)
        | signature.b.bytes_of(problem.n if layout.b_row_major else problem.k)
        | signature.out.bytes_of(signature.part_columns(problem.n))
    )


def misalignment(problem: Problem, alignment_bytes: int) -> str | None:
    """Why operands of this problem cannot be aligned as a kernel needs, or None.

    Pointers can be chosen, sizes cannot: the extent along which an operand is contiguous is the
    stride of its other dimension and must be a multiple of the alignment.
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
        del contiguous["A"]  # which is read by the element
    if _adds(signature):
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
    """How many parts the sums of a row have, of a product with n columns."""
    return -(-n // SUMMED_COLUMNS)


def role_shape(problem: Problem, role: Role) -> tuple[int, ...]:
    """Shape of one of a problem's tensors, as torch counts: two values of fp4 are one element.

    Swizzled scales have one dimension here, for their shape says nothing; tensor-wise ones hold one
    element, row-wise ones are [m, 1] and [1, n], in groups [m] and [groups, n]. B of
    ``gathered_mm`` may have any number of rows; here, as many as A has elements. A of
    ``gathered_grouped_mm`` may, too; here, m.
    """
    signature = problem.signature
    m, n, k = problem.m, problem.n, problem.k
    batch = (problem.batch,) if signature.op is Op.BMM else ()
    groups = (problem.groups,) if signature.op.has_groups else ()
    of_b, of_out = ((), groups) if signature.op is Op.K_GROUPED_MM else (groups, ())
    if role is Role.A:
        return (*batch, m, k // signature.a.packed)
    if role is Role.ROWS:
        return (m,) if signature.op.has_groups else (m, k)
    if role is Role.SUMS:
        return (m, sum_parts(n))
    if role is Role.B and signature.op is Op.GATHERED_MM:
        return (m * k, n)
    if role is Role.B:
        return (*batch, *of_b, k // signature.b.packed, n)
    if role is Role.OUT:
        return (*batch, *of_out, m, problem.out_n)
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
