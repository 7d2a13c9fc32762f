"""Where the experts' function rounds, and how many rows operators compute at a time."""

from __future__ import annotations

import torch

PIECE = 1 << 24
"""Elements of each fp32 tensor between products, except where all rows are computed at once."""


def widen(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in fp32, or in fp64 where it is that."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in a type; itself where it has it.

    Compiled by torch 2.11, a function whose result is ``to`` of its own type has no gradients.
    """
    return matrix if matrix.dtype is dtype else matrix.to(dtype)


def weighted(rows: torch.Tensor, scores: torch.Tensor | None, *, is_compiled: bool) -> torch.Tensor:
    """Rows times their weights, rounded once; they themselves without weights.

    Called, one operator does it, and no fp32 matrix is made.
    """
    if scores is None:
        return rows
    if is_compiled:
        return rounded(widen(rows) * scores[:, None], rows.dtype)
    found: torch.Tensor = torch.mul(rows, widen(scores)[:, None], out=dense_like(rows))
    return found


def sums_of_products(one: torch.Tensor, other: torch.Tensor, *, is_compiled: bool) -> torch.Tensor:
    """For each row, the sum of two matrices' products, in fp32 (of fp64 in that): [rows]."""
    if is_compiled or not is_multiplied_in_fp32(one):
        return (widen(one) * other).sum(-1)
    return torch.bmm(one[:, None], other[:, :, None], out_dtype=torch.float32)[:, 0, 0]


def is_multiplied_in_fp32(matrix: torch.Tensor) -> bool:
    """Whether ``torch.bmm`` can give fp32 of such a matrix."""
    return matrix.is_cuda and matrix.dtype in (torch.bfloat16, torch.float16)


def dense_like(matrix: torch.Tensor) -> torch.Tensor:
    """Memory for a matrix of that shape, row-major without gaps."""
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def pieces(count: int, elements: int) -> list[slice]:
    """Of so many rows, each of so many elements, those to compute at a time; at least one piece."""
    step = max(1, PIECE // max(elements, 1))
    return [slice(begin, begin + step) for begin in range(0, max(count, 1), step)]
