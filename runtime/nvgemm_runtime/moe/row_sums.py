"""Weighted sums of matrix rows: by a prebuilt kernel if one serves, else by torch.

They are an operator, ``torch.ops.nvgemm_moe.gathered_rows``, so torch.compile keeps them in its
graph. If nothing observes operators, its implementation is called directly.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.extra_operands import ExtraOperands
from ..gemm.moe_operators import GATHERED_ROWS
from ..gemm.problem import Op
from . import kernels
from .by_torch import gathered_by_torch
from .kernels import BY_TORCH, SUMMED_BY_TORCH, row_major, warn_once, was_warned
from .operators import define, is_direct, widen


def gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds matrix rows, each times its weight, in fp32, or fp64 for fp64, and rounds once.

    Args:
        matrix: Matrix [any number, n].
        rows: Rows to add: int32 or int64 [m, k]. A row outside the matrix, such as -1, adds
            nothing. None takes every row once, in order, and needs weights [m, 1].
        weights: Routing weights, floating, shaped as ``rows``; None to add unweighted rows.

    Returns:
        Matrix [m, n] in the matrix's dtype.
    """
    if is_direct(matrix, rows, weights):
        return _gathered_rows(matrix, rows, weights)
    result: torch.Tensor = torch.ops.nvgemm_moe.gathered_rows(matrix, rows, weights)
    return result


def _gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    count = matrix.shape[0]
    shape = (count, 1) if rows is None else rows.shape
    out = matrix.new_empty((shape[0], matrix.shape[1]))
    if 0 in (matrix.numel(), *shape):
        return out.zero_()
    if rows is None:
        indices = torch.arange(count, device=matrix.device, dtype=torch.int32)[:, None]
    else:  # an index that does not fit 32 bits is outside as well
        indices = (rows if rows.dtype is torch.int32 else rows.clamp(-1, count)).to(torch.int32)
    if weights is None:
        factors = torch.ones(shape, device=matrix.device, dtype=torch.float32)
    else:
        factors = widen(weights).contiguous()
    extras = ExtraOperands(rows=indices.contiguous())
    reason = kernels.launch(Op.GATHERED_MM, factors, row_major(matrix), out, extras)
    if not reason:
        return out
    del out  # torch allocates the result
    if not was_warned(BY_TORCH):  # that warning covers this
        warn_once(SUMMED_BY_TORCH, reason)
    return gathered_by_torch(matrix, rows, weights)


def _fake_gathered_rows(matrix: torch.Tensor, rows: torch.Tensor | None, _: Any) -> torch.Tensor:
    return matrix.new_empty(((matrix if rows is None else rows).shape[0], matrix.shape[1]))


define(
    GATHERED_ROWS,
    "Tensor matrix, Tensor? rows, Tensor? weights",
    _gathered_rows,
    _fake_gathered_rows,
)
