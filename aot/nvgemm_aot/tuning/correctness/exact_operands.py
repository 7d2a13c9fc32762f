"""Operands with a known correct result for each element, used to check kernels.

Kernels are timed on other operands. Two checks tell correct kernels from wrong ones:

- Whole numbers without 0. The second half along k repeats the first in another order with B
  negated, so nearly all products cancel: partial sums reach hundreds while results are small. For
  any summation order that does not depend on the values, every partial sum is exact in an
  accumulator with `SUM_BITS` bits, so a correct result is equal bit by bit. (Summing all positive
  products first would overflow that; no kernel sorts.) If k is small and the output is wide enough,
  nothing cancels, and results exceed bf16's precision. A kernel that skips or repeats a k leaves
  products over in every element. A kernel that rounds partial sums to fewer bits, such as bf16's,
  loses large sums' low bits, which shows in the small result. Any two rows or columns have
  different results.
- Few products per element: random numbers with all their bits, and one NaN each in A and B. The
  accumulator's error is small then, which reveals a wrong conversion, a slightly wrong scale, a
  result rounded twice or a dropped NaN.

In groups along k, products within a group do not cancel: results are as large as partial sums,
which are exact too, and are rounded once.

Integer sums are exact, so the second check uses random integers for them. Without negative numbers
nothing cancels, so uint8 has only the second check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import DType, Op, Problem
from nvgemm_runtime.gemm.roles import Role, role_shape

from .block_scales import fp4_of, scales_of_powers
from .judgement import Expected, expect, expect_sums, find_fault
from .random_operands import Operands, make_extras, make_operands, poison, random_extras

if TYPE_CHECKING:
    import torch

SUM_BITS = 12
"""Bits of whole-number partial sums for k up to 65536: they stay below 4096. Hopper keeps 14 for
fp8 (`judgement.FRACTION_BITS_OF_FEW`)."""

PEAK = 450.0
"""Standard deviation for partial sums in the middle of k, if the dtype's values are large enough:
more than bf16's 8 bits hold. 4096 is nine deviations, which a normal number exceeds once in
5e18."""

ONE_SIGN_K = 512
"""Largest k for which all products in the first half share their column's sign. With random signs,
sums of so few products would seldom exceed 256, bf16's limit for exact whole numbers. A kernel that
rounds sums to bf16 would then pass if the result has few elements."""

_WIDE_OUTS = (DType.FP32, DType.FP16)
"""Float outputs with more bits than bf16, for which nothing needs to cancel up to `ONE_SIGN_K`."""

TERMS = 4
"""Products per element in the second check."""

_LARGEST = 15
"""Largest value drawn, if the dtypes represent it and the next exactly."""

_LEAST_OF_B = 2
"""Largest value drawn for B if k is so large that partial sums are large anyway. A product that
does not cancel adds one value of B to a result."""

_LARGEST_OF_B_FOR_INT8 = 4
"""Largest value drawn for B if k is small and results are int8, so that most results fit."""


@dataclass(frozen=True, kw_only=True)
class OperandCheck:
    """Operands and expected result; the name is for messages.

    ``expected_sums`` are row sums, the second result of a gate's gradient with sums.
    """

    name: str
    operands: Operands
    expected: Expected
    expected_sums: Expected | None = None

    def prepare(self) -> None:
        """Overwrites results, so that elements a kernel does not write show."""
        poison(self.operands[2])
        if self.expected_sums is not None:
            self.operands[-1].zero_()  # `Role.SUMS` is last and must be zero

    def fault(self, result: torch.Tensor) -> str | None:
        """Describes the fault in a kernel's result, or returns None."""
        fault = find_fault(result, self.expected)
        if fault is not None or self.expected_sums is None:
            return fault
        fault = find_fault(self.operands[-1].sum(1), self.expected_sums)
        return fault and f"sums of rows: {fault}"


WHOLE_NUMBERS, FEW_PRODUCTS, INTEGERS = "whole numbers", "few products", "random integers"


def make_checks(problem: Problem, device: str, *, seed: int) -> list[OperandCheck]:
    """Builds a problem's checks; the last has random numbers."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    signature, checks = problem.signature, []

    def add(name: str, operands: Operands, terms: int = 0) -> None:
        expected = expect(operands, signature, terms=terms)
        sums = expect_sums(operands, signature, terms=terms)
        checks.append(
            OperandCheck(name=name, operands=operands, expected=expected, expected_sums=sums)
        )

    if signature.op is Op.GATHERED_MM:
        add(WHOLE_NUMBERS, _whole_rows(problem, device, generator))
    elif signature.a is not DType.UINT8:
        add(WHOLE_NUMBERS, _whole_numbers(problem, device, generator))
    if signature.a.is_integer:
        add(INTEGERS, make_operands(problem, device, generator))
    else:
        operands = _few_products(problem, device, generator)
        add(FEW_PRODUCTS, operands, TERMS * signature.a.packed)
    return checks


def _whole_numbers(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    import torch

    signature = problem.signature
    half = problem.k // 2
    partner = torch.randperm(half, generator=generator, device=device) + problem.k - half

    def numbers(shape: tuple[int, ...], largest: int) -> torch.Tensor:
        drawn = torch.randint(
            -largest, largest, shape, generator=generator, device=device, dtype=torch.int8
        )
        return drawn + (drawn >= 0)  # none is 0

    def complete(a: torch.Tensor, b: torch.Tensor) -> Operands:
        extras = make_extras(
            problem,
            device,
            generator,
            lambda shape: torch.randint(-2, 3, shape, generator=generator, device=device),
            lambda role: _power_scales(problem, role, device, generator),
        )
        return _complete_operands(problem, a, b, device, extras)

    shape_a, shape_b = shapes_with_k_last(problem)
    largest_a, largest_b = _largest_numbers(problem)
    a, b = numbers(shape_a, largest_a), numbers(shape_b, largest_b)
    if problem.k <= ONE_SIGN_K:
        a, b = a.abs(), b.abs() * numbers((*shape_b[:-2], shape_b[-2], 1), 1)
    if not _needs_cancelling(problem):
        return complete(a, b)
    share = _share_of_changed(signature.out, half, largest_b)
    changed = torch.rand((*shape_a[:-1], half), generator=generator, device=device) < share
    if half:  # at least one per row
        column = torch.randint(half, (*shape_a[:-1], 1), generator=generator, device=device)
        changed.scatter_(-1, column, True)
    first = a[..., :half]
    change = first.sign()
    if problem.k <= ONE_SIGN_K:  # otherwise a column's results share one sign
        change = torch.where(first > 1, numbers(tuple(first.shape), 1), change)
    a[..., partner] = first + change * changed
    b[..., partner] = -b[..., :half]
    return complete(a, b)


def _whole_rows(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    """Selects rows of B several times, once or never, plus some out-of-range rows.

    Sums are whole numbers that fp32 represents. Out-of-range rows have weight infinity.
    """
    import torch

    def drawn(shape: tuple[int, ...], least: int, end: int) -> torch.Tensor:
        return torch.randint(least, end, shape, generator=generator, device=device)

    shape_a, shape_b = shapes_with_k_last(problem)
    count = shape_b[-1]
    rows = drawn(shape_a, -count // 8, count + count // 8 + 1)
    a = drawn(shape_a, -_LARGEST, _LARGEST + 1).float()
    a[(rows < 0) | (rows >= count)] = math.inf
    return _complete_operands(problem, a, drawn(shape_b, -8, 9), device, [rows.to(torch.int32)])


def _needs_cancelling(problem: Problem) -> bool:
    return problem.k > ONE_SIGN_K or problem.signature.out not in _WIDE_OUTS


def _largest_numbers(problem: Problem) -> tuple[int, int]:
    """Returns the largest values of A and B for which partial sums stay below `PEAK`.

    If products share one sign, all sums fit into `SUM_BITS`.
    """
    signature = problem.signature
    most_a = min(_LARGEST, _largest_exact(signature.a) - 1)
    # For small k, most results have an exact value in their dtype.
    most_b = min(_LARGEST, _largest_exact(signature.b), _largest_exact(signature.out) // 2)
    if signature.out is DType.INT8:
        most_b = min(most_b, _LARGEST_OF_B_FOR_INT8)
    a, b = 1, _LEAST_OF_B

    def fits_peak(a: int, b: int) -> bool:
        if problem.k <= ONE_SIGN_K:
            count = problem.k // 2 if _needs_cancelling(problem) else problem.k
            return (a + 1) * b * count < 1 << SUM_BITS
        return _mean_square(a) * _mean_square(b) * problem.k / 2 <= PEAK**2

    while a < most_a and fits_peak(a + 1, b):
        a += 1
    while b < most_b and fits_peak(a, b + 1):
        b += 1
    return a, b


def _largest_exact(dtype: DType) -> int:
    """Returns the number up to which a dtype represents all whole numbers, at most 32."""
    fraction_bits = dtype.row.fraction_bits
    return 2 * (_LARGEST + 1) if fraction_bits is None else min(32, 2 ** (fraction_bits + 1))


def _mean_square(largest: int) -> float:
    return (largest + 1) * (2 * largest + 1) / 6


def _share_of_changed(out: DType, half: int, largest_b: int) -> float:
    """Returns the share of products that do not cancel; each adds one value of B to a result."""
    squares = out.row.result_deviation**2 / _mean_square(largest_b)
    return min(0.5, squares / max(1, half))


def _power_scales(
    problem: Problem, role: Role, device: str, generator: torch.Generator
) -> torch.Tensor:
    """Returns power-of-two scales that differ by row and, for block scales, by block."""
    import torch

    scales = problem.signature.scales
    assert scales is not None
    shape = role_shape(problem, role)
    if scales.block is None:
        drawn = torch.randint(-1, 2, shape, generator=generator, device=device)
        return torch.exp2(drawn.float())
    rows = problem.m if role is Role.SCALE_A else problem.n
    of_rows = torch.randint(-1, 2, (rows, 1), generator=generator, device=device)
    blocks = torch.arange(-(-problem.k // scales.block), device=device)
    of_blocks = (blocks * 7 + blocks // 5) % 5 - 2  # A's exponents cancel B's
    sign = 1 if role is Role.SCALE_A else -1
    return scales_of_powers(of_rows + sign * of_blocks, scales.dtype)


def _few_products(problem: Problem, device: str, generator: torch.Generator) -> Operands:
    import torch

    signature = problem.signature
    shape_a, shape_b = shapes_with_k_last(problem)
    packed = signature.a.packed

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        if packed > 1:  # every code
            shape = (*shape[:-1], shape[-1] // packed)
            return torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
        return torch.randn(shape, generator=generator, device=device)

    a, b = drawn(shape_a), drawn(shape_b)
    columns = torch.randint(a.shape[-1], (*a.shape[:-1], TERMS), generator=generator, device=device)
    a = torch.zeros_like(a).scatter_(-1, columns, a.gather(-1, columns))
    has_activation = signature.epilogue is not None and signature.epilogue.activation is not None
    if packed == 1 and (signature.is_gated or not has_activation):
        for matrix in (a, b):
            _plant_nan(matrix, generator, device)

    extras = random_extras(problem, device, generator, terms=TERMS * packed)
    return _complete_operands(problem, a, b, device, extras)


def _plant_nan(matrix: torch.Tensor, generator: torch.Generator, device: str) -> None:
    """Puts a NaN into one of the first matrix's rows, unless it has only one row."""
    import torch

    while matrix.dim() > 2:
        matrix = matrix[0]
    if matrix.shape[0] > 1:
        row, column = (
            int(torch.randint(extent, (), generator=generator, device=device))
            for extent in matrix.shape
        )
        matrix[row, column] = math.nan


def shapes_with_k_last(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns operand shapes with k last in both; extents count values."""
    batch = (problem.batch,) if problem.signature.op is Op.BMM else ()
    groups = (problem.groups,) if problem.signature.op.groups_rows else ()
    if problem.signature.op is Op.GATHERED_MM:
        return (problem.m, problem.k), (problem.n, problem.m * problem.k)
    return (*batch, problem.m, problem.k), (*batch, *groups, problem.n, problem.k)


def _complete_operands(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, device: str, extras: Iterable[torch.Tensor]
) -> Operands:
    """Converts A and B to their dtypes and layouts, and adds the other operands."""
    import torch

    signature = problem.signature
    a, b = _convert(a, signature.a), _convert(b, signature.b)
    a = a if signature.layout.a_row_major else a.mT.contiguous().mT
    b = b.mT.contiguous() if signature.layout.b_row_major else b.mT
    out = torch.empty(
        role_shape(problem, Role.OUT), dtype=torch_dtype(signature.out), device=device
    )
    return a, b, out, *extras


def _convert(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    import torch

    if dtype is not DType.FP4_E2M1:
        if values.dtype is torch.int8 and not dtype.is_integer:
            values = values.half()  # represents them all, and every device casts it
        return values.to(torch_dtype(dtype))
    return values.view(torch_dtype(dtype)) if values.dtype is torch.uint8 else fp4_of(values)
