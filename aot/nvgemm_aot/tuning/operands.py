"""Operands with random data for the problems that are timed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.gemm.roles import Role, extra_roles, role_dtype, role_shape, roles

from .block_scales import random_scales

if TYPE_CHECKING:
    import torch

Operands = tuple[Any, ...]
"""A, B and the output, and then what else a kernel takes, as `roles.extra_roles` says."""

MOST_SETS = 512
"""More sets than launches of one sample would be of no use."""

_FP8_RESULT = 16.0
"""Standard deviation of results of fp8, whose largest value is 448 (e4m3)."""
_INT8_RESULT = 20.0
"""Likewise of int8: six deviations fit into 127."""
_UINT8_RESULT = 40.0
"""Mean of results of uint8 if values were zeros and ones; twos make it 90, and 255 is ten
deviations further."""


def make_sets(problem: Problem, device: str, *, seed: int, total_bytes: int) -> list[Operands]:
    """Operands of one problem, several times, so that together they take some space.

    Args:
        problem: The problem.
        device: As torch names it.
        seed: Of the random data.
        total_bytes: What all sets should take together; at least two sets are made.

    Returns:
        At most `MOST_SETS` sets, each in buffers of its own. Groups share the rows evenly.
    """
    import torch

    signature = problem.signature
    one = 0
    for role in roles(signature):
        dtype = role_dtype(signature, role)
        one += dtype.bytes_of(math.prod(role_shape(problem, role)) * dtype.packed)
    count = min(MOST_SETS, max(2, -(-total_bytes // one)))
    generator = torch.Generator(device=device).manual_seed(seed)
    return [make_operands(problem, device, generator) for _ in range(count)]


def make_operands(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    """One set of operands; see `make_sets`."""
    import torch

    signature = problem.signature
    a = _matrix(problem, Role.A, device, generator, row_major=signature.layout.a_row_major)
    b = _matrix(problem, Role.B, device, generator, row_major=signature.layout.b_row_major)
    out = torch.empty(
        role_shape(problem, Role.OUT), dtype=torch_dtype(signature.out), device=device
    )
    extras = (_extra(problem, role, device, generator) for role in extra_roles(signature))
    return a, b, out, *extras


def poison(out: torch.Tensor) -> None:
    """Fill every byte with 0xFF, which is NaN or -1, so that what is not written shows."""
    import torch

    out.view(torch.uint8).fill_(0xFF)


def _extra(problem: Problem, role: Role, device: str, generator: torch.Generator) -> torch.Tensor:
    """Scales, a normally distributed addend, or the ends of groups of even sizes."""
    import torch

    shape = role_shape(problem, role)
    if role is Role.OFFSETS:
        return group_ends(problem, device)
    if role is Role.ADDEND:
        dtype = torch_dtype(role_dtype(problem.signature, role))
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    if _has_blocks(problem):
        return random_scales(problem, role, device, generator, terms=problem.k)
    return torch.rand(shape, generator=generator, device=device) + 0.5


def group_ends(problem: Problem, device: str) -> torch.Tensor:
    """Where groups of even sizes end."""
    import torch

    ends = [problem.m * group // problem.groups for group in range(1, problem.groups + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _has_blocks(problem: Problem) -> bool:
    scales = problem.signature.scales
    return scales is not None and scales.block is not None


def _matrix(
    problem: Problem, role: Role, device: str, generator: torch.Generator, *, row_major: bool
) -> torch.Tensor:
    *lead, rows, columns = role_shape(problem, role)
    shape = (*lead, rows, columns) if row_major else (*lead, columns, rows)
    values = _values(problem, role_dtype(problem.signature, role), shape, device, generator)
    return values if row_major else values.mT


def _values(
    problem: Problem,
    dtype: DType,
    shape: tuple[int, ...],
    device: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Random values whose sums of ``k`` products, with their scales, the output type can hold."""
    import torch

    out = problem.signature.out
    if dtype is DType.FP4_E2M1:  # every code, in both halves of a byte
        bytes_ = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
        return bytes_.view(torch_dtype(dtype))
    if dtype.is_integer:
        if out is DType.INT32:
            info = torch.iinfo(torch_dtype(dtype))
            return torch.randint(
                info.min, info.max + 1, shape, generator=generator, device=device,
                dtype=torch_dtype(dtype),
            )  # fmt: skip
        least = 0 if dtype is DType.UINT8 else -8
        if out not in (DType.INT8, DType.UINT8):
            return torch.randint(
                least, 9, shape, generator=generator, device=device, dtype=torch_dtype(dtype)
            )
        result = _INT8_RESULT if dtype is DType.INT8 else _UINT8_RESULT**0.5
        density = min(1.0, result / problem.k**0.5)
        kept = torch.rand(shape, generator=generator, device=device) < density
        if dtype is DType.UINT8:  # 1 or 2, for zeros and ones of few products would be all ones
            kept = kept * torch.randint(1, 3, shape, generator=generator, device=device)
            return kept.to(torch_dtype(dtype))
        signs = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
        return (kept * signs).to(torch_dtype(dtype))
    scale = 1.0
    if out.is_fp8 and not _has_blocks(problem):
        scale = min(1.0, (_FP8_RESULT / problem.k**0.5) ** 0.5)
    values = torch.randn(shape, generator=generator, device=device) * scale
    return values.to(torch_dtype(dtype))
