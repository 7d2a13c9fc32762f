"""What a GEMM's result must be, from the tensors it is given, and how far off it may be.

``out = round(f(scale_a * scale_b * (A @ B) + addend))``, in fp64, and rounded once.
"""

from __future__ import annotations

import torch
from gemm_arguments import Arguments
from microscaling import decode, dequantise, unswizzle

from nvgemm_runtime.epilogue import Activation
from nvgemm_runtime.problem import DType, Op, Problem, Signature
from nvgemm_runtime.roles import Role

RELATIVE_ERROR = {
    DType.FP32: 1e-5,
    DType.FP16: 6e-4,
    DType.BF16: 4e-3,
    DType.FP8_E4M3: 0.04,
    DType.FP8_E5M2: 0.08,
    DType.INT32: 0.0,
    DType.INT8: 0.0,
    DType.UINT8: 0.0,
}
"""By output type: bound on the norm of the error over the norm of the result. A rounding to the
output type costs 2**-9 (bf16), 2**-12 (fp16), 2**-5 (e4m3) or 2**-4 (e5m2) on average; the rest is
room for summation order, and for values of fp8 that are nearly zero."""

FP8_SUM_ERROR = 2**-11
"""Hopper's tensor cores sum fp8 products in about 14 bits (arXiv 2412.19437, section 3.3.2); errors
of 2e-4 were seen on an H200. What Blackwell's do was not seen: fp4 and block scales get as much."""

CURVE_ERROR = 2**-10
"""Of tanh and sigmoid: twice the 2**-11 that PTX states as the largest of ``tanh.approx.f32``."""

CURVES = (Activation.GELU_TANH, Activation.SILU)
"""Activations whose values no number type has: only `assert_close` can judge their results."""


def has_exact_results(signature: Signature) -> bool:
    """Whether `exact_arguments` have a result without rounding."""
    return signature.epilogue is None or signature.epilogue.activation not in CURVES


def reference(arguments: Arguments) -> torch.Tensor:
    """The result in fp64, before it is rounded to its type."""
    result = _product(arguments)
    addend = arguments.tensors.get(Role.ADDEND)
    if addend is None:
        return result
    epilogue = arguments.problem.signature.epilogue
    assert epilogue is not None
    return _ACTIVATIONS[epilogue.activation](result + addend.double())


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


_ACTIVATIONS = {
    None: lambda x: x,
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: lambda x: x / (1 + torch.exp(-x)),
}


def _product(arguments: Arguments) -> torch.Tensor:
    problem, tensors = arguments.problem, arguments.tensors
    a, b = operand_values(problem, tensors, Role.A), operand_values(problem, tensors, Role.B)
    if problem.signature.op is not Op.GROUPED_MM:
        return a @ b.mT
    result = torch.empty(problem.m, problem.n, dtype=torch.float64, device=a.device)
    begin = 0
    for group, end in enumerate(tensors[Role.OFFSETS].tolist()):
        result[begin:end] = a[begin:end] @ b[group].mT
        begin = end
    return result


def operand_values(problem: Problem, tensors: dict[Role, torch.Tensor], role: Role) -> torch.Tensor:
    """A or B with its scales applied, in fp64: [..., m, k] or [..., n, k]."""
    scales = problem.signature.scales
    tensor, scale_role, rows = {
        Role.A: (tensors[Role.A], Role.SCALE_A, problem.m),
        Role.B: (tensors[Role.B].mT, Role.SCALE_B, problem.n),
    }[role]
    if scales is not None and scales.block is not None:
        blocks = -(-problem.k // scales.block)
        return dequantise(tensor, unswizzle(tensors[scale_role], rows, blocks), scales.block)
    values = decode(tensor) if problem.signature.a.is_fp8 else tensor.double()
    if scales is None:
        return values
    scale = tensors[scale_role].double()
    return values * (scale if role is Role.A else scale.mT if scale.dim() == 2 else scale)


def assert_exact(out: torch.Tensor, arguments: Arguments) -> None:
    """Equal to the reference; the few sums beyond the exact values round as torch rounds."""
    wanted = reference(arguments).to(out.dtype).double()
    assert torch.equal(out.double(), wanted), f"{(out.double() != wanted).sum()} elements differ"


def assert_close(out: torch.Tensor, arguments: Arguments) -> None:
    wanted = reference(arguments)
    error = torch.linalg.vector_norm(out.double() - wanted) / torch.linalg.vector_norm(wanted)
    bound = error_bound(arguments.problem.signature)
    assert float(error) <= bound, f"relative error {float(error):.2e}, at most {bound:.0e}"


def error_bound(signature: Signature) -> float:
    """Bound on the norm of the error over the norm of the result."""
    bounds = [RELATIVE_ERROR[signature.out]]
    if signature.a.is_fp8 or signature.a is DType.FP4_E2M1:
        bounds.append(FP8_SUM_ERROR)
    if not has_exact_results(signature):
        bounds.append(CURVE_ERROR)
    return max(bounds)
