"""Sample operands for the compiler: shapes without data, which need no GPU.

Kernel sizes are symbolic, so any sample sizes give the same code. Samples must only be aligned and
distinct.
"""

from __future__ import annotations

from typing import Any

from nvgemm_runtime.gemm.problem import Op, Problem, Signature
from nvgemm_runtime.gemm.roles import Role, role_dtype, role_shape, roles
from nvgemm_runtime.gemm.types import DType


def sample_tensors(signature: Signature) -> dict[Role, Any]:
    """Builds tensors for a signature's kernels. Call it, and use them, in FakeTensorMode."""
    batch = 2 if signature.op is Op.BMM else 1
    groups = 4 if signature.op.has_groups else 1
    problem = Problem(signature=signature, m=256, n=512, k=1024, batch=batch, groups=groups)
    layout = signature.layout
    row_major = {Role.A: layout.a_row_major, Role.B: layout.b_row_major}
    return {
        role: _empty(
            role_shape(problem, role), role_dtype(signature, role), row_major.get(role, True)
        )
        for role in roles(signature)
    }


def sample_operands(signature: Signature, tensors: dict[Role, Any]) -> dict[str, Any]:
    """Returns the arguments that plain, grouped and fused operators share."""
    return {
        "A": tensors[Role.A],
        "B": tensors[Role.B],
        "out": tensors[Role.OUT],
        "accumulator_type": torch_type(signature.accumulator),
    }


def torch_type(dtype: DType) -> Any:
    """Returns the corresponding torch dtype."""
    import torch

    return getattr(torch, dtype.torch_name)


def _empty(shape: tuple[int, ...], dtype: DType, row_major: bool) -> Any:
    import torch

    if row_major:
        return torch.empty(shape, dtype=torch_type(dtype), device="cuda")
    *leading, rows, columns = shape
    return torch.empty((*leading, columns, rows), dtype=torch_type(dtype), device="cuda").mT
