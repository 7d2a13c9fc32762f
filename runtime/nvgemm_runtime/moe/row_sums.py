"""Sums of a matrix' rows, each times its weight: by a prebuilt kernel if one serves, else by torch.

They are an operator, ``torch.ops.nvgemm_moe.gathered_rows``, so torch.compile keeps them in its
graph; where nothing observes operators, what it runs is called itself.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gemm.moe_operators import GATHERED_ROWS
from ..gemm.problem import Op
from . import launching
from .by_torch import gathered_by_torch
from .launching import BY_TORCH, SUMMED_BY_TORCH, Extras, define, row_major, warn_once, was_warned
from .operators import is_direct, widen


def gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Add rows of a matrix, each times its weight, in fp32 (of fp64 in that), and round once.

    Args:
        matrix: Matrix [any number, n].
        rows: Which rows to add: int32 or int64 [m, k]. One outside the matrix, such as -1, adds
            nothing. None for each row by itself, in order; then there are weights [m, 1].
        weights: Factors, floating, of the shape of ``rows``; None to add rows as they are.

    Returns:
        Matrix [m, n] of the matrix' type.
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
        named = torch.arange(count, device=matrix.device, dtype=torch.int32)[:, None]
    else:  # what 32 bits do not hold is outside as well
        named = (rows if rows.dtype is torch.int32 else rows.clamp(-1, count)).to(torch.int32)
    if weights is None:
        factors = torch.ones(shape, device=matrix.device, dtype=torch.float32)
    else:
        factors = widen(weights).contiguous()
    extras = Extras(rows=named.contiguous())
    reason = launching.launch(Op.GATHERED_MM, factors, row_major(matrix), out, extras)
    if not reason:
        return out
    del out  # torch makes its own
    if not was_warned(BY_TORCH):  # of which there is a warning then
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
