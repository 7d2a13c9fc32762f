"""Sorts tokens' rows by expert, and sums each token's rows.

A token has one row with each of its experts. If the caller passes each token's rows, they are added
in the token's order: by `row_sums.gathered_rows`, or, while torch.compile traces and no kernel
serves, by operators that Inductor fuses into one kernel. If only each row's token is known, atomic
operations add rows in any order.

In small layers, launching torch's operators takes most of the time, so this module uses few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .operators import pieces, rounded, taken_rows, widen
from .row_sums import gathered_rows


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
        by_kernel: Use `row_sums.gathered_rows`; otherwise Inductor fuses operators.

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

    So `row_sums.gathered_rows` adds nothing for them. The matrix has as many rows as ``token_rows``
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
        by_kernel: Use `row_sums.gathered_rows`.

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
    weights = None if routing_weights is None else torch.where(owned, routing_weights, 0)
    return _sum_by_choice(rows, token_rows, owned, weights)


def _sum_by_choice(
    rows: torch.Tensor, token_rows: torch.Tensor, owned: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sums by [tokens, dim] operators only, which Inductor fuses into one kernel."""
    sums = None
    for choice in range(token_rows.shape[1]):
        gathered = rows.index_select(0, token_rows[:, choice])
        exact = widen(torch.where(owned[:, choice, None], gathered, 0))
        if weights is not None:
            exact = exact * weights[:, choice, None]
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
