"""Grouped GEMMs for experts: by a prebuilt kernel if one serves, else by torch.

They are operators, ``torch.ops.nvgemm_moe.rows``, ``added_rows`` and ``columns``, so torch.compile
keeps them in its graph. If nothing observes operators, their implementation is called directly. The
kernel is looked up at run time, once per problem. GEMMs with a gate are in `gated_products`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.extra_operands import ExtraOperands, check_offset_values
from ..gemm.moe_operators import ADDED_ROWS, COLUMNS, ROWS
from ..gemm.problem import Op
from ..settings import is_debugging
from . import kernels
from .kernels import (
    ALIGNMENT_BYTES,
    BY_TORCH,
    grouped_operands,
    row_major,
    warn_once,
    with_unit_stride,
)
from .operators import define, is_direct

_TORCH_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Operand dtypes that ``torch._grouped_mm`` supports, from its error message."""


def rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies each group's rows by the group's matrix, and adds its bias.

    Args:
        a: Matrix [m, k], sorted by group.
        b: Matrices [groups, k, n].
        offsets: Group ends along m, int32 [groups].
        bias: Bias row for each group, [groups, n], in the operands' dtype. If no kernel adds it,
            torch adds it to the rounded product.

    Returns:
        Matrix [m, n] in the operands' dtype; undefined in rows past the last end.
    """
    if is_direct(a, b, offsets, bias):
        return _rows(a, b, offsets, bias)
    result: torch.Tensor = torch.ops.nvgemm_moe.rows(a, b, offsets, bias)
    return result


def added_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    other_a: torch.Tensor,
    other_b: torch.Tensor,
) -> torch.Tensor:
    """Adds `rows` to another such product, in place; see `add_rows`.

    Args:
        a: Matrix [m, k], sorted by group.
        b: Matrices [groups, k, n].
        offsets: Group ends along m, int32 [groups].
        other_a: Matrix [m, p] for the other product.
        other_b: Matrices [groups, p, n] for the other product.

    Returns:
        Matrix [m, n] in the operands' dtype; undefined in rows past the last end.
    """
    if is_direct(a, b, offsets, other_a, other_b):
        return _added_rows(a, b, offsets, other_a, other_b)
    result: torch.Tensor = torch.ops.nvgemm_moe.added_rows(a, b, offsets, other_a, other_b)
    return result


def add_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> None:
    """Adds `rows` to a matrix, in place. Cannot be traced.

    A kernel may use one matrix as addend and result. A tile reads an element of the addend before
    it writes the same element of the result, and no other tile writes it. At a group's end a tile
    also reads the next group's rows, written or not, and stores nothing for them.

    Args:
        out: Matrix [m, n] in the operands' dtype. If no kernel adds to it, torch adds the rounded
            product.
        a: Matrix [m, k].
        b: Matrices [groups, k, n].
        offsets: Group ends along m, int32 [groups].
    """
    is_empty = 0 in (a.numel(), b.numel())
    if is_empty or kernels.launch(
        *grouped_operands(out, a, b, offsets, out, None, adds_matrix=True)
    ):
        out.add_(rows(a, b, offsets))


def columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiplies, for each group, one matrix's transposed rows by another's rows.

    Args:
        a: Matrix [m, p].
        b: Matrix [m, q].
        offsets: Group ends along m, int32 [groups].

    Returns:
        Matrices [groups, p, q] in the operands' dtype; zero for a group without rows.
    """
    if is_direct(a, b, offsets):
        return _columns(a, b, offsets)
    result: torch.Tensor = torch.ops.nvgemm_moe.columns(a, b, offsets)
    return result


def owner_of_rows(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Returns each row's group; the last group for rows past the last end."""
    row_numbers = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, row_numbers, right=True).clamp(max=offsets.shape[0] - 1)


def _rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if is_debugging():
        check_offset_values(offsets, a.shape[0])
    out = a.new_empty((a.shape[0], b.shape[2]))
    if 0 in a.shape or out.numel() == 0:
        return out.zero_()
    a, b = with_unit_stride(a), with_unit_stride(b)
    plain = ExtraOperands(offsets=offsets)
    if bias is None:
        extras = plain
    else:
        bias = bias.contiguous()
        extras = ExtraOperands(offsets=offsets, addend=bias)
    reason = kernels.launch(Op.GROUPED_MM, a, b, out, extras)
    if not reason:
        return out
    if bias is not None:
        reason = kernels.launch(Op.GROUPED_MM, a, b, out, plain)
    if reason:
        warn_once(BY_TORCH, reason)
        del out  # torch allocates the result
        out = rows_by_torch(a, b, offsets)
    return out if bias is None else out.add_(bias[owner_of_rows(offsets, a.shape[0])])


def _added_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    other_a: torch.Tensor,
    other_b: torch.Tensor,
) -> torch.Tensor:
    out = _rows(other_a, other_b, offsets, None)
    add_rows(out, a, b, offsets)
    return out


def _columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if is_debugging():
        check_offset_values(offsets, a.shape[0])
    out = a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))
    if a.shape[0] == 0 or out.numel() == 0:
        return out.zero_()
    a, b = row_major(a), row_major(b)
    reason = kernels.launch(Op.K_GROUPED_MM, a.t(), b, out, ExtraOperands(offsets=offsets))
    if not reason:
        return out
    warn_once(BY_TORCH, reason)
    return columns_by_torch(a, b, offsets)


def weight_gradient(
    grad: torch.Tensor, inputs: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Computes a weight gradient in the weight's layout.

    Its shape is [experts, ``grad``'s columns, ``inputs``'s columns].
    """
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        return columns(inputs, grad, offsets).mT
    return columns(grad, inputs, offsets)


def rows_by_torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Computes `rows` without a bias."""
    if not _torch_can_group(a):
        out = a.new_zeros((a.shape[0], b.shape[2]))
        for group, (start, end) in enumerate(_spans(offsets)):
            out[start:end] = a[start:end] @ b[group]
        return out
    n = b.shape[2]
    b = _aligned(b) if b.stride(-1) == 1 else _aligned(b.mT).mT
    a = _aligned(a)
    if a.shape[1] != b.shape[1]:  # only one operand was padded along k
        k = max(a.shape[1], b.shape[1])
        a = torch.nn.functional.pad(a, (0, k - a.shape[1]))
        b = _padded_rows(b, k)
    return torch._grouped_mm(a, b, offs=offsets)[:, :n].contiguous()


def columns_by_torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Computes `columns`."""
    if not _torch_can_group(a):
        out = a.new_zeros((offsets.shape[0], a.shape[1], b.shape[1]))
        for group, (start, end) in enumerate(_spans(offsets)):
            out[group] = a[start:end].t() @ b[start:end]
        return out
    p, q = a.shape[1], b.shape[1]
    a, b = _aligned(a), _aligned(b)
    return torch._grouped_mm(a.t(), b, offs=offsets)[:, :p, :q].contiguous()


def _torch_can_group(a: torch.Tensor) -> bool:
    """Returns True if ``torch._grouped_mm`` runs on the device. On the CPU a loop costs no more."""
    if a.device.type != "cuda" or a.dtype not in _TORCH_TYPES:
        return False
    return bool(torch.cuda.get_device_capability(a.device) >= (8, 0))


def _spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Returns each group's first row and end. Waits for the device."""
    ends = offsets.tolist()
    return list(zip([0, *ends], ends))


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a row-major matrix aligned for ``torch._grouped_mm``, zero-padded if needed."""
    unit = ALIGNMENT_BYTES // matrix.element_size()
    padding = -matrix.shape[-1] % unit
    if padding:
        return torch.nn.functional.pad(matrix, (0, padding))
    starts = matrix.data_ptr() % ALIGNMENT_BYTES == 0
    if starts and all(step % unit == 0 for step in matrix.stride()[:-1]) and matrix.stride(-1) == 1:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _padded_rows(b: torch.Tensor, k: int) -> torch.Tensor:
    return torch.nn.functional.pad(b, (0, 0, 0, k - b.shape[1]))


def _fake_rows(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[2]))


def _fake_columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))


define(ROWS, "Tensor a, Tensor b, Tensor offsets, Tensor? bias", _rows, _fake_rows)
define(
    ADDED_ROWS,
    "Tensor a, Tensor b, Tensor offsets, Tensor other_a, Tensor other_b",
    _added_rows,
    _fake_rows,
)
define(COLUMNS, "Tensor a, Tensor b, Tensor offsets", _columns, _fake_columns)
