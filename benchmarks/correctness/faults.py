"""Faults to plant in a kernel's result.

If a fault is in what a kernel reads, the kernel itself runs on changed operands, so that its result
is rounded as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvgemm_aot.tuning.correctness.exact_operands import FEW_PRODUCTS, OperandCheck
from nvgemm_aot.tuning.correctness.judgement import reference
from nvgemm_runtime.gemm.problem import DType, Problem
from nvgemm_runtime.gemm.roles import extra_roles

if TYPE_CHECKING:
    import torch

Run = Callable[..., Any]
"""Computes a GEMM from A, B, the output and the rest, and returns the output."""

Plant = Callable[[Run, Problem, Sequence[OperandCheck], int, "torch.Tensor"], "torch.Tensor | None"]
"""Returns the faulty result for a kernel, a problem, its checks, a check's index and the right
result; None if the fault would change nothing or does not fit the check."""

TILE = 64
"""A stale tile's rows and columns."""

STEP = 128
"""Steps along k between two accumulator roundings."""

LEAST_BEHIND_STEP = 32
"""Least products behind the last rounding but one, which rounds minus their sum, so that results
are small. bf16 may hold a sum of fewer. The output's own rounding is the last."""

SCALE = 1.0625
"""Factor on floating-point results; integers double."""


def one_k_too_few(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor:
    """Leaves out the last k."""
    a, b, *others = checks[place].operands
    a = _copy(a)
    a.view(_bits(a))[..., -1] = 0
    return _launched(run, a, b, *others)


def stale_tile(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor | None:
    """Writes the previous launch's values, for the other check, into the last tile."""
    if len(checks) < 2:
        return None
    before = _launched(run, *checks[place - 1].operands)
    result = right.clone()
    result[..., -TILE:, -TILE:] = before[..., -TILE:, -TILE:]
    return result


def other_row(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor:
    """Reads a row of A from another matrix: the next row, or the only row reversed."""
    a, b, *others = checks[place].operands
    swapped, row = _copy(a), problem.m // 2
    rows = a.view(_bits(a))
    other = rows[..., (row + 1) % problem.m, :] if problem.m > 1 else rows[..., row, :].flip(-1)
    swapped.view(_bits(a))[..., row, :] = other
    return _launched(run, swapped, b, *others)


def wrong_scale(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor:
    """Scales every result before it is rounded."""
    signature = problem.signature
    value = reference(checks[place].operands, signature)
    if not signature.a.is_integer:
        return (value * SCALE).to(right.dtype)
    most = {DType.INT8: 127, DType.UINT8: 255, DType.INT32: 2**31 - 1}.get(signature.out, 2**62)
    return (value * 2).clamp(-most - 1, most).to(right.dtype)


def rounded_accumulator(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor | None:
    """Rounds the accumulator to bf16 after every `STEP` along k."""
    import torch

    signature = problem.signature
    wide = (DType.FP32, DType.FP16, DType.INT32)
    changes_nothing = problem.k < STEP + LEAST_BEHIND_STEP and signature.out not in wide
    if extra_roles(signature) or changes_nothing:
        return None
    a, b, *_ = checks[place].operands
    total = torch.zeros_like(right, dtype=torch.bfloat16)
    for first in range(0, problem.k, STEP):
        some = slice(first, first + STEP)
        total = (total + a[..., some].float() @ b[..., some, :].float()).bfloat16()
    if signature.out.is_integer:
        info = torch.iinfo(right.dtype)
        return total.double().round().clamp(info.min, info.max).to(right.dtype)
    return total.to(right.dtype)


def dropped_nan(
    run: Run, problem: Problem, checks: Sequence[OperandCheck], place: int, right: torch.Tensor
) -> torch.Tensor | None:
    """Writes 0 for NaN."""
    values = right.float()
    if checks[place].name != FEW_PRODUCTS or not bool(values.isnan().any()):
        return None
    return values.nan_to_num(0.0).to(right.dtype)


FAULTS: Mapping[str, Plant] = {
    "one k too few": one_k_too_few,
    "stale tile": stale_tile,
    "other row": other_row,
    "wrong scale": wrong_scale,
    "bf16 sums": rounded_accumulator,
    "NaN dropped": dropped_nan,
}
"""Faults by table column."""


def _launched(run: Run, a: Any, b: Any, out: torch.Tensor, *extras: Any) -> torch.Tensor:
    import torch

    result = torch.empty_like(out)
    run(a, b, result, *extras)
    return result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies with the same strides."""
    import torch

    copy = torch.empty_like(tensor, memory_format=torch.preserve_format)
    return copy.copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.dtype:
    """Returns an integer type as wide as a tensor's that can be indexed on every device."""
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return widths[tensor.element_size()]
