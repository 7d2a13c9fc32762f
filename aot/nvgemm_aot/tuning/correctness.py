"""Whether a kernel's result is right: every element, against sums in fp64 of the same operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nvgemm_runtime.epilogue import Activation
from nvgemm_runtime.problem import DType, Op, Signature
from nvgemm_runtime.roles import Role, extra_roles

from .block_scales import block_scaled_product

if TYPE_CHECKING:
    import torch

UNIT_ROUNDOFF = {
    DType.FP32: 2.0**-24,
    DType.FP16: 2.0**-11,
    DType.BF16: 2.0**-8,
    DType.FP8_E4M3: 2.0**-4,
    DType.FP8_E5M2: 2.0**-3,
}
"""By output type: the largest relative error of rounding to it, 2 to minus the mantissa's bits with
the implicit one."""

LEAST_STEP = {
    DType.FP32: 0.0,
    DType.FP16: 2.0**-25,
    DType.BF16: 0.0,
    DType.FP8_E4M3: 2.0**-10,
    DType.FP8_E5M2: 2.0**-17,
}
"""By output type: the largest error of rounding a value near zero, half the least subnormal."""

SUM_ERROR = 5e-4
"""Error of a sum, over the root mean square of all results. On an H200 the norm of errors stayed
below 1e-5 of it (`tests/gpu/gemm_reference.py`); one product too few among 28672 is 6e-3 of it."""

FP8_SUM_ERROR = 2.0**-8
"""Likewise of products of fp8, which Hopper's tensor cores sum in about 14 bits (arXiv 2412.19437,
section 3.3.2): eight times the bound of the norm in `tests/gpu/gemm_reference.py`. How Blackwell's
sum those of fp8 and fp4 with scales of blocks was not seen: they get as much."""

CURVE_ERROR = 2.0**-10
"""Likewise of tanh and sigmoid: twice the 2**-11 that PTX states of ``tanh.approx.f32``."""

LIKENESS = 0.05
"""Norm of the difference, over that of the result, up to which torch's own result is taken: it may
sum in parts that are rounded to the output's type, and is what a program gets without us."""


def reference(operands: Sequence[torch.Tensor], signature: Signature) -> torch.Tensor:
    """``f(scale_a * scale_b * (a @ b) + addend)`` in fp64, exact for whole numbers.

    Args:
        operands: See `operands.Operands`.
        signature: What is computed.
    """
    a, b, _, *extras = operands
    if signature.scales is not None and signature.scales.block is not None:
        scale_a, scale_b = extras  # nothing is added behind them (`nvgemm_runtime.support`)
        return block_scaled_product(a, b, scale_a, scale_b, signature)
    given = dict(zip(extra_roles(signature), extras))
    if signature.op is Op.GROUPED_MM:
        return _product_of_groups(a, b, given[Role.OFFSETS])
    result = a.double() @ b.double()
    for role in (Role.SCALE_A, Role.SCALE_B):
        if role in given:
            result *= given[role].double()
    if signature.epilogue is None:
        return result
    result += given[Role.ADDEND].double()
    activation = signature.epilogue.activation
    return result if activation is None else _ACTIVATIONS[activation](result)


def _product_of_groups(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    result = a.new_empty((a.shape[0], b.shape[-1])).double()
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        result[begin:end] = a[begin:end].double() @ b[group].double()
        begin = end
    return result


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + ((2.0 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.RELU: lambda x: x.clamp(min=0.0),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: lambda x: x * x.sigmoid(),
}

_CURVES = (Activation.GELU_TANH, Activation.SILU)


def find_fault(out: torch.Tensor, wanted: torch.Tensor, signature: Signature) -> str | None:
    """What is wrong with a result, or None.

    Args:
        out: The result.
        wanted: What `reference` says.
        signature: What was to be computed.
    """
    found = out.double()
    if signature.a.is_integer and signature.out not in UNIT_ROUNDOFF:
        different = int((found != wanted).sum())
        return f"{different} of {out.numel()} elements differ" if different else None
    scale = wanted.square().mean().sqrt()
    of_sums = FP8_SUM_ERROR if signature.a.bits <= 8 else SUM_ERROR
    if signature.epilogue is not None and signature.epilogue.activation in _CURVES:
        of_sums += CURVE_ERROR
    if signature.a.is_integer:
        of_sums = 0.0  # the sum is exact, and the result is what it rounds to
    allowed = wanted.abs() * (UNIT_ROUNDOFF[signature.out] * 1.01)
    allowed += of_sums * scale + LEAST_STEP[signature.out]
    excess = (found - wanted).abs_().sub_(allowed)
    wrong = int((~(excess <= 0)).sum())  # a NaN is not below anything
    if not wrong:
        return None
    error = float((found - wanted).norm() / wanted.norm())
    return f"{wrong} of {out.numel()} elements are off beyond rounding (relative error {error:.1e})"


def is_like(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a result of torch's own is the same computation."""
    return bool((out.double() - wanted).norm() <= LIKENESS * wanted.norm())
