"""The call by which a program asks torch for a declared problem, as matching reads it."""

from __future__ import annotations

import math

from nvgemm_runtime.gemm.aten import OPERATORS, AtenGemm, operator_for
from nvgemm_runtime.gemm.extra_operands import ExtraOperands
from nvgemm_runtime.gemm.operands import Operand, Request, requests, torch_dtype
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.types import SWIZZLED_ALIGNMENT_BYTES
from nvgemm_runtime.recording.declarable import ALIGNMENT_BYTES


def call_of(problem: Problem) -> AtenGemm:
    """A call on contiguous tensors that a problem declares: with scales, offsets and addend.

    Tensors start at multiples of `ALIGNMENT_BYTES`; swizzled scales, as every kernel needs them, at
    those of `SWIZZLED_ALIGNMENT_BYTES`.
    """
    served = problem.signature
    tensors = {role: _operand(problem, role) for role in roles(served)}
    return AtenGemm(
        op=operator_for(served),
        a=tensors[Role.A],
        b=tensors[Role.B],
        out=tensors[Role.OUT],
        extras=ExtraOperands(
            scale_a=tensors.get(Role.SCALE_A),
            scale_b=tensors.get(Role.SCALE_B),
            # Named, not read off shapes: those of two recipes can be equal.
            recipe=served.scales,
            offsets=tensors.get(Role.OFFSETS),
            addend=tensors.get(Role.ADDEND),
            activation=None if served.epilogue is None else served.epilogue.activation,
        ),
    )


def readings(gemm: AtenGemm) -> tuple[Request, ...]:
    """What matching is asked for a call, best aligned first; see `operands.requests`.

    One row or column can be read in both layouts, and a row that is added to one row as a matrix.
    """
    return requests(OPERATORS[gemm.op].op, gemm.a, gemm.b, out=gemm.out, extras=gemm.extras)


def _operand(problem: Problem, role: Role) -> Operand:
    import torch

    served, shape = problem.signature, role_shape(problem, role)
    return Operand(
        dtype=torch_dtype(role_dtype(served, role)),
        device=torch.device("cuda"),
        shape=shape,
        strides=_strides(shape, row_major=_is_row_major(served, role)),
        address=math.lcm(ALIGNMENT_BYTES, SWIZZLED_ALIGNMENT_BYTES)
        if role in (Role.SCALE_A, Role.SCALE_B)
        else ALIGNMENT_BYTES,
    )


def _is_row_major(served: Signature, role: Role) -> bool:
    if role is Role.A:
        return served.layout.a_row_major
    return role is not Role.B or served.layout.b_row_major


def _strides(shape: tuple[int, ...], *, row_major: bool) -> tuple[int, ...]:
    if not row_major:
        *batch, rows, columns = shape
        return (*(rows * columns for _ in batch), 1, rows)
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
