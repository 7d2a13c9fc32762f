"""Grouped products of experts: by a prebuilt kernel if one serves, else by torch.

They are operators, ``torch.ops.nvgemm_moe.rows``, ``added_rows`` and ``columns``, so torch.compile
keeps them in its graph; where nothing observes operators, what they run is called itself. The
kernel is looked up where they run, once for each problem. Those with a gate are in `gate_products`,
and their operators in `gate_operators`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.extra_operands import check_offset_values
from ..gemm.moe_operators import ADDED_ROWS, COLUMNS, ROWS
from ..gemm.problem import Op
from ..settings import is_debugging
from . import launching
from .by_torch import columns_by_torch, rows_by_torch
from .launching import (
    BY_TORCH,
    Extras,
    define,
    launch_groups,
    row_major,
    warn_once,
    with_unit_stride,
)
from .operators import is_direct


def rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of each group with the group's matrix, and add its bias.

    Args:
        a: Matrix [m, k], the groups' rows one after the other.
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        bias: A row of n for each group, [groups, n], of the operands' type. Where no kernel adds
            it, torch does, to the rounded product.

    Returns:
        Matrix [m, n] of the operands' type; undefined in rows past the last end.
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
    """`rows` added to another such product, in the memory of that one; see `add_rows`.

    Args:
        a: Matrix [m, k], the groups' rows one after the other.
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
        other_a: Matrix [m, p] of the other product.
        other_b: Matrices [groups, p, n] of the other product.

    Returns:
        Matrix [m, n] of the operands' type; undefined in rows past the last end.
    """
    if is_direct(a, b, offsets, other_a, other_b):
        return _added_rows(a, b, offsets, other_a, other_b)
    result: torch.Tensor = torch.ops.nvgemm_moe.added_rows(a, b, offsets, other_a, other_b)
    return result


def add_rows(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> None:
    """Add what `rows` gives to a matrix, in place; not to be traced.

    A kernel may get one matrix as addend and result: a tile has read an element of the addend
    before it writes the same element of the result, and no other tile writes it. At the end of a
    group a tile also reads rows of the next one, written or not, and stores nothing of them.

    Args:
        out: Matrix [m, n] of the operands' type. Where no kernel adds to it, torch does, the
            rounded product.
        a: Matrix [m, k].
        b: Matrices [groups, k, n].
        offsets: End of each group along m, int32 [groups].
    """
    is_empty = 0 in (a.numel(), b.numel())
    if is_empty or launch_groups(out, a, b, offsets, out, None, adds_matrix=True):
        out.add_(rows(a, b, offsets))


def columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply, for each group, the transposed rows of one matrix with those of another.

    Args:
        a: Matrix [m, p].
        b: Matrix [m, q].
        offsets: End of each group along m, int32 [groups].

    Returns:
        Matrices [groups, p, q] of the operands' type; zero for a group with no row.
    """
    if is_direct(a, b, offsets):
        return _columns(a, b, offsets)
    result: torch.Tensor = torch.ops.nvgemm_moe.columns(a, b, offsets)
    return result


def owner_of_rows(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each of so many rows; the last one of rows past the last end."""
    places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True).clamp(max=offsets.shape[0] - 1)


def _rows(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if is_debugging():
        check_offset_values(offsets, a.shape[0])
    out = a.new_empty((a.shape[0], b.shape[2]))
    if 0 in a.shape or out.numel() == 0:
        return out.zero_()
    a, b = with_unit_stride(a), with_unit_stride(b)
    plain = Extras(offsets=offsets)
    if bias is None:
        extras = plain
    else:
        bias = bias.contiguous()
        extras = Extras(offsets=offsets, addend=bias)
    reason = launching.launch(Op.GROUPED_MM, a, b, out, extras)
    if not reason:
        return out
    if bias is not None:
        reason = launching.launch(Op.GROUPED_MM, a, b, out, plain)
    if reason:
        warn_once(BY_TORCH, reason)
        del out  # torch makes its own
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
    reason = launching.launch(Op.K_GROUPED_MM, a.t(), b, out, Extras(offsets=offsets))
    if not reason:
        return out
    warn_once(BY_TORCH, reason)
    return columns_by_torch(a, b, offsets)


def weight_gradient(
    grad: torch.Tensor, taken: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Gradient of weights [experts, columns of grad, columns of taken], as they lie in memory."""
    if weight.stride(-1) != 1 and weight.stride(-2) == 1:
        return columns(taken, grad, offsets).mT
    return columns(grad, taken, offsets)


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
