"""Routing: sorts tokens' rows by expert, and sums each token's rows.

A token has one row with each of its experts. If the caller passes each token's rows, they are added
in the token's order: by `gathered_rows`, or, while torch.compile traces and no kernel serves, by
operators that Inductor fuses into one kernel. If only each row's token is known, atomic operations
add rows in any order.

Weighted sums are an operator, ``torch.ops.nvgemm_moe.gathered_rows``, by a prebuilt kernel if one
serves, else by torch. torch.compile keeps it in its graph. If nothing observes operators, its
implementation is called directly.

In small layers, launching torch's operators takes most of the time, so this module uses few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..gemm.extra_operands import ExtraOperands
from ..gemm.moe_operators import GATHERED_ROWS
from ..gemm.problem import Op
from . import kernels
from .kernels import BY_TORCH, SUMMED_BY_TORCH, row_major, warn_once, was_warned
from .operators import (
    define,
    dense_like,
    is_direct,
    multiplies_into_fp32,
    pieces,
    rounded,
    taken_rows,
    widen,
)


class Routing(NamedTuple):
    """Rows sorted by expert, k for each token.

    Attributes:
        offsets: End of each expert's rows, int32 [experts].
        order: Each row's choice, as an index into the flattened choices, int64 [rows].
        indices: Each row's token, int32 [rows].
        token_rows: Each token's rows, int32 [tokens, k].
    """

    offsets: torch.Tensor
    order: torch.Tensor
    indices: torch.Tensor
    token_rows: torch.Tensor


def sort_by_expert(chosen: torch.Tensor, experts: int) -> Routing:
    """Assigns a row to each choice, sorted by expert.

    Args:
        chosen: Each token's experts, int32 or int64 [tokens, k]. A choice outside 0..experts - 1
            gets a row behind the last end.
        experts: Number of experts, 1 or more.

    Returns:
        Arguments for `experts`. An expert's rows are in token order.

    Raises:
        TypeError: If ``chosen`` has another dtype.
        ValueError: If it is not a matrix, or k or ``experts`` is 0.
    """
    if chosen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sort_by_expert: chosen is {chosen.dtype}, must be int32 or int64")
    if chosen.dim() != 2 or chosen.shape[1] == 0:
        raise ValueError(
            f"sort_by_expert: chosen is {tuple(chosen.shape)}, must be [tokens, k] with k at least "
            "1"
        )
    if experts < 1:
        raise ValueError(f"sort_by_expert: experts is {experts}, must be 1 or more")
    # Sorting 16-bit numbers takes half the time. -1 becomes the number of experts, which sorts
    # behind all experts.
    dtype = torch.int16 if experts < torch.iinfo(torch.int16).max else torch.int32
    keys = chosen.reshape(-1).clamp(-1, experts).to(dtype).remainder(experts + 1)
    ordered, order = torch.sort(keys, stable=True)
    expert_ids = torch.arange(experts, device=chosen.device, dtype=dtype)
    offsets = torch.searchsorted(ordered, expert_ids, right=True, out_int32=True)
    counted = torch.arange(order.shape[0], device=chosen.device, dtype=torch.int32)
    token_rows = torch.empty_like(counted).scatter_(0, order, counted).view(chosen.shape)
    indices = torch.div(order, chosen.shape[1], rounding_mode="floor").to(torch.int32)
    return Routing(offsets, order, indices, token_rows)


def is_owned(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a mask [count] that is True for rows that an expert has."""
    row_numbers = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return row_numbers < offsets[-1]


def weighted_rows(
    matrix: torch.Tensor,
    indices: torch.Tensor | None,
    routing_weights: torch.Tensor | None,
    *,
    by_kernel: bool,
) -> torch.Tensor:
    """Returns matrix rows, each times its routing weight, rounded once.

    Args:
        matrix: Matrix [any number, dim].
        indices: Selected rows [rows]; None for all, in order.
        routing_weights: Each row's routing weight [rows]; None for unweighted rows.
        by_kernel: Use `gathered_rows`; otherwise Inductor fuses operators.

    Returns:
        Matrix [rows, dim] in the matrix's dtype.
    """
    if routing_weights is not None and by_kernel:
        return gathered_rows(
            matrix, None if indices is None else indices[:, None], routing_weights[:, None]
        )
    gathered = taken_rows(matrix, indices)
    if routing_weights is None:
        return gathered
    return rounded(widen(gathered) * routing_weights[:, None], matrix.dtype)


def owned_rows(token_rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns each token's rows, with numbers past the last row for rows that no expert has.

    So `gathered_rows` adds nothing for them. The matrix has as many rows as ``token_rows``
    has elements.
    """
    return torch.add(token_rows, token_rows >= offsets[-1], alpha=token_rows.numel())


def sum_rows_of_tokens(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    token_rows: torch.Tensor | None,
    routing_weights: torch.Tensor | None,
    tokens: int,
    *,
    is_compiled: bool,
    by_kernel: bool,
) -> torch.Tensor:
    """Adds each token's rows that an expert has, each times its routing weight, in fp32.

    Args:
        rows: Matrix [rows, dim]. Rows past the last end may hold anything.
        offsets: End of each expert's rows.
        indices: Each row's token.
        token_rows: Each token's rows [tokens, k], or None if unknown. With ``by_kernel``, as
            returned by `owned_rows`.
        routing_weights: Routing weights, shaped as ``token_rows``, or [rows] without these; None to
            add unweighted rows.
        tokens: Number of tokens.
        is_compiled: True if Inductor fuses operators, which then must be functional.
        by_kernel: Use `gathered_rows`.

    Returns:
        Matrix [tokens, dim] in the rows' dtype, rounded once.
    """
    if token_rows is None:
        return _sum_by_index(
            rows, offsets, indices, routing_weights, tokens, in_pieces=not is_compiled
        )
    if by_kernel:
        return gathered_rows(rows, token_rows, routing_weights)
    owned = token_rows < offsets[-1]
    if routing_weights is not None:
        routing_weights = torch.where(owned, routing_weights, 0)
    return _sum_by_token(rows, token_rows, owned, routing_weights)


def _sum_by_token(
    rows: torch.Tensor,
    token_rows: torch.Tensor,
    owned: torch.Tensor,
    routing_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Sums by [tokens, dim] operators only, which Inductor fuses into one kernel."""
    sums = None
    for choice in range(token_rows.shape[1]):
        gathered = rows.index_select(0, token_rows[:, choice])
        exact = widen(torch.where(owned[:, choice, None], gathered, 0))
        if routing_weights is not None:
            exact = exact * routing_weights[:, choice, None]
        sums = exact if sums is None else sums + exact
    assert sums is not None
    return rounded(sums, rows.dtype)


def _sum_by_index(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    routing_weights: torch.Tensor | None,
    tokens: int,
    *,
    in_pieces: bool,
) -> torch.Tensor:
    owned = is_owned(offsets, rows.shape[0])[:, None]
    sums = widen(rows.new_zeros((tokens, rows.shape[1])))
    for piece in pieces(*rows.shape) if in_pieces else [slice(None)]:
        exact = torch.where(owned[piece], widen(rows[piece]), 0)
        if routing_weights is not None:
            exact = exact * routing_weights[piece, None]
        # Not in place, because torch 2.11 compiles no gradient of in-place writes.
        sums = sums.index_add(0, indices[piece], exact)
    return rounded(sums, rows.dtype)


def gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, routing_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds matrix rows, each times its weight, in fp32, or fp64 for fp64, and rounds once.

    Args:
        matrix: Matrix [any number, n].
        rows: Rows to add: int32 or int64 [m, k]. A row outside the matrix, such as -1, adds
            nothing. None takes every row once, in order, and needs weights [m, 1].
        routing_weights: Routing weights, floating, shaped as ``rows``; None to add unweighted rows.

    Returns:
        Matrix [m, n] in the matrix's dtype.
    """
    if is_direct(matrix, rows, routing_weights):
        return _gathered_rows(matrix, rows, routing_weights)
    result: torch.Tensor = torch.ops.nvgemm_moe.gathered_rows(matrix, rows, routing_weights)
    return result


def _gathered_rows(
    matrix: torch.Tensor, rows: torch.Tensor | None, routing_weights: torch.Tensor | None
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
    if routing_weights is None:
        fp32_weights = torch.ones(shape, device=matrix.device, dtype=torch.float32)
    else:
        fp32_weights = widen(routing_weights).contiguous()
    extras = ExtraOperands(rows=indices.contiguous())
    reason = kernels.launch(Op.GATHERED_MM, fp32_weights, row_major(matrix), out, extras)
    if not reason:
        return out
    del out  # torch allocates the result
    if not was_warned(BY_TORCH):  # that warning covers this
        warn_once(SUMMED_BY_TORCH, reason)
    return _gathered_by_torch(matrix, rows, routing_weights)


def _fake_gathered_rows(matrix: torch.Tensor, rows: torch.Tensor | None, _: Any) -> torch.Tensor:
    return matrix.new_empty(((matrix if rows is None else rows).shape[0], matrix.shape[1]))


def _gathered_by_torch(
    matrix: torch.Tensor, rows: torch.Tensor | None, routing_weights: torch.Tensor | None
) -> torch.Tensor:
    """Computes `gathered_rows` from a copy of all rows.

    ``embedding_bag`` would do this, but requires weights in the matrix's dtype.
    """
    if rows is None:
        assert routing_weights is not None
        return _weighted(matrix, routing_weights, dense_like(matrix))
    inside = (rows >= 0) & (rows < matrix.shape[0])
    indices = torch.where(inside, rows, 0)
    gathered = matrix.index_select(0, indices.reshape(-1)).reshape(*rows.shape, matrix.shape[1])
    gathered = torch.where(inside[..., None], gathered, 0)
    if routing_weights is None:
        # Torch adds 16-bit values in fp32. Under CUDA's autocast the sum's dtype is fp32.
        return rounded(gathered.sum(1), matrix.dtype)
    routing_weights = torch.where(inside, routing_weights, 0)
    if routing_weights.shape[1] == 1:
        single = gathered.squeeze(1)
        return _weighted(single, routing_weights, single)
    if not multiplies_into_fp32(matrix):
        return rounded((widen(gathered) * routing_weights.unsqueeze(2)).sum(1), matrix.dtype)
    # Torch multiplies 16 bits with 16 bits. A second product adds the weights' remaining bits.
    near = routing_weights.to(matrix.dtype)
    sums = torch.bmm(near.unsqueeze(1), gathered, out_dtype=torch.float32)
    if routing_weights.dtype is not matrix.dtype:
        rest = torch.where(near.isfinite(), routing_weights - near, 0).to(matrix.dtype)
        sums += torch.bmm(rest.unsqueeze(1), gathered, out_dtype=torch.float32)
    return sums.squeeze(1).to(matrix.dtype)


def _weighted(rows: torch.Tensor, routing_weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiplies rows by weights [rows, 1] in one operator, without an fp32 matrix."""
    product: torch.Tensor = torch.mul(rows, widen(routing_weights), out=out)
    return product


define(
    GATHERED_ROWS,
    "Tensor matrix, Tensor? rows, Tensor? weights",
    _gathered_rows,
    _fake_gathered_rows,
)
