"""Operands with random data for the problems that are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvgemm_runtime.operands import torch_dtype
from nvgemm_runtime.problem import DType, Op, Problem

if TYPE_CHECKING:
    import torch

Operands = tuple[Any, Any, Any]
"""A, B and the output."""

MOST_SETS = 512
"""More sets than launches of one sample would be of no use."""

_FP8_RESULT = 16.0
"""Standard deviation of results of fp8, whose largest value is 448 (e4m3)."""
_INT8_RESULT = 20.0
"""Likewise of int8: six deviations fit into 127."""


def make_sets(problem: Problem, device: str, *, seed: int, total_bytes: int) -> list[Operands]:
    """Operands of one problem, several times, so that together they take some space.

    Args:
        problem: The problem.
        device: As torch names it.
        seed: Of the random data.
        total_bytes: What all sets should take together; at least two sets are made.

    Returns:
        At most `MOST_SETS` sets of A, B and an output, each in buffers of its own.
    """
    import torch

    signature = problem.signature
    one = problem.batch * (
        signature.a.bytes_of(problem.m * problem.k)
        + signature.b.bytes_of(problem.k * problem.n)
        + signature.out.bytes_of(problem.m * problem.n)
    )
    count = min(MOST_SETS, max(2, -(-total_bytes // one)))
    generator = torch.Generator(device=device).manual_seed(seed)
    return [_operands(problem, device, generator) for _ in range(count)]


def _operands(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    import torch

    signature, lead = problem.signature, _lead(problem)
    a = _matrix(problem, signature.a, problem.m, problem.k, device, generator,
                row_major=signature.layout.a_row_major)  # fmt: skip
    b = _matrix(problem, signature.b, problem.k, problem.n, device, generator,
                row_major=signature.layout.b_row_major)  # fmt: skip
    out = torch.empty(
        (*lead, problem.m, problem.n), dtype=torch_dtype(signature.out), device=device
    )
    return a, b, out


def poison(out: torch.Tensor) -> None:
    """Fill every byte with 0xFF, which is NaN or -1, so that what is not written shows."""
    import torch

    out.view(torch.uint8).fill_(0xFF)


def _lead(problem: Problem) -> tuple[int, ...]:
    return (problem.batch,) if problem.signature.op is Op.BMM else ()


def _matrix(
    problem: Problem,
    dtype: DType,
    rows: int,
    columns: int,
    device: str,
    generator: torch.Generator,
    *,
    row_major: bool,
) -> torch.Tensor:
    extents = (rows, columns) if row_major else (columns, rows)
    shape = (*_lead(problem), *extents)
    values = _values(problem, dtype, shape, device, generator)
    return values if row_major else values.mT


def _values(
    problem: Problem,
    dtype: DType,
    shape: tuple[int, ...],
    device: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Random values whose sums of ``k`` products the output type can hold."""
    import torch

    out = problem.signature.out
    if dtype.is_integer:
        if out is DType.INT32:
            info = torch.iinfo(torch_dtype(dtype))
            return torch.randint(
                info.min, info.max + 1, shape, generator=generator, device=device,
                dtype=torch_dtype(dtype),
            )  # fmt: skip
        if out is not DType.INT8:
            return torch.randint(
                -8, 9, shape, generator=generator, device=device, dtype=torch_dtype(dtype)
            )
        density = min(1.0, _INT8_RESULT / problem.k**0.5)
        kept = torch.rand(shape, generator=generator, device=device) < density
        signs = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
        return (kept * signs).to(torch_dtype(dtype))
    scale = 1.0
    if out.is_fp8:
        scale = min(1.0, (_FP8_RESULT / problem.k**0.5) ** 0.5)
    values = torch.randn(shape, generator=generator, device=device) * scale
    return values.to(torch_dtype(dtype))
