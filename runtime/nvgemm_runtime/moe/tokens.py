"""Rows of tokens: which expert has which, and the sums of each token's rows.

A token's rows lie apart, one with each expert that it goes to. Where the caller gives the rows of
each token, they are added in the token's order: by `row_sums.gathered_rows`, or, while
torch.compile traces and no kernel serves, by operators that Inductor joins into one kernel. Where
only the token of each row is known, rows are added by atomic operations, in no order.

In small layers, launching torch's operators takes most of the time, so few are used here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .operators import pieces, rounded, taken_rows, widen
from .row_sums import gathered_rows


class Routing(NamedTuple):
    """Rows sorted by expert, k a token.

    Attributes:
        offsets: End of each expert's rows, int32 [experts].
        order: The choice that each row is, of those counted token by token, int64 [rows].
        indices: The token of each row, int32 [rows].
        token_rows: The rows of each token, int32 [tokens, k].
    """

    offsets: torch.Tensor
    order: torch.Tensor
    indices: torch.Tensor
    token_rows: torch.Tensor


def sort_by_expert(chosen: torch.Tensor, experts: int) -> Routing:
    """Give each choice of a token a row, those of the first expert first.

    Args:
        chosen: Experts of each token, int32 or int64 [tokens, k]. The row of a choice that is not
            in 0..experts - 1 is behind the last end.
        experts: How many there are, 1 or more.

    Returns:
        What `experts` is given; rows of an expert are in the order of tokens.

    Raises:
        TypeError: If ``chosen`` is of another type.
        ValueError: If it is no matrix, or k or ``experts`` is 0.
    """
    if chosen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sort_by_expert: chosen is {chosen.dtype}, must be int32 or int64")
    if chosen.dim() != 2 or chosen.shape[1] == 0:
        raise ValueError(
            f"sort_by_expert: chosen is {tuple(chosen.shape)}, must be [tokens, k], and k not 0"
        )
    if experts < 1:
        raise ValueError(f"sort_by_expert: experts is {experts}, must be 1 or more")
    # Numbers of 16 bits are sorted in half the time. Both -1 and the number of experts become the
    # latter, which sorts behind all experts.
    dtype = torch.int16 if experts < torch.iinfo(torch.int16).max else torch.int32
    keys = chosen.reshape(-1).clamp(-1, experts).to(dtype).remainder(experts + 1)
    ordered, order = torch.sort(keys, stable=True)
    places = torch.arange(experts, device=chosen.device, dtype=dtype)
    offsets = torch.searchsorted(ordered, places, right=True, out_int32=True)
    counted = torch.arange(order.shape[0], device=chosen.device, dtype=torch.int32)
    token_rows = torch.empty_like(counted).scatter_(0, order, counted).view(chosen.shape)
    indices = torch.div(order, chosen.shape[1], rounding_mode="floor").to(torch.int32)
    return Routing(offsets, order, indices, token_rows)


def is_owned(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Which of so many rows an expert has."""
    places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return places < offsets[-1]


def weighted_rows(
    matrix: torch.Tensor,
    indices: torch.Tensor | None,
    scores: torch.Tensor | None,
    *,
    by_kernel: bool,
) -> torch.Tensor:
    """Rows of a matrix, each times its weight, rounded once.

    Args:
        matrix: Matrix [any number, dim].
        indices: Which rows [rows]; None for all, in order.
        scores: Weight of each row [rows]; None to give rows as they are.
        by_kernel: Whether `row_sums.gathered_rows` gives them; else Inductor joins operators.

    Returns:
        Matrix [rows, dim] of the matrix' type.
    """
    if scores is not None and by_kernel:
        return gathered_rows(matrix, None if indices is None else indices[:, None], scores[:, None])
    taken = taken_rows(matrix, indices)
    return taken if scores is None else rounded(widen(taken) * scores[:, None], matrix.dtype)


def owned_rows(token_rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The rows of each token; those that no expert has get numbers behind the last row's.

    So `row_sums.gathered_rows` adds nothing for them. There are as many as the matrix has rows.
    """
    return torch.add(token_rows, token_rows >= offsets[-1], alpha=token_rows.numel())


def sum_rows_of_tokens(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    token_rows: torch.Tensor | None,
    scores: torch.Tensor | None,
    tokens: int,
    *,
    is_compiled: bool,
    by_kernel: bool,
) -> torch.Tensor:
    """Add the rows of each token that an expert has, each times its weight, in fp32.

    Args:
        rows: Matrix [rows, dim]; what is behind the last end may be anything.
        offsets: End of each expert's rows.
        indices: The token of each row.
        token_rows: The rows of each token [tokens, k], with ``by_kernel`` `owned_rows` of them;
            None where they are not known.
        scores: The weight of each of ``token_rows``, or of each row [rows] without; None to add
            rows as they are.
        tokens: How many there are.
        is_compiled: Whether Inductor joins operators, which then must be functional.
        by_kernel: Whether `row_sums.gathered_rows` adds the rows of tokens.

    Returns:
        Matrix [tokens, dim] of the rows' type, rounded once.
    """
    if token_rows is None:
        return _sum_by_index(rows, offsets, indices, scores, tokens, in_pieces=not is_compiled)
    if by_kernel:
        return gathered_rows(rows, token_rows, scores)
    owned = token_rows < offsets[-1]
    weights = None if scores is None else torch.where(owned, scores, 0)
    return _sum_by_choice(rows, token_rows, owned, weights)


def _sum_by_choice(
    rows: torch.Tensor, token_rows: torch.Tensor, owned: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sums by operators of [tokens, dim] alone, which Inductor joins into one kernel."""
    sums = None
    for choice in range(token_rows.shape[1]):
        taken = rows.index_select(0, token_rows[:, choice])
        exact = widen(torch.where(owned[:, choice, None], taken, 0))
        if weights is not None:
            exact = exact * weights[:, choice, None]
        sums = exact if sums is None else sums + exact
    assert sums is not None
    return rounded(sums, rows.dtype)


def _sum_by_index(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor | None,
    tokens: int,
    *,
    in_pieces: bool,
) -> torch.Tensor:
    owned = is_owned(offsets, rows.shape[0])[:, None]
    sums = widen(rows.new_zeros((tokens, rows.shape[1])))
    for piece in pieces(*rows.shape) if in_pieces else [slice(None)]:
        exact = torch.where(owned[piece], widen(rows[piece]), 0)
        if scores is not None:
            exact = exact * scores[piece, None]
        # Not in place: of what was written in place, torch 2.11 compiles no gradient.
        sums = sums.index_add(0, indices[piece], exact)
    return rounded(sums, rows.dtype)
