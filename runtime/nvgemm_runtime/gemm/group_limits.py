"""Size limits above which a provider's grouped kernels compute wrong results, or might.

quack describes grouped operands to TMA as if each group ended at row 2**30, so that only the
group's own rows are in bounds (``create_ragged_tensor_for_tma`` in ``copy_utils.py``, release
0.6.5). Loads from A and B cancel that offset with sums that wrap at 2**64, whatever the strides.
The store descriptor begins 2**30 rows before the result; with long rows that address is below 0, a
case never run on a GPU.
"""

from __future__ import annotations

from .problem import Op, Problem

LIMITED_PROVIDER = "quack"
"""Provider to which these limits apply.

The one provider that the runtime names: existing bundles state a kernel's provider and no limits.
"""

LARGEST_GROUP = 2**30
"""Most rows in A, or k terms, per group: ``BIG_INT`` in quack's ``copy_utils.py``. A group's
coordinates begin at this value minus the group length; negative ones are out of bounds. Group ends
are on the device, so the limit applies to all groups together."""

_LOWEST_ADDRESS = 6 * 2**44
"""Lowest address that Linux on x86-64 maps by default. Mappings grow down from 2**47, minus a
random distance up to 2**44 bytes (``vm.mmap_rnd_bits`` is at most 32, in 4 KiB pages), minus
earlier mappings, for which this leaves 2**44. CUDA addresses are the process's own. Programs that
map lower, with ``ulimit -s unlimited`` or a pool at low addresses, are not covered."""

LONGEST_ROW_BYTES = _LOWEST_ADDRESS // LARGEST_GROUP
"""Longest row pitch in the result: 98,304 bytes, or 49,152 16-bit columns."""


def too_large_reason(
    provider: str, problem: Problem, out_row_bytes: int | None = None
) -> str | None:
    """Returns why a grouped problem is too large for a provider; None if it fits.

    Args:
        provider: The kernels' provider.
        problem: Problem to compute, for any operation.
        out_row_bytes: Row pitch in the result, in bytes; None for a compact result.
    """
    op = problem.signature.op
    if out_row_bytes is None:
        out_row_bytes = problem.signature.out.bytes_of(problem.out_n)
    divided = problem.k if op is Op.K_GROUPED_MM else problem.m
    return too_large_reason_for(provider, op, divided, out_row_bytes)


def too_large_reason_for(provider: str, op: Op, divided: int, out_row_bytes: int) -> str | None:
    """Works like `too_large_reason`; ``divided`` is the extent split into groups."""
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
