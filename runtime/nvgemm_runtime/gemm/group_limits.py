"""Sizes of groups that a provider's kernels compute wrongly, or may.

quack describes operands of groups to TMA as if each group ended at row 2**30, so that its rows, and
none of the next group's, are inside of bounds (``create_ragged_tensor_for_tma`` of its
``copy_utils.py``, release 0.6.5). What A and B are loaded with cancels that offset by sums that
wrap at 2**64, whatever the strides. What the result is stored with begins 2**30 rows in front of
it, at an address below 0 where rows are long; no such address was ever executed.
"""

from __future__ import annotations

from .problem import Op, Problem

LIMITED_PROVIDER = "quack"
"""The provider whose kernels these limits hold for."""

LARGEST_GROUP = 2**30
"""Rows of A, or terms of k, of one group: ``BIG_INT`` of quack's ``copy_utils.py``. Coordinates of
a group begin at this less its length, and those below 0 are out of bounds. Ends are on the device,
so all that is divided into groups is held to it."""

_LOWEST_ADDRESS = 6 * 2**44
"""Where Linux maps memory on x86-64: from 2**47 down, less a random distance of at most 2**44 bytes
(``vm.mmap_rnd_bits`` is at most 32, of pages of 4 KiB), and less what is mapped above, for which
this leaves 2**44. CUDA's addresses are those of the process. A program that puts memory lower, as
``ulimit -s unlimited`` or a pool of low addresses may, is not known here."""

LONGEST_ROW_BYTES = _LOWEST_ADDRESS // LARGEST_GROUP
"""From one row of the result to the next: 98,304, which are 49,152 columns of 16 bits."""


def too_large(provider: str, problem: Problem, out_row_bytes: int | None = None) -> str | None:
    """Why a provider's kernels cannot be used for a problem of groups that is so large, or None.

    Args:
        provider: Of the kernels.
        problem: What is to be computed, of any operation.
        out_row_bytes: From one row of the result to the next; None where it has no gaps.
    """
    op = problem.signature.op
    if out_row_bytes is None:
        out_row_bytes = problem.signature.out.bytes_of(problem.out_n)
    divided = problem.k if op is Op.K_GROUPED_MM else problem.m
    return too_large_for(provider, op, divided, out_row_bytes)


def too_large_for(provider: str, op: Op, divided: int, out_row_bytes: int) -> str | None:
    """Like `too_large`, where ``divided`` is the extent that is divided into groups."""
    if provider != LIMITED_PROVIDER or not op.has_groups:
        return None
    if divided > LARGEST_GROUP:
        name = "k" if op is Op.K_GROUPED_MM else "m"
        return f"{name} is {divided}, {provider}'s kernels of groups take at most {LARGEST_GROUP}"
    if op.groups_rows and out_row_bytes > LONGEST_ROW_BYTES:
        return (
            f"rows of the result lie {out_row_bytes} bytes apart, {provider}'s kernels of groups "
            f"take at most {LONGEST_ROW_BYTES}; divide B's columns into several products"
        )
    return None
